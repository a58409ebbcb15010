"""A Run is files and nothing else: a recipe's loop cannot move into it."""

import collections.abc
import inspect
import typing

import pytest
from torch import Tensor

from lptune import checkpoint, data


def _parts(hint: object) -> typing.Iterator[object]:
    yield typing.get_origin(hint) or hint
    for part in typing.get_args(hint):
        yield from _parts(part)


@pytest.mark.parametrize("cls", [checkpoint.Run, checkpoint.RunWriter])
def test_no_method_of_a_run_takes_a_function_a_batch_or_a_loss(cls: type) -> None:
    methods = [method for _, method in inspect.getmembers(cls, inspect.isfunction)]
    assert len(methods) > 5
    for method in methods:
        hints = typing.get_type_hints(method)
        hints.pop("return", None)
        for name, hint in hints.items():
            found = set(_parts(hint))
            assert not found & {collections.abc.Callable, data.Batch, data.Loader, data.Rows, Tensor}, (
                f"{method.__qualname__}: {name}"
            )
