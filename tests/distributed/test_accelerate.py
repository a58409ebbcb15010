"""accelerate's FSDP2 on a converted model.

accelerate offers FSDP on accelerators only. What it does then runs on a CPU, too, so its state is set here.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lptune import distributed, linear
from lptune.base.errors import UserError
from lptune.config import PrecisionConfig
from lptune.linear import MasterWeight
from tests.helpers.ranks import Ranks

HIDDEN, NUM_STEPS = 32, 3
KINDS = ("none", "int8_rowcol", "float8_rowwise", "float8_tensorwise")


def _model(kind: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Sequential, linear.Plan]:
    torch.manual_seed(0)
    layers = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
    model = nn.Sequential(*(nn.Sequential(layer, nn.GELU()) for layer in layers)).to(dtype)
    return model, linear.convert(model, PrecisionConfig(kind=kind, emulate=kind.startswith("float8")))


def _accelerator(mixed_precision: str, in_ram: bool) -> Any:
    """in_ram: all ranks have the weights; else rank 0's are sent to those of the others."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="size_based_wrap",
        min_num_params=HIDDEN * HIDDEN,
        cpu_ram_efficient_loading=not in_ram,
    )
    if mixed_precision != "no":
        plugin.set_mixed_precision(mixed_precision)
    accelerator: Any = Accelerator(cpu=True, mixed_precision=mixed_precision, fsdp_plugin=plugin)
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    assert accelerator.is_fsdp2
    return accelerator


def _batches() -> Tensor:
    return torch.randn(NUM_STEPS, 2, 8, HIDDEN, generator=torch.Generator().manual_seed(1))


def _under_accelerate(rank: int, num_ranks: int, in_ram: bool) -> dict[str, Tensor]:
    results = {}
    with distributed.session("cpu"):
        for kind in KINDS:
            model, plan = _model(kind)
            linear.gather_in_8_bits(model, torch.float32)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            accelerator = _accelerator("no", in_ram)
            model, optimizer = accelerator.prepare(model, optimizer)
            first_step, losses = linear.FirstStep(model, plan, enabled=True, report=lambda line: None), []
            for step in _batches():
                with first_step(num_passes=1):
                    loss = (model(step[rank]) - step[rank]).square().mean()
                    accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                losses.append(mean / num_ranks)
            assert first_step.verified.num_low_gathers == (0 if kind == "none" else 3)
            results[f"{kind} losses"] = torch.stack(losses)
            for name, weight in model.state_dict().items():
                results[f"{kind} {name}"] = weight.full_tensor()
    return results if rank == 0 else {}


@pytest.mark.parametrize("in_ram", [True, False])
def test_every_weight_is_trained_as_in_a_loop_of_ones_own(ranks: Ranks, in_ram: bool) -> None:
    found, _ = ranks.run(_under_accelerate, 2, in_ram)
    for kind in KINDS:
        model, _ = _model(kind)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for step in _batches():
            loss = torch.stack([(model(part) - part).square().mean() for part in step]).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        # The gradient of two ranks is a float32 sum in another order, and AdamW divides by its size.
        torch.testing.assert_close(found[f"{kind} losses"], torch.stack(losses), rtol=1e-5, atol=0)
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(found[f"{kind} {name}"], weight, rtol=1e-3, atol=1e-4)


def _prepare_bfloat16(rank: int, num_ranks: int) -> list[str]:
    messages = []
    with distributed.session("cpu"):
        for compute_dtype in (torch.bfloat16, torch.float32):
            model, _ = _model("int8_rowcol", torch.bfloat16)
            linear.gather_in_8_bits(model, compute_dtype)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            accelerator = _accelerator("bf16", in_ram=True)
            model, optimizer = accelerator.prepare(model, optimizer)
            weight = model[0][0].weight.to_local()
            assert isinstance(weight, MasterWeight)
            assert weight.dtype == weight.rows_NK.dtype == torch.float32  # as accelerate wants its masters
            try:
                model(_batches()[0, rank])
            except UserError as error:
                messages.append(str(error))
    return messages


def test_masters_become_float32_and_a_wrong_compute_dtype_is_one_line(ranks: Ranks) -> None:
    for (message,) in ranks.run(_prepare_bfloat16, 2):
        assert message == (
            "gather_in_8_bits() was called with compute_dtype=torch.float32, and fully_shard's "
            "mixed-precision policy has param_dtype torch.bfloat16; they must be the same"
        )
