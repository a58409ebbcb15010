"""Freezing: parameters that a run does not train.

A frozen parameter has `requires_grad=False`. autograd then computes no gradient for it, so FSDP reduces none
and the optimizer keeps no moments: of the 16 bytes of a parameter under AdamW, the 4 of its value are left.
The gradient still passes through a frozen layer to those before it; a frozen layer saves one of three GEMMs.
"""

import itertools
from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from lptune.base.errors import UserError, closest


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Sets `requires_grad=False` of each parameter that a pattern matches. Call it before `linear.convert`,
    whose plan names the frozen parameters.

    A pattern matches the name of a parameter or of a module that contains it, or the last components of one,
    with the wildcards of `fnmatch`: `model.layers.3`, `model.layers.[0-3].*`, `embed_tokens`, `*norm*`. A
    tied weight is one parameter: either of its names freezes it. Raises UserError for a pattern without a
    match, and if no parameter is left to train.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        found = [parameter for name, parameter in parameters.items() if _matches(name, pattern)]
        if not found:
            known = {end for name in parameters for whole in _wholes(name) for end in _ends(whole)}
            raise UserError(f"freeze: {pattern!r} matches no parameter{closest(pattern, sorted(known))}")
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError("freeze: every parameter is frozen, so there is nothing to train; leave some out")


def _matches(name: str, pattern: str) -> bool:
    return any(fnmatchcase(whole, pattern) or fnmatchcase(whole, f"*.{pattern}") for whole in _wholes(name))


def _wholes(name: str) -> list[str]:
    """The parameter and the modules that contain it: `a.b.weight` -> a, a.b, a.b.weight."""
    return list(itertools.accumulate(name.split("."), "{}.{}".format))


def _ends(name: str) -> list[str]:
    """The name and its last components: `a.b.weight` -> a.b.weight, b.weight, weight."""
    components = name.split(".")
    return [".".join(components[first:]) for first in range(len(components))]
