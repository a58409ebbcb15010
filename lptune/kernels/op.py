"""`@op` makes a custom op of torch, `lptune::NAME`, of a typed function NAME.

**A custom op** is a function that torch knows by its name and by the types of its arguments and results.
torch.compile traces any other function, and may then fuse, reorder or drop its arithmetic. It never looks
into a custom op: the compiled graph has one node `lptune::NAME`, which calls the function when the graph
runs. lptune's operations are opaque in this way for three reasons:

- Compiled and eager runs execute the same code, so they give the same bits.
- Code inside an op runs if and only if the op runs. So GEMMs are counted (record.py) and amaxes are measured
  (delayed.py) inside ops.
- C++ and Triton kernels read memory, and tensors have none while a graph is traced.

**A fake** returns the results of an op without values: empty tensors of the right shape, strides and dtype.
torch.compile and dry runs call ops with fake tensors, which have no memory, and torch then calls the fake
instead of the op. A wrong fake makes wrong graphs; `torch.library.opcheck` compares it with the op. Why not
run the reference on fake tensors? A dry run would count its temporary tensors as memory of the run.

An op is declared once. Its signature, contract, backends and fake stand beside each other:

    def _empty_double(x_MK: Tensor) -> Tensor:
        return torch.empty_like(x_MK)

    @op(fake=_empty_double)
    def double(x_MK: Tensor, *, finite: bool = False) -> Tensor:
        \"""`2 * x_MK`. finite: raise ValueError if a result is infinite.\"""
        ...

A fake has only those of the op's parameters that it needs; they are matched by name. Functions and fakes
return NamedTuples. torch wants flat tuples of tensors, so `@op` flattens each result and restores it for the
caller. `torch.library.custom_op` would do the same at four times the host time of a call (8.7 against 2.2
microseconds, two tensors and a string): for each call it looks for results that share memory, which opcheck
does in the tests, and for gradients. An op has no gradient; the autograd functions that call it do.

Two rules of torch.library remain:

- Parameters are tensors, bools, numbers, strings, dtypes, or sequences of numbers. A tuple arrives as a list.
- Each result is a new tensor: neither an argument, nor another result, nor a view of one.
"""

import functools
import inspect
from collections.abc import Callable
from itertools import islice
from typing import Any, ParamSpec, TypeVar, get_args, get_origin

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("lptune", "FRAGMENT")  # holds the ops as long as the process runs

_P = ParamSpec("_P")
_R = TypeVar("_R")


def op(fake: Callable[..., _R]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Declares the op `lptune::NAME`. NAME is the name of the decorated function, which implements the op.

    fake: returns empty results; its parameters are some of the op's, by name. Both return a tensor, a
    NamedTuple of tensors, or a tuple of tensors and such NamedTuples. Raises TypeError if the fake needs a
    parameter that the op lacks.
    """

    def declare(function: Callable[_P, _R]) -> Callable[_P, _R]:
        run: Callable[..., Any] = function
        name, signature = function.__name__, inspect.signature(function)
        parameters = list(signature.parameters.values())
        keywords = [each.name for each in parameters if each.kind == each.KEYWORD_ONLY]
        num_positional = len(parameters) - len(keywords)
        flat_type, named = _result(signature.return_annotation)
        needed = inspect.signature(fake).parameters.keys() & signature.parameters.keys()
        inspect.signature(fake).bind(**dict.fromkeys(needed))

        # torch allows no keyword-only tensor, so the schema has none. mypy still asks callers for keywords.
        schema = signature.replace(
            parameters=[each.replace(kind=each.POSITIONAL_OR_KEYWORD) for each in parameters],
            return_annotation=flat_type,
        )

        def implementation(*args: Any) -> Any:
            if torch.is_grad_enabled():  # an op has no gradient; torch warns where one is asked for
                with torch.no_grad():
                    return implementation(*args)
            if len(args) <= num_positional:  # torch leaves out arguments at the end that equal their defaults
                result = run(*args)
            else:
                options = dict(zip(keywords, args[num_positional:], strict=False))
                result = run(*args[:num_positional], **options)
            return result if named is None else _flat(result)

        def fake_by_name(*args: Any) -> Any:
            given = schema.bind(*args)
            given.apply_defaults()
            result: Any = fake(**{key: given.arguments[key] for key in needed})
            return result if named is None else _flat(result)

        vars(implementation)["__signature__"] = schema  # from which torch makes the schema
        schema_text = torch.library.infer_schema(implementation, mutates_args=())
        _LIBRARY.define(name + schema_text, tags=torch.Tag.pt2_compliant_tag)
        _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"lptune::{name}", fake_by_name, lib=_LIBRARY)
        registered: Any = getattr(torch.ops.lptune, name).default

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            result: _R = registered(*args, **kwargs)
            return result if named is None else named(result)

        return call

    return declare


def _result(annotation: Any) -> tuple[Any, Callable[[Any], Any] | None]:
    """The type of an op's flat result, and what makes a result of type `annotation` of it; None: nothing."""
    if annotation is Tensor:
        return Tensor, None
    if get_origin(annotation) is not tuple:
        return _tuple_of(len(annotation._fields)), lambda tensors: annotation(*tensors)
    parts = [(part, 1 if part is Tensor else len(part._fields)) for part in get_args(annotation)]

    def named(tensors: tuple[Tensor, ...]) -> Any:
        rest = iter(tensors)
        return tuple([next(rest) if part is Tensor else part(*islice(rest, size)) for part, size in parts])

    return _tuple_of(sum(size for _, size in parts)), named


def _tuple_of(num_tensors: int) -> Any:
    return tuple[(Tensor,) * num_tensors]  # type: ignore[misc]


def _flat(result: Any) -> tuple[Tensor, ...]:
    tensors: list[Tensor] = []
    for part in result:
        tensors += (part,) if isinstance(part, Tensor) else part
    return tuple(tensors)
