"""Updates of what is in host memory: the bits of an update in place, whatever is there and whoever waits."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lptune import distributed, linear
from lptune.config import OptimizerConfig, ParallelConfig
from lptune.training import chunked_adamw, optimizer
from lptune.training.from_host import FromHost
from lptune.training.in_backward import build_update
from tests.helpers import tiny_run
from tests.helpers.pinning import pinned_addresses
from tests.helpers.ranks import Ranks
from tests.helpers.tiny_run import TinyRun

CPU = torch.device("cpu")
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "adamw": ("int8_rowcol", {}, {}),
    "no master": ("int8_rowcol", {"kind": "adamw_8bit", "master": "none"}, {"compute_dtype": "bfloat16"}),
    "bf16": ("float8_tensorwise", {"kind": "adamw_bf16"}, {}),
    "stored in INT8": ("int8_weight_only", {"kind": "adamw_8bit"}, {}),
}
"""precision.kind, keys of the optimizer, and others."""


def _trained(world: distributed.World, kind: str, host: str, *, in_backward: bool) -> dict[str, Tensor]:
    """Weights, moments and losses after three steps. host: what is in host memory: nothing, moments, all."""
    precision, keys, more = KINDS[kind]
    offload = host == "all"
    cfg = tiny_run.config(
        precision,
        optimizer=OptimizerConfig(
            lr=1e-3, weight_decay=0.1, in_backward=in_backward, cpu_offload=host == "moments", **keys
        ),
        parallel=ParallelConfig(
            cpu_offload=offload, reshard_after_forward=True, reduce_every_micro_batch=True
        ),
        max_grad_norm=0.0,
        **more,
    )
    everything = mock.patch.object(optimizer, "kept_on_host", return_value=FromHost(CPU, weights=True))
    with pinned_addresses() as addresses, everything if offload else mock.MagicMock():
        run = TinyRun(cfg, world, tiny_run.decoder_config())
        update = build_update(run.model, run.optimizer, world, cfg, run.low)
        found = {}
        for step in range(3):
            batch = tiny_run.micro_batch(step, world.data_rank, run.seed)
            numbers = [tiny_run.micro_batch(step, n, run.seed).num_targets for n in range(world.data_size)]
            with run.low.step(step, 1):
                for each in distributed.accumulate(run.model, [batch], world, cfg, run.low):
                    loss = tiny_run.batch_loss(run.model, each, world)
                    update.before_backward(loss)
                    (loss * (world.data_size / sum(numbers))).backward()
            left = [p for p in run.model.parameters() if p.grad is not None]
            # Of the last blocks that FSDP reduces, none is reduced after them.
            assert len(left) < len(list(run.model.parameters())) or not in_backward
            found[f"loss {step}"] = torch.tensor(update(loss.detach(), sum(numbers)).loss)
        assert bool(addresses) == offload
        distributed.reshard(run.model)
        for name, parameter in run.model.named_parameters():
            found[name] = linear.dequantized(parameter.detach())
            found |= {
                f"{key}/{name}": value
                for key, value in run.optimizer.state[parameter].items()
                if isinstance(value, Tensor)
            }
        return {name: distributed.on_this_rank(tensor).clone() for name, tensor in found.items()}


def _differing(rank: int, num_ranks: int, kinds: list[str], hosts: list[str]) -> dict[str, list[str]]:
    found = {}
    with distributed.session("cpu") as world, mock.patch.object(chunked_adamw, "_VISITING", 200):
        for kind in kinds:
            expected = _trained(world, kind, "nothing", in_backward=False)
            for host in hosts:
                for in_backward in (False, True):
                    actual = _trained(world, kind, host, in_backward=in_backward)
                    assert actual.keys() == expected.keys()
                    found[f"{kind}, {host}, {in_backward}"] = [
                        name for name, tensor in expected.items() if not torch.equal(tensor, actual[name])
                    ]
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_it_has_the_bits(num_ranks: int, ranks: Ranks) -> None:
    for found in ranks.run(_differing, num_ranks, list(KINDS), ["moments", "all"]):
        for name, differing in found.items():
            assert differing == [], name
