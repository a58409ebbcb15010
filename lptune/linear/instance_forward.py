"""Handles a `forward` in a module's `__dict__`, which hides the forward of the module's class.

accelerate's hooks (`device_map`), transformers' tensor parallelism (`tp_plan`) and many patches assign a
wrapper to `module.forward`. The wrapper keeps the old `module.forward` and calls it. This old forward is
nn.Linear.forward, bound to the module; it stays nn.Linear.forward when `convert` changes the module's class.
So `redirect` finds where the wrapper keeps the old forward (a closure, a partial or an attribute) and
replaces it by a function that looks up the forward of the module's class at every call.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

Replace = Callable[[Any], None]


def has_own_forward(module: nn.Module) -> bool:
    """Whether the instance attribute `forward` hides the forward of the class of `module`."""
    return "forward" in vars(module)


def redirect(module: nn.Linear, *, dry_run: bool = False) -> bool:
    """Makes the instance's forward call the forward of the module's class, also after the class changes.

    Returns whether it found a place where the wrapper keeps the old forward. dry_run: only search.
    """
    places = list(_places(module))
    for replace in places if not dry_run else ():
        replace(MethodType(_forward_of_class, module))
    return bool(places)


def _forward_of_class(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs)


def _places(module: nn.Linear) -> Iterator[Replace]:
    """Yields, for each place that keeps nn.Linear.forward bound to `module`, a function that replaces it."""

    def is_old(value: Any) -> bool:
        old = (nn.Linear.forward, _forward_of_class)
        return isinstance(value, MethodType) and value.__self__ is module and value.__func__ in old

    own = vars(module)
    for name, value in own.items():
        if is_old(value):  # `forward` itself, or the attribute that accelerate calls _old_forward
            yield lambda new, name=name: own.__setitem__(name, new)  # type: ignore[misc]
    seen, waiting = set[int](), [own["forward"]]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, (nn.Module, type)):
            continue
        seen.add(id(each))
        if isinstance(each, MethodType):
            waiting += [each.__func__, each.__self__]
        elif isinstance(each, partial):
            kept = (each.func, *each.args, *each.keywords.values())
            if any(is_old(value) for value in kept):
                yield lambda new, each=each: _replace_in_partial(each, is_old, new)  # type: ignore[misc]
            waiting += [value for value in kept if callable(value) and not is_old(value)]
        else:
            for cell in (each.__closure__ or ()) if isinstance(each, FunctionType) else ():
                try:
                    value = cell.cell_contents
                except ValueError:  # a variable that has no value yet
                    continue
                if is_old(value):
                    yield lambda new, cell=cell: setattr(cell, "cell_contents", new)  # type: ignore[misc]
                elif callable(value):
                    waiting.append(value)


def _replace_in_partial(each: "partial[Any]", is_old: Callable[[Any], bool], new: Any) -> None:
    func, args, keywords = (
        new if is_old(each.func) else each.func,
        tuple(new if is_old(value) else value for value in each.args),
        {name: new if is_old(value) else value for name, value in each.keywords.items()},
    )
    each.__setstate__((func, args, keywords, vars(each)))  # type: ignore[attr-defined]
