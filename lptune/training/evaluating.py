"""Evaluation mode: what a forward computes for an evaluation, a sample or a reference is not what it computes
for a gradient. A decoder of lptune has no dropout, but a copied recipe may add it, and dropout would make
held-out losses, early stops and the best checkpoint random.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

_M = TypeVar("_M", bound=nn.Module)
_P = ParamSpec("_P")
_R = TypeVar("_R")


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Has `model` in evaluation mode; afterwards each of its modules has the mode that it had."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def evaluating(function: Callable[Concatenate[_M, _P], _R]) -> Callable[Concatenate[_M, _P], _R]:
    """A decorator: runs `function`, whose first argument is the model, without gradients and with the model
    in evaluation mode.
    """

    @wraps(function)
    def run(model: _M, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch.no_grad(), eval_mode(model):
            return function(model, *args, **kwargs)

    return run
