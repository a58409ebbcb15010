"""The loop of a recipe gets facts from the library, which takes none of its code, batches and losses."""

import ast
import collections.abc
import importlib
import inspect
import typing
from collections.abc import Iterator

import pytest
from torch import Tensor

from lptune import checkpoint, data, distributed, training
from lptune.cli import catalog

RECIPES = ("full_finetune", "continued_pretrain", "full_dpo", "full_kto", "distill")
OWNERS = {
    "run": checkpoint.Run, "base": checkpoint.Base, "steps": training.Steps, "step": training.Step,
    "world": distributed.World,
}  # fmt: skip
"""What a recipe calls the objects that live as long as the run."""
FUNCTION = collections.abc.Callable
BANNED = (FUNCTION, data.Batch, Tensor)
A_LOSS = "the maths of a loss: a function of its arguments, which it does not keep"
TAKES = {
    "training.Step.add": (
        Tensor,
        "the loss for the report, detached; a step where it is not finite is skipped",
    ),
    "training.evaluating": (FUNCTION, "a decorator of the recipe's own function"),
    "training.losses_by_source": (Tensor, "sums for the report"),
    "training.mean_metrics": (Tensor, "sums for the report"),
    "training.kto_metrics": (Tensor, "sums for the report"),
    "training.answers_of": ((data.Batch, Tensor), A_LOSS),
    "training.kto_loss": ((data.Batch, Tensor), A_LOSS),
    "training.unrelated_ratio": ((data.Batch, Tensor), A_LOSS),
    "distributed.World.sum": (Tensor, "a sum over ranks"),
}
"""What takes one of BANNED, which, and why it may."""


def _parts(hint: object) -> Iterator[object]:
    yield typing.get_origin(hint) or hint
    for part in typing.get_args(hint):
        yield from _parts(part)


def _called(recipe: str) -> dict[str, typing.Any]:
    """Name -> what a recipe calls of the library, or decorates a function with."""
    tree = ast.parse(catalog.recipes()[recipe].read_text(encoding="utf-8"))
    used = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    used += [
        each for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for each in node.decorator_list
    ]
    found = {}
    for node in used:
        first, *names = ast.unparse(node).split(".")
        if not names:
            continue
        try:
            target = OWNERS[first] if first in OWNERS else importlib.import_module(f"lptune.{first}")
        except ModuleNotFoundError:  # torch, or an object of the recipe
            continue
        for name in names:
            target = getattr(target, name)
        where = target if inspect.isfunction(target) or inspect.isclass(target) else target.__func__
        found[f"{where.__module__.split('.')[1]}.{where.__qualname__}"] = where
    return found


def _takes(function: typing.Any) -> set[object]:
    of = function.__init__ if inspect.isclass(function) else function
    hints = typing.get_type_hints(of)
    hints.pop("return", None)
    return {part for hint in hints.values() for part in _parts(hint)} & set(BANNED)


def test_what_recipes_call_takes_no_function_no_batch_and_no_loss() -> None:
    called = {name: each for recipe in RECIPES for name, each in _called(recipe).items()}
    assert {"training.plan_steps", "training.Step.batches", "training.State", "checkpoint.Run.load"} <= set(
        called
    )
    assert len(called) > 35
    found = {name: kinds for name, each in called.items() if (kinds := _takes(each))}
    allowed = {
        name: set(kinds) if isinstance(kinds, tuple) else {kinds} for name, (kinds, _) in TAKES.items()
    }
    assert found == allowed


@pytest.mark.parametrize("cls", [checkpoint.Run, training.State, training.Steps, training.Step])
def test_no_method_of_what_lives_as_long_as_a_run_takes_a_function(cls: type) -> None:
    """Nor a batch or a loss, but for what TAKES names and what the library calls itself."""
    methods = [method for _, method in inspect.getmembers(cls, inspect.isfunction)]
    assert len(methods) > 4
    inner = {"training.State.passes": {data.Batch}, "training.State.step": {Tensor}}
    for method in methods:
        name = f"{cls.__module__.split('.')[1]}.{method.__qualname__}"
        allowed = inner.get(name, set()) | ({Tensor} if name == "training.Step.add" else set())
        assert _takes(method) == allowed, name


@pytest.mark.parametrize("recipe", RECIPES)
def test_main_is_short(recipe: str) -> None:
    tree = ast.parse(catalog.recipes()[recipe].read_text(encoding="utf-8"))
    (main,) = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "main"]
    assert main.end_lineno is not None
    assert main.end_lineno - main.lineno + 1 <= 60
