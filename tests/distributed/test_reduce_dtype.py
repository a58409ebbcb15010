"""parallel.reduce_dtype: the mean over ranks within the rounding of one exchange; what runs is checked."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from lptune import distributed
from lptune.config import ParallelConfig
from lptune.linear import PrecisionNotAppliedError
from lptune.linear.weights.reduce_scatter import BLOCK, NarrowReduceScatter
from tests.helpers import tiny_run
from tests.helpers.ranks import Ranks
from tests.helpers.tiny_run import TinyRun

SIZES = (3 * BLOCK, 2 * BLOCK + 5, 7)
NUM_KEYS = 200


def _values(rank: int, size: int, num_ranks: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + size)
    values = torch.randn(num_ranks, size, generator=generator)
    values[:, 0] *= 1000  # decides the scale of its block alone
    return values


def _reduced(values_nS: Tensor, dtype: torch.dtype, key: int) -> Tensor:
    comm = NarrowReduceScatter("group", dtype)
    comm.key = key
    out_S = torch.empty(values_nS.shape[1])
    assert dist.group.WORLD is not None
    comm(out_S, values_nS.flatten(), dist.group.WORLD, dist.ReduceOp.AVG)
    return out_S


def _beside_float64(rank: int, num_ranks: int) -> list[dict[str, Tensor]]:
    found = []
    with distributed.session("cpu"):
        for size in SIZES:
            parts_nS = torch.stack([_values(each, size, num_ranks)[rank] for each in range(num_ranks)])
            mine = _values(rank, size, num_ranks)
            found.append(
                {
                    "parts": parts_nS,
                    "bfloat16": _reduced(mine, torch.bfloat16, 0),
                    "int8": torch.stack(
                        # As training has it, each rank has keys of its own.
                        [_reduced(mine, torch.int8, 7 + key * num_ranks + rank) for key in range(NUM_KEYS)]
                    ),
                }
            )
        spoilt = _values(rank, SIZES[1], num_ranks)
        if rank == num_ranks - 1:
            spoilt[0, 3], spoilt[1, -1] = torch.nan, torch.inf
        found.append({"spoilt": _reduced(spoilt, torch.int8, 1)})
        with pytest.raises(RuntimeError, match="has no random key"):
            NarrowReduceScatter("group", torch.int8)(
                torch.empty(7), mine.flatten(), dist.group.WORLD, dist.ReduceOp.SUM
            )
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_it_is_the_mean_within_the_rounding_of_each_value_once(num_ranks: int, ranks: Ranks) -> None:
    by_rank = ranks.run(_beside_float64, num_ranks)
    for found in by_rank:
        for each in found[:-1]:
            parts_nS = each["parts"].double()
            mean_S = parts_nS.mean(0)
            assert torch.equal(
                each["bfloat16"], parts_nS.to(torch.bfloat16).float().sum(0, dtype=torch.float32) / num_ranks
            )
            padded = torch.nn.functional.pad(parts_nS, (0, -parts_nS.shape[1] % BLOCK))
            step_nS = padded.unflatten(1, (-1, BLOCK)).abs().amax(2).repeat_interleave(BLOCK, 1) / 127
            step_nS = step_nS[:, : parts_nS.shape[1]]
            errors_kS = each["int8"].double() - mean_S
            # Less than a step for each rank, and a few roundings to float32.
            assert (errors_kS.abs() <= step_nS.mean(0) * (1 + 2**-16)).all()
            assert errors_kS.abs().max() > 0.2 * step_nS.mean(0).max()  # 8 bits were exchanged
            # An error has the mean 0, and a variance of at most step**2 / 4 for each rank. Of a few hundred
            # means some exceed 5 deviations once in a thousand runs of other keys.
            deviation_S = (step_nS.square().sum(0) / 4).sqrt() / num_ranks / NUM_KEYS**0.5
            assert (errors_kS.mean(0).abs() < 5 * deviation_S + 2**-22 * mean_S.abs()).all()
            # Ranks draw bits of their own: errors of a sum are smaller than those of its parts together.
            worst_S = (step_nS.square() / 4).sum(0).sqrt() / num_ranks
            assert errors_kS.square().mean().sqrt() < 1.1 * worst_S.square().mean().sqrt()
    first, second = (found[-1]["spoilt"] for found in by_rank[:2])
    assert first[:BLOCK].isnan().all()
    assert first[BLOCK:].isfinite().all()
    assert second[2 * BLOCK :].isnan().all()
    assert second[: 2 * BLOCK].isfinite().all()


def _trained(rank: int, num_ranks: int, replicate: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with distributed.session("cpu", ParallelConfig(replicate=replicate)) as world:
        for dtype in ("float32", "bfloat16", "int8"):
            parallel = ParallelConfig(replicate=replicate, reduce_dtype=dtype)
            run = TinyRun(tiny_run.config("int8_rowcol", parallel=parallel), world, tiny_run.decoder_config())
            found[dtype], found[f"{dtype}, line"] = _gradients(run)
        found["again"], _ = _gradients(run)
        found["other step"], _ = _gradients(run, key_of=3)
        found["beside others"], _ = _gradients(run, also=_exchange_as_muon_does)
        block = next(iter(run.model.blocks))  # reduces as FSDP does by itself
        block.set_custom_reduce_scatter(DefaultReduceScatter())
        with pytest.raises(PrecisionNotAppliedError, match="did not reduce gradients as planned"):
            _gradients(run)
    return found


def _exchange_as_muon_does(run: TinyRun) -> None:
    """In backward: optimizer.in_backward."""
    group = run.world.mesh.get_group("fsdp")
    dist.all_to_all_single(torch.empty(4), torch.ones(4), group=group)


def _nothing(run: TinyRun) -> None:
    pass


def _gradients(
    run: TinyRun, key_of: int = 0, also: Callable[[TinyRun], None] = _nothing
) -> tuple[dict[str, Tensor], str]:
    """Those of the first step's rows, and the line of its collectives. key_of: step of the random bits. also:
    runs in the verified step.
    """
    run.model.zero_grad()
    lines = list[str]()
    dtype = getattr(torch, run.cfg.compute_dtype)
    verified = distributed.verify_collectives(run.model, run.world.mesh, dtype, lines.append)
    with run.low.step(key_of, 1), verified:
        run.forward_backward(0)
        also(run)
    return run.gradients(), lines[0]


@pytest.mark.parametrize(
    ("num_ranks", "replicate"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)], ids=["fsdp", "hsdp"]
)
def test_a_step_exchanges_what_it_says_and_its_gradients_are_those_of_float32(
    num_ranks: int, replicate: int, ranks: Ranks
) -> None:
    found = ranks.run(_trained, num_ranks, replicate)[0]
    for dtype, error in (("bfloat16", 2**-8), ("int8", 0.02)):
        squares, norm = 0.0, 0.0
        for name, gradient in found["float32"].items():
            squares += float((found[dtype][name] - gradient).double().square().sum())
            norm += float(gradient.double().square().sum())
        # bfloat16 rounds a value by at most 2**-9 of it; 8 bits by a step, amax / 127 of 128 values, whose
        # amax is about 2.7 deviations: 0.5 * 2.7 / 127 = 0.011 of a rank's gradient.
        assert 0 < (squares / norm) ** 0.5 < error, dtype
    assert "reduce_scatter float32" in found["float32, line"].replace(" over fsdp", "")
    for dtype, stored in (("bfloat16", "bfloat16"), ("int8", "uint8")):
        line = found[f"{dtype}, line"].replace(" over fsdp", "")
        assert f"all_to_all {stored}" in line
        assert "reduce_scatter" not in line
    for name, each in found["int8"].items():
        assert torch.equal(found["again"][name], each)
        assert torch.equal(found["beside others"][name], each)
    assert any(not torch.equal(found["other step"][name], each) for name, each in found["int8"].items())
