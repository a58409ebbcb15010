"""Ranks that have the experts among them (parallel.expert) compute what one rank computes."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from lptune import distributed, linear, models
from lptune.base.errors import UserError
from lptune.config import DataConfig, OptimizerConfig, ParallelConfig, PrecisionConfig
from lptune.distributed import expert_parallel, record_collectives
from lptune.plan.dry_run import dry_run
from tests.helpers import hf_types, packed, tiny_run
from tests.helpers.ranks import Ranks
from tests.helpers.slow import slow_but

LIMIT = 1e-5
"""Of a norm, relative; as in test_context_parallel."""


class Case(NamedTuple):
    """A model of transformers, and how it runs."""

    model: str
    kind: str = "none"
    recomputed: str = "none"
    compile: str = "none"
    to_same: bool = False
    """Whether all tokens go to the same two experts, which one rank has."""


def _made(folder: Path, cases: list[Case]) -> str:
    for kind in {case.model for case in cases}:
        more = {"layer_types": ["sliding_attention", "full_attention"]} if kind == "gpt_oss" else {}
        hf_types.causal(kind, num_hidden_layers=2, **more).save_pretrained(folder / kind)
    return str(folder)


def _step(world: distributed.World, case: Case, folder: str, num_batches: int) -> dict[str, Tensor]:
    """Losses, logits and whole gradients of micro-batches that are dealt out to the ranks."""
    expert = 1 if world.experts is None else world.experts.group.size
    cfg = tiny_run.config(
        case.kind,
        data=DataConfig(source="unused", seq_len=packed.SEQ_LEN),
        parallel=ParallelConfig(expert=expert),
        compile=case.compile,
        activation_checkpointing=case.recomputed,
    )

    def edit(name: str, value: Tensor) -> Tensor:
        is_router = name.endswith(("gate.weight", "router.weight", "router.bias"))
        return torch.zeros_like(value) if case.to_same and is_router else value  # a tie: the same experts win

    model = packed.built(models.read_config(Path(folder) / case.model, "transformers"), cfg, world, edit)
    trips = _watched(model)
    mine = list(range(num_batches))[world.data_rank :: world.data_size]
    found, losses = {}, torch.zeros(num_batches)
    logits = torch.zeros(num_batches, 2, packed.SEQ_LEN, 256)
    with torch.no_grad():
        for number in mine:
            logits[number] = model(packed.batch(number)[0], packed.bounds())
    found["logits"] = torch.tensor(world.sums(logits.flatten()))
    for number in mine:
        distributed.sync_gradients(model, number == mine[-1])
        tokens_BS, labels_BS = packed.batch(number)
        loss = model(tokens_BS, packed.bounds(), labels_BS)
        losses[number] += loss.detach()
        (loss * (world.data_size / 64)).backward()
    found["rows of this rank"] = torch.tensor([sum(trip.received) for trip in trips], dtype=torch.float32)
    found["losses"] = torch.tensor(world.sums(losses))
    return found | packed.gradients(model)


def _steps(
    rank: int, num_ranks: int, folder: str, cases: list[Case], parallel: dict[str, int]
) -> list[dict[str, Tensor]]:
    compiles = torch.compile

    def traced(*args: Any, **keys: Any) -> Any:  # writes no C++: what is compiled is the same
        return compiles(*args, **keys, backend="aot_eager")

    with (
        distributed.session("cpu", ParallelConfig(**parallel)) as world,
        mock.patch.object(torch, "compile", traced),
    ):
        return [_step(world, case, folder, num_ranks) for case in cases]


def _steps_alone(cases: list[Case], folder: Path, num_batches: int) -> list[dict[str, Tensor]]:
    with distributed.session("cpu") as world:
        return [_step(world, case, str(folder), num_batches) for case in cases]


def _differences(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert actual.keys() == expected.keys()
    return {
        name: float((actual[name] - each).norm() / each.norm())
        for name, each in expected.items()
        if each.norm() or actual[name].norm()
    }


def _watched(model: models.Backbone) -> list[expert_parallel.Trip]:
    """The trips of every later forward."""
    trips: list[expert_parallel.Trip] = []
    for mixture in model.mixtures.values():
        if exchange := getattr(mixture, "exchange", None):
            begin = exchange.trip
            exchange.trip = lambda *args, begin=begin: trips.append(begin(*args)) or trips[-1]
    return trips


FLOAT32 = [Case("qwen3_moe"), Case("gpt_oss")]
FULL = Case("gpt_oss", recomputed="full")


@pytest.mark.parametrize(
    ("num_ranks", "parallel", "cases"),
    slow_but(
        lambda num_ranks, parallel, cases: cases[:2] == FLOAT32 and parallel != {"expert": 4},
        [
            (2, {"expert": 2}, [*FLOAT32, Case("qwen3_moe", to_same=True), Case("gpt_oss", to_same=True)]),
            (2, {"expert": 2}, [FULL, Case("qwen3_moe", recomputed="selective")]),
            (
                2,
                {"expert": 2},
                [Case("gpt_oss", "none", "none", "block"), Case("qwen3_moe", "none", "full", "block")],
            ),
            (4, {"expert": 2}, FLOAT32),
            (4, {"expert": 4}, FLOAT32),
            (4, {"expert": 2, "replicate": 2}, FLOAT32),
        ],
    ),
    ids=["two", "recomputed", "compiled", "two pairs", "four", "HSDP"],
)
def test_losses_logits_and_gradients_are_those_of_one_rank(
    num_ranks: int, parallel: dict[str, int], cases: list[Case], ranks: Ranks, tmp_path: Path
) -> None:
    by_rank = ranks.run(_steps, num_ranks, _made(tmp_path, cases), cases, parallel)
    alone = [case._replace(compile="none", recomputed="none") for case in cases]
    for number, expected in enumerate(_steps_alone(alone, tmp_path, num_ranks)):
        rows = torch.stack([each[number].pop("rows of this rank") for each in by_rank])
        if cases[number].to_same:
            assert ((rows > 0).sum(0) == 1).all(), rows
        del expected["rows of this rank"]
        for name, error in _differences(by_rank[0][number], expected).items():
            assert error < LIMIT, f"{cases[number]}: {name} differs by {error:.1e}"


@pytest.mark.parametrize("kind", ["int8_rotated", "int8_rowcol", "float8_rowwise"])
def test_forward_in_8_bits_has_the_bits_of_one_rank(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    cases = [Case("qwen3_moe", kind), Case("gpt_oss", kind, to_same=True)]
    by_rank = ranks.run(_steps, 2, _made(tmp_path, cases), cases, {"expert": 2})
    for actual, expected in zip(by_rank[0], _steps_alone(cases, tmp_path, 2), strict=True):
        assert torch.equal(actual["logits"], expected["logits"])
        assert torch.equal(actual["losses"], expected["losses"])
        # Scales of columns are over the tokens of all ranks, and on one rank over those of a micro-batch.
        noise = _differences(actual, expected | {"rows of this rank": actual["rows of this rank"]})
        assert max(noise.values()) < 0.05, noise


def _counted(rank: int, num_ranks: int, folder: str, kind: str, keys: dict[str, str], fault: str) -> Any:
    """Calls and bytes of a step over the axis `expert`, by dtype, and those of the closed form; or the error
    of its verification.
    """
    with distributed.session("cpu", ParallelConfig(expert=2)) as world:
        cfg = tiny_run.config(
            kind, precision=keys, data=DataConfig(source="unused", seq_len=packed.SEQ_LEN),
            parallel=ParallelConfig(expert=2),
        )  # fmt: skip
        model = models.build_on_meta(models.read_config(Path(folder) / "qwen3_moe", "transformers"))
        linear.convert(model, cfg.precision, device=world.device)
        distributed.parallelize(model, world, cfg)
        distributed.materialize(model, world, cfg)
        with torch.no_grad():
            for parameter in model.parameters():
                distributed.local_rows(parameter)[0].normal_(0.0, 0.02)
        mixtures: list[Any] = list(model.mixtures.values())
        if fault == "high":
            mixtures[1].exchange.spec = None
        trips = _watched(model)
        reported: list[str] = []
        tokens_BS, labels_BS = packed.batch(rank)
        try:
            with (
                record_collectives(world.mesh, None, world.experts) as counted,
                distributed.verify_collectives(model, world.mesh, torch.float32, reported.append),
            ):
                model(tokens_BS, packed.bounds(), labels_BS).backward()
        except linear.PrecisionNotAppliedError as error:
            return str(error)
        (line,) = reported
        assert "all_to_all over expert" in line
        rows = sum(max(sum(trip.sent), sum(trip.received)) for trip in trips)
        assert all(sum(trip.sent) == 2 * tokens_BS.numel() for trip in trips)
        found = {
            dtype: (calls, num_bytes)
            for operation, dtype, axis, calls, num_bytes in counted.rows()
            if (operation, axis) == ("all_to_all", "expert")
        }
        return found, rows


@pytest.mark.parametrize(
    ("kind", "keys"),
    [("int8_rowcol", {"grad_weight": "folded"}), ("int8_rowcol", {}), ("none", {})],
    ids=["in 8 bits", "in compute dtype", "none"],
)
def test_what_ranks_exchange_is_what_the_closed_form_says(
    kind: str, keys: dict[str, str], ranks: Ranks, tmp_path: Path
) -> None:
    folder, k, layers = _made(tmp_path, [Case("qwen3_moe")]), 64, 2
    for found, rows in ranks.run(_counted, 2, folder, kind, keys, ""):
        low = bool(keys)
        # There, back, and the gradients of both; numbers of rows, of 8 experts.
        expected = {
            "float32": ((4 - low) * layers, (4 - low) * rows * k * 4),
            "int64": (layers, layers * 8 * 8),
        }
        if low:
            expected["uint8"] = (layers, rows * (16 + k))
        assert found == expected


def test_a_mixture_that_gets_its_tokens_in_high_precision_is_found(ranks: Ranks, tmp_path: Path) -> None:
    folder = _made(tmp_path, [Case("qwen3_moe")])
    for error in ranks.run(_counted, 2, folder, "int8_rowcol", {"grad_weight": "folded"}, "high"):
        assert "sent tokens to experts in 8 bits 1 times, where 2 mixtures should" in error


def test_models_and_settings_that_exclude_it_are_one_line(tmp_path: Path) -> None:
    _made(tmp_path, [Case("qwen3_moe"), Case("qwen3")])
    for kind, message in (
        ("qwen3_moe", r"3 ranks do not divide the 8 experts of 'qwen3_moe'; set it to a divisor"),
        ("qwen3", r"'qwen3' has no mixture whose experts"),
    ):
        for backend in ("transformers", "auto"):
            facts = models.read_config(tmp_path / kind, backend)
            with pytest.raises(UserError, match=rf"parallel\.expert: {message}"):
                facts.check_execution(1, "none", 1, 3)
    for keys in ({"tensor": 2}, {"context": 2}):
        with pytest.raises(UserError, match=rf"parallel\.expert: 2 ranks .*parallel\.{next(iter(keys))}=2"):
            ParallelConfig(expert=2, **keys)
    with pytest.raises(UserError, match=r"replicate=2 x tensor=1 x expert=2 needs a multiple of 4 ranks"):
        distributed.mesh_axes(ParallelConfig(replicate=2, expert=2), 6)
    with pytest.raises(UserError, match=r"optimizer\.kind: muon .*parallel\.expert=2"):
        tiny_run.config("none", parallel=ParallelConfig(expert=2), optimizer=OptimizerConfig(kind="muon"))
    shadow = PrecisionConfig(kind="int8_rowcol", shadow_every=2)
    with pytest.raises(UserError, match=r"precision\.shadow_every: .*parallel\.expert=2 ranks"):
        replace(tiny_run.config("none"), parallel=ParallelConfig(expert=2), precision=shadow)
    execution, layer = distributed.Execution(compile="none"), torch.nn.Linear(2, 2)
    with distributed.session("cpu") as world:
        shares = replace(world, experts=distributed.Experts(models.Group("", 1, 0), world.mesh))
        with pytest.raises(UserError, match=r"parallel\.expert needs a models"):
            distributed.parallelize(layer, shares, execution)


@pytest.mark.parametrize("kind", ["int8_rotated", "none"])
def test_the_plan_has_the_memory_and_the_bytes_of_ranks_with_even_routing(kind: str, tmp_path: Path) -> None:
    _made(tmp_path, [Case("qwen3_moe")])
    facts = models.read_config(tmp_path / "qwen3_moe", "transformers")
    found = {}
    for expert in (1, 2, 4):
        cfg = tiny_run.config(
            kind, data=DataConfig(source="unused", seq_len=32), parallel=ParallelConfig(expert=expert),
            compute_dtype="bfloat16", global_batch_size=8, micro_batch_size=2, device="cpu",
        )  # fmt: skip
        found[expert] = dry_run(cfg, facts, 4)
    moved = {n: each.collectives.num_bytes(operation="all_gather") for n, each in found.items()}
    weights = 2 * 8 * 3 * 32 * 64  # of the experts of two layers
    rows = 2 * 8 * (2 * 32 + 64)
    # A rank gathers 1 / n of them, for forward and backward.
    size = 2 * weights if kind == "none" else weights + 16 * rows
    for n in (2, 4):
        here = 0 if n == 4 else size // n
        assert moved[1] - moved[n] == 2 * (size - here)
        sent = 2 * (2 * 32) * 2  # rows of two layers, each token's two experts
        ways = 4 if kind == "none" else 3
        bytes_sent = ways * sent * 64 * 2 + (0 if kind == "none" else sent * (16 + 64))
        assert found[n].collectives.num_bytes(operation="all_to_all", axis="expert") == bytes_sent
        assert f"experts on {n} ranks" in found[n].report()
        assert "uneven routing moves more" in found[n].report()
    assert "uneven routing" not in found[1].report()
    held = [each.peaks["forward"]["parameters"] for each in found.values()]
    assert held[0] == held[1] == held[2]
