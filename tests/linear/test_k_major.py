"""On a device that wants both operands contiguous along the contraction, nothing in 8 bits is copied for it.

Quantizers write the layout that a GEMM wants. A copy of bytes from rows to columns costs more than quantizing
did, and inside the op of a GEMM neither torch.compile nor another layer could share it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lptune import linear
from lptune.config import PRECISION_KINDS, PrecisionConfig

FAMILIES = (linear.kinds.rowwise, linear.kinds.tensorwise, linear.kinds.blockwise)
KINDS = [kind for kind in linear.KINDS if kind != "int8_weight_only"]  # whose GEMMs are not in 8 bits
CASES = [
    (kind, stochastic)
    for kind in KINDS
    for stochastic in (False, True)
    if not stochastic or PRECISION_KINDS[kind].can_round_stochastically
]


class _Copies(TorchDispatchMode):
    """Counts operations of torch, outside the ops of lptune, that write a tensor of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor) and each.element_size() == 1]
        is_view = any(each.alias_info for each in func._schema.returns)
        if made and not is_view and func.namespace != "lptune" and made[0].dtype != torch.bool:
            self.found.append(str(func))
        return out


@pytest.mark.parametrize(("kind", "stochastic"), CASES)
def test_every_operand_comes_k_major_and_no_byte_is_copied(
    kind: str, stochastic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    strides: list[tuple[int, int]] = []

    def checked(gemm: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(a_MK: Tensor, b_KN: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            strides.append((a_MK.stride(1), b_KN.stride(0)))
            return gemm(a_MK, b_KN, *args, **kwargs)

        return run

    for family in FAMILIES:
        monkeypatch.setattr(family, "k_major", lambda device: True)
        name = "block_scaled_mm" if family is linear.kinds.blockwise else "scaled_mm"
        monkeypatch.setattr(family, name, checked(getattr(family, name)))
    model = nn.Sequential(nn.Linear(160, 96, bias=False))
    precision = PrecisionConfig(kind=kind, stochastic_rounding=stochastic, emulate=True)  # type: ignore[arg-type]
    plan = linear.convert(model, precision)
    linear.StochasticRounding(model, plan, seed=0).start(0, 0)
    x = torch.randn(64, 160, requires_grad=True)
    with linear.DelayedScaling(plan, torch.device("cpu")).step(), _Copies() as copies:
        model(x).sum().backward()
    num_gemms = 2 if kind == "float8_rowwise_with_gw_hp" else 3
    assert strides == [(1, 1)] * num_gemms
    # x, which `folded` saves in 8 bits, is by tokens in `output` and by channels in grad_weight: one copy.
    assert len(copies.found) == (precision.resolved_grad_weight == "folded")


def test_a_copy_of_bytes_is_found() -> None:
    x = torch.zeros(4, 6, dtype=torch.int8)
    with _Copies() as copies:
        x.t().contiguous()
        x.view(2, 12).t()
    assert copies.found == ["aten.clone.default"]
