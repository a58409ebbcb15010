"""Which parameters keep float32 in a run whose compute dtype is bfloat16.

    stored in float32      transformers' `from_pretrained(dtype=bfloat16)` leaves them so: a class names them
                           (`_keep_in_fp32_modules_strict`), or makes them in float32 whatever is asked for
    computed in float32    all that the model's own code does with them has a result in float32: routers that
                           cast their weight, decay rates of recurrent layers, norms that multiply in float32

The second are not listed anywhere; they are seen. A block of each kind runs once on fake tensors, which have
dtypes and no values, and each operation on a parameter is looked at. A master in float32 takes the place of
such a parameter without a change of any other dtype: the rounding to bfloat16 and back is what falls away.
Code that reads the dtype of a parameter would change others. So the blocks run again with what was found, and
what they do not run with is left out.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lptune.base.errors import UserError
from lptune.base.text import first_line
from lptune.models.backbone import build_on_meta
from lptune.models.documents import DocumentBounds
from lptune.models.hf.facts import HFFacts

_SEQ_LEN = 16
_PRODUCTS = {getattr(torch.ops.aten, name) for name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")}


def names_in_float32(causal: Any) -> Callable[[str], bool]:
    """Whether the class of `causal`, a model of transformers, names the parameter of this name."""
    from transformers.core_model_loading import build_glob_alternation

    strict = sorted(causal._keep_in_fp32_modules_strict or ())
    pattern = build_glob_alternation(strict)[0] if strict else None
    return lambda name: pattern is not None and pattern.search(name) is not None


def stored_in_float32(causal: Any) -> frozenset[str]:
    """The names of the parameters that transformers keeps. causal: of transformers, made for bfloat16."""
    named = names_in_float32(causal)
    return frozenset(
        name
        for name, parameter in causal.named_parameters()
        if parameter.dtype == torch.float32 or named(name)
    )


@functools.lru_cache(maxsize=8)
def computed_in_float32(facts: HFFacts) -> frozenset[str]:
    """The names of the parameters with which the model of `facts` computes in float32 alone, if all others
    are in bfloat16.

    Raises UserError if it does not run in bfloat16.
    """
    try:
        model, seen = _run(facts, frozenset())
    except DataDependentOutputException:  # code that reads values, which fake tensors do not have
        return frozenset()
    except Exception as error:  # whatever a model of transformers raises
        raise UserError(
            f"{facts.where}: {facts.family!r} does not run in bfloat16 ({first_line(error)}); set "
            "compute_dtype=float32"
        ) from None
    found = frozenset(name for name, dtypes in seen.results.items() if dtypes == {torch.float32})
    if not _goes_with(facts, found):  # code that reads a parameter's dtype takes it for that of its input
        found = frozenset(name for name in found if _goes_with(facts, frozenset([name])))
    return frozenset(_in_all_blocks(found, f"{model.blocks_name}.", facts))


def _run(facts: HFFacts, in_float32: frozenset[str]) -> "tuple[Any, _Uses]":
    """A block of each kind on fake tensors, parameters in bfloat16 but for those of these names; what was
    seen.
    """
    model: Any = build_on_meta(facts.with_layers(facts.one_of_each()))
    for name, parameter in model.named_parameters():
        if name not in in_float32:
            parameter.data = parameter.data.bfloat16()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model.to_empty(device="cpu")
        model.reset_buffers("cpu")
        tokens_BS = torch.zeros(1, _SEQ_LEN, dtype=torch.int64)
        with _Uses(model) as seen:
            hidden_BSH = model.body(tokens_BS, DocumentBounds.single(1, _SEQ_LEN, tokens_BS.device))
    if hidden_BSH.dtype != torch.bfloat16:  # which the head, in bfloat16, does not multiply
        raise TypeError(f"its hidden states are {hidden_BSH.dtype}")
    return model, seen


def _goes_with(facts: HFFacts, in_float32: frozenset[str]) -> bool:
    """Whether the model runs with these parameters in float32."""
    try:
        _run(facts, in_float32)
    except Exception:  # whatever a model of transformers raises
        return False
    return True


def _in_all_blocks(names: frozenset[str], before: str, facts: HFFacts) -> Iterator[str]:
    """`names`, and those of the other blocks of a kind. before: what a block's number follows in a name."""
    numbers = range(len(facts.layers)) if facts.kept is None else facts.kept
    kinds = dict(zip(numbers, facts.layers, strict=True))
    for name in names:
        number, _, rest = name.removeprefix(before).partition(".")
        if not name.startswith(before):
            yield name
            continue
        for other, kind in kinds.items():
            if kind == kinds[int(number)]:
                yield f"{before}{other}.{rest}"


class _Uses(TorchDispatchMode):
    """Within it, `results` gets the dtypes of what is computed with each parameter, views of it apart."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: dict[str, set[torch.dtype]] = {}
        self._names = {each.untyped_storage()._cdata: name for name, each in model.named_parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        floats = {each.dtype for each in operands if each.is_floating_point()}
        if func.overloadpacket in _PRODUCTS and len(floats) > 1:
            raise TypeError(f"{func}: operands of {floats}")  # fake tensors multiply them
        result = func(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        for operand in operands:
            storage = operand.untyped_storage()._cdata
            if (name := self._names.get(storage)) is not None:
                dtypes = {each.dtype for each in made if each.untyped_storage()._cdata != storage}
                self.results.setdefault(name, set()).update(dtypes)
        return result
