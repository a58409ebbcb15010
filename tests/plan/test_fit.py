"""Whether a plan fits, and what would: each line is a plan that anybody can make again."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lptune import distributed, models, training
from lptune.base.errors import UserError
from lptune.base.text import size_text
from lptune.checkpoint.disk import disk_report
from lptune.config import (
    CheckpointConfig,
    DataConfig,
    ExportConfig,
    FinetuneConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
)
from lptune.hardware.devices import Device, named_device
from lptune.plan import fit, memory
from lptune.plan.dry_run import STAGED, DryRun, dry_run
from lptune.plan.fit import verdict
from lptune.training.lasting import lasting
from tests.helpers.saving import save

TINY = models.config_from_dict(models.PRESETS["llama3_1"]["tiny"], "test")


CONFIG = FinetuneConfig(
    model=ModelConfig(path="unused"),
    data=DataConfig(source="unused", seq_len=32),
    precision=PrecisionConfig(kind="int8_rowcol"),
    micro_batch_size=2,
    global_batch_size=4,
    checkpoint=CheckpointConfig(async_save=False),  # a change that needs host memory would name it
)


def _changed(line: str) -> tuple[FinetuneConfig, int]:
    """CONFIG with the keys that a remedy's line names, and its number of ranks."""
    cfg, num_ranks = CONFIG, 2
    keys, _, _ = line.strip().partition(": a peak")
    for key, value in re.findall(r"(\S+)=(\S+)", keys):
        typed = {"true": True}.get(value, int(value) if value.isdecimal() else value)
        section, _, name = key.rpartition(".")
        if section:
            part = dataclasses.replace(getattr(cfg, section), **{name: typed})
            cfg = dataclasses.replace(cfg, **{section: part})
        else:
            cfg = dataclasses.replace(cfg, **{key: typed})
    return cfg, num_ranks


FOR_THE_HOST = (
    "micro_batch_size=1 optimizer.kind=adamw_8bit activation_checkpointing=full optimizer.master=none"
)
ALL_HERE = f"{FOR_THE_HOST} optimizer.in_backward=true global_batch_size=2"
"""Of CONFIG on two ranks: all that needs no host memory and no more ranks."""


def saved(cfg: FinetuneConfig, world_size: int) -> int:
    """The number of changes of CONFIG on two ranks that `cfg` has: each saves a byte."""
    parallel = cfg.parallel
    changed = [cfg.micro_batch_size == 1, cfg.activation_checkpointing == "full", parallel.cpu_offload]
    changed += [cfg.optimizer.kind != "adamw", cfg.optimizer.kind == "adamw_8bit"]
    changed += [cfg.optimizer.master == "none", parallel.reduce_every_micro_batch, world_size > 2]
    changed += [cfg.optimizer.in_backward or parallel.cpu_offload]  # no gradients here
    return sum(changed)


def verdict_of(line: str) -> str:
    """What a remedy's line says after the peak, without the cost."""
    return line.partition(" (")[0].rpartition(", ")[2]


def keys_of(lines: Iterable[str]) -> list[str]:
    """The keys of the remedies' lines."""
    return [line.partition(":")[0].strip() for line in lines]


def holds(num_bytes: int) -> DryRun:
    """A plan of which only that is asked: what a rank holds between two steps."""
    resting = Counter({memory.PARAMETERS: num_bytes // 4, memory.OPTIMIZER: num_bytes - num_bytes // 4})
    return cast(DryRun, SimpleNamespace(resting=resting, peaks=dict(NOTHING)))


NOTHING = {"forward": Counter[str](), "update": Counter[str]()}
"""Peaks that tell nothing, so that all changes are tried but those that leave too much of `holds`."""


def remedies(
    cfg: FinetuneConfig, facts: models.Facts, world_size: int, device: Device, found: DryRun
) -> Iterator[str]:
    """The lines that a user sees."""
    yield from fit.heading(found, device)
    for each in fit.remedies(cfg, facts, world_size, device, found):
        yield each.line


# Nine dry runs. cli/test_plan.py plans what was written again; the search is that of the tests below.
@pytest.mark.slow
def test_each_remedy_was_planned_and_is_what_its_keys_take() -> None:
    device = dataclasses.replace(named_device("h100"), memory_bytes=1000)
    heading, *lines = remedies(CONFIG, TINY, 2, device, holds(0))
    assert heading == "planned instead:"
    assert [line.partition(": ")[0].strip() for line in lines] == [
        "micro_batch_size=1",
        "optimizer.kind=adamw_bf16",
        "optimizer.kind=adamw_8bit",
        "activation_checkpointing=full",
        "optimizer.master=none",
        "optimizer.in_backward=true",
        ALL_HERE,
        "optimizer.cpu_offload=true",
        "parallel.cpu_offload=true",
        f"{FOR_THE_HOST.partition(' ')[2]} parallel.cpu_offload=true",
    ]  # with all on the host, smaller micro-batches and an update in backward save nothing more
    cfg, num_ranks = _changed(lines[-1])
    again = dry_run(cfg, TINY, num_ranks, device)
    assert f"a peak of {size_text(again.peak_bytes)} and {size_text(again.host_bytes)} of host" in lines[-1]
    assert all(verdict_of(line) == "does not fit" for line in lines)


def test_the_search_ends_when_two_changes_fit_and_tries_all_together_when_none_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[tuple[int, str, str, int]] = []

    def planned(
        cfg: FinetuneConfig, _: object, world_size: int, *__: object, **___: object
    ) -> SimpleNamespace:
        if world_size == 8:
            raise UserError("parallel: 8 ranks do not divide the heads")
        optimizer = f"{cfg.optimizer.kind} {cfg.optimizer.master}"
        tried.append((cfg.micro_batch_size, optimizer, cfg.activation_checkpointing, world_size))
        peak = 10 if cfg.activation_checkpointing == "full" or world_size > 2 else 90
        return SimpleNamespace(peak_bytes=peak - saved(cfg, world_size), host_bytes=0, peaks=NOTHING)

    monkeypatch.setattr(fit, "dry_run", planned)
    cfg = dataclasses.replace(CONFIG, global_batch_size=16)
    device = dataclasses.replace(named_device("h100"), memory_bytes=80)
    _, *lines = remedies(cfg, TINY, 2, device, holds(0))
    assert tried == [
        (2, "adamw float32", "selective", 2),
        (1, "adamw float32", "selective", 2),
        (2, "adamw_bf16 float32", "selective", 2),
        (2, "adamw_8bit float32", "selective", 2),
        (2, "adamw float32", "full", 2),
        (2, "adamw none", "selective", 2),
        (2, "adamw float32", "selective", 2),  # with an update in backward
        (2, "adamw float32", "selective", 2),  # with moments in host memory
        (2, "adamw float32", "selective", 4),
    ]
    assert [verdict_of(line) for line in lines] == [
        *["does not fit"] * 4, "fits", *["does not fit"] * 3, "fits",
    ]  # fmt: skip
    assert lines[0].startswith("  parallel.reduce_every_micro_batch=true: ")
    tried.clear()
    lines = list(remedies(cfg, TINY, 2, dataclasses.replace(device, memory_bytes=1), holds(0)))
    # Without more ranks first: a user may have no other GPU.
    assert keys_of(lines)[-2:] == [
        f"parallel.reduce_every_micro_batch=true {FOR_THE_HOST} parallel.cpu_offload=true",
        f"parallel.reduce_every_micro_batch=true {FOR_THE_HOST} --world-size 4 parallel.cpu_offload=true",
    ]


def _planned_as(peak_of: Callable[[FinetuneConfig, int], int]) -> Callable[..., SimpleNamespace]:
    """In place of dry_run: a plan of which only the peak is asked."""
    return lambda cfg, _, world_size, *__, **___: SimpleNamespace(
        peak_bytes=peak_of(cfg, world_size), host_bytes=0, peaks=NOTHING
    )


def test_together_are_only_the_changes_that_are_needed_and_the_cheaper_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def keys(peak_of: Callable[[FinetuneConfig, int], int]) -> list[str]:
        monkeypatch.setattr(fit, "dry_run", _planned_as(peak_of))
        device = dataclasses.replace(named_device("h100"), memory_bytes=100)
        return keys_of(line for line in remedies(CONFIG, TINY, 2, device, holds(0)) if ", fits" in line)

    bits = {"adamw": 32, "adamw_bf16": 16, "adamw_8bit": 8}

    def needs(num_bits: int, master: str) -> Callable[[FinetuneConfig, int], int]:
        def peak(cfg: FinetuneConfig, _: int) -> int:
            enough = bits[cfg.optimizer.kind] <= num_bits and cfg.optimizer.master in (master, "none")
            return 10 if enough and cfg.activation_checkpointing == "full" else 91

        return peak

    assert keys(needs(16, "float32")) == ["optimizer.kind=adamw_bf16 activation_checkpointing=full"]
    assert keys(needs(8, "float32")) == ["optimizer.kind=adamw_8bit activation_checkpointing=full"]
    # That would do with adamw_bf16, too, but nobody measured it with bfloat16 weights.
    assert keys(needs(16, "none")) == [
        "optimizer.kind=adamw_8bit activation_checkpointing=full optimizer.master=none"
    ]
    assert keys(needs(32, "none")) == ["activation_checkpointing=full optimizer.master=none"]
    assert keys(lambda cfg, _: 10 if cfg.parallel.cpu_offload and cfg.micro_batch_size == 1 else 91) == [
        "micro_batch_size=1 parallel.cpu_offload=true"
    ]


def test_a_change_that_raises_the_peak_of_the_others_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # Full checkpointing stands for a change that saves alone, and costs memory beside another one.
    def peak(cfg: FinetuneConfig, _: int) -> int:
        is_full = cfg.activation_checkpointing == "full"
        return 100 - 10 * (cfg.micro_batch_size == 1) + (1 if cfg.micro_batch_size == 1 else -1) * is_full

    monkeypatch.setattr(fit, "dry_run", _planned_as(peak))
    device = dataclasses.replace(named_device("h100"), memory_bytes=50)
    cfg = dataclasses.replace(CONFIG, optimizer=OptimizerConfig(kind="sgd"))
    found = list(remedies(cfg, TINY, 2, device, holds(0)))
    assert keys_of(found[1:]) == [
        "micro_batch_size=1",
        "activation_checkpointing=full",
        "parallel.cpu_offload=true",
    ]  # and nothing together: the first alone is better


def test_with_more_ranks_no_more_are_named_than_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def peak(cfg: FinetuneConfig, world_size: int) -> int:
        return 10 if world_size >= 8 and cfg.optimizer.kind == "adamw_8bit" else 91

    monkeypatch.setattr(fit, "dry_run", _planned_as(peak))
    cfg = dataclasses.replace(CONFIG, global_batch_size=64)
    device = dataclasses.replace(named_device("h100"), memory_bytes=100)
    lines = list(remedies(cfg, TINY, 2, device, holds(0)))
    assert lines[-1].startswith("  optimizer.kind=adamw_8bit --world-size 8: a peak of 10 B a rank, fits (")


@pytest.mark.parametrize(
    ("keys", "proposed"),
    [
        ({}, ["kind=adamw_bf16", "kind=adamw_8bit", "master=none"]),
        ({"optimizer": OptimizerConfig(kind="adamw_bf16")}, ["kind=adamw_8bit", "master=none"]),
        ({"optimizer": OptimizerConfig(kind="adamw_8bit", master="none")}, []),
        ({"optimizer": OptimizerConfig(kind="sgd")}, []),
        ({"optimizer": OptimizerConfig(ema_decay=0.9)}, []),
        ({"compute_dtype": "float32"}, ["kind=adamw_bf16", "kind=adamw_8bit"]),
        ({"precision": PrecisionConfig(kind="int8_weight_only")}, ["kind=adamw_bf16", "kind=adamw_8bit"]),
    ],
    ids=["adamw", "bf16", "least", "sgd", "averages", "float32", "stored in INT8"],
)
def test_an_optimizer_is_proposed_only_if_the_config_takes_it(
    keys: dict[str, object], proposed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "dry_run", _planned_as(lambda *_: 100))
    cfg = dataclasses.replace(CONFIG, precision=PrecisionConfig())
    cfg = dataclasses.replace(cfg, **keys)  # type: ignore[arg-type]
    device = dataclasses.replace(named_device("h100"), memory_bytes=100)
    alone = [each for each in keys_of(remedies(cfg, TINY, 2, device, holds(0))) if " " not in each]
    found = [each for each in alone if each.startswith("optimizer.")]
    in_backward = [] if cfg.optimizer.kind == "sgd" else ["in_backward=true"]  # which would not be clipped
    of_adamw = cfg.optimizer.kind.startswith("adamw") and not cfg.optimizer.ema_decay
    moments = ["cpu_offload=true"] if of_adamw else []
    assert found == [f"optimizer.{each}" for each in proposed + in_backward + moments]


def test_what_an_optimizer_costs_is_what_its_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    for (kind, master), (loss, times) in fit.MEASURED_COSTS.items():
        name = f"`{kind}`" + (", `optimizer.master=none`" if master == "none" else "")
        assert re.search(rf"^\| {re.escape(name)} \| [\d.]+ \| {re.escape(loss)} \|$", page, re.MULTILINE)
        if times:
            assert re.search(rf"^\| `{kind}` \| [\d.]+ \| {times} \|", page, re.MULTILINE)

    monkeypatch.setattr(fit, "dry_run", _planned_as(lambda *given: 100 - saved(*given)))
    device = dataclasses.replace(named_device("h100"), memory_bytes=100)
    costs = dict(
        re.split(r": a peak of \d+ B a rank, does not fit", line.strip())
        for line in remedies(CONFIG, TINY, 2, device, holds(0))
        if ": " in line
    )
    of = "held-out loss against adamw, on a model of 0.66 M parameters: "
    assert costs["micro_batch_size=1"] == ""
    assert costs["optimizer.kind=adamw_8bit"] == (
        f" ({of}-0.0009 ± 0.0002, update 10.8 times as long on a CPU)"
    )
    assert costs[ALL_HERE] == f" ({of}0.0000 ± 0.0012)"  # of both, which were measured together
    cfg = dataclasses.replace(CONFIG, optimizer=OptimizerConfig(kind="adamw_bf16"))
    line = next(each for each in remedies(cfg, TINY, 2, device, holds(0)) if "  optimizer.master" in each)
    assert line.endswith(f" ({of}not measured)")


def test_a_change_of_the_rows_of_a_step_is_said_and_one_that_keeps_them_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def peak(cfg: FinetuneConfig, _: int) -> int:
        return 10 if cfg.optimizer.in_backward or cfg.parallel.cpu_offload else 91

    monkeypatch.setattr(fit, "dry_run", _planned_as(peak))
    device = dataclasses.replace(named_device("h100"), memory_bytes=100)
    cfg = dataclasses.replace(CONFIG, global_batch_size=16, micro_batch_size=1)
    fitting = [each for each in remedies(cfg, TINY, 1, device, holds(0)) if ", fits" in each]
    assert keys_of(fitting) == [
        "optimizer.in_backward=true global_batch_size=1",
        "parallel.cpu_offload=true parallel.reduce_every_micro_batch=true",
    ]
    assert fitting[0].endswith("fits; a step has 1 row and not 16: that trains differently")
    assert fitting[1].endswith("fits")

    # Also where each needs a second change.
    def of_two(cfg: FinetuneConfig, _: int) -> int:
        moments = cfg.optimizer.in_backward and cfg.optimizer.cpu_offload
        return 10 if moments or (cfg.parallel.cpu_offload and cfg.optimizer.kind == "adamw_8bit") else 91

    monkeypatch.setattr(fit, "dry_run", _planned_as(of_two))
    for host_bytes in (math.inf, 1.0):
        found = fit.remedies(cfg, TINY, 1, device, holds(0), host_bytes=host_bytes)
        assert [each.words for each in found if each.fits] == [
            "optimizer.in_backward=true optimizer.cpu_offload=true global_batch_size=1",
            "optimizer.kind=adamw_8bit parallel.cpu_offload=true parallel.reduce_every_micro_batch=true",
        ]


def test_a_change_that_cannot_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, str]] = []
    model = models.build_on_meta(TINY)
    *both, gradients = lasting(model, CONFIG, 2)
    held = sum(both)
    found = holds(held)
    found.peaks["update"] = Counter({memory.GRADIENTS: gradients})

    def planned(
        cfg: FinetuneConfig, _: object, world_size: int, *__: object, **___: object
    ) -> SimpleNamespace:
        tried.append((world_size, f"{cfg.optimizer.kind} {cfg.optimizer.master}"))
        enough = world_size == 8 or cfg.parallel.cpu_offload
        return SimpleNamespace(
            peak_bytes=0 if enough else held - saved(cfg, world_size), host_bytes=0, peaks=NOTHING
        )

    monkeypatch.setattr(fit, "dry_run", planned)
    cfg = dataclasses.replace(CONFIG, global_batch_size=16)
    device = dataclasses.replace(named_device("h100"), memory_bytes=int(held / 2))
    lines = list(remedies(cfg, TINY, 2, device, found))
    # 0.45 of what a rank of 2 holds would fit: 4 ranks hold 0.5 of it each, 8 ranks 0.25; or the host. Of 12
    # bytes a parameter adamw_bf16 leaves 8, adamw_8bit 6.06, optimizer.master=none 10, the last two 4.06. So
    # both are needed, beside all that saves something else.
    assert tried[0] == (2, "adamw_8bit none")
    assert tried[-2:] == [(8, "adamw float32"), (2, "adamw float32")]
    assert {world_size for world_size, _ in tried[1:-2]} == {2}  # without each, which lowers the peak less
    assert lines[:2] == [
        f"weights and optimizer state alone take {size_text(held)} on a rank",
        "planned instead:",
    ]
    assert keys_of(lines[-3:]) == [
        f"parallel.reduce_every_micro_batch=true {ALL_HERE}",
        "--world-size 8",
        "parallel.cpu_offload=true",
    ]


@pytest.mark.parametrize(
    ("kind", "num_ranks", "every"),
    [
        ("int8_rowcol", 1, 4),
        # The same rules with all changes, other weights, and several ranks.
        pytest.param("int8_rowcol", 1, 1, marks=pytest.mark.slow),
        pytest.param("int8_weight_only", 1, 1, marks=pytest.mark.slow),
        pytest.param("none", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_no_plan_is_below_what_its_change_takes_at_least(kind: str, num_ranks: int, every: int) -> None:
    """So no change that fits is left out."""
    cfg = dataclasses.replace(CONFIG, precision=PrecisionConfig(kind=kind), global_batch_size=8)
    device = named_device("h100")
    found = dry_run(cfg, TINY, num_ranks, device)
    search = fit._Search(cfg, TINY, num_ranks, device, found, training.PlannedStep(), None)
    changes = [*fit._changes(cfg, num_ranks)]
    num_told = 0
    for change in [*changes, search.joined(changes[:4])][::every]:
        with suppress(UserError):
            least = search.at_least(change, found, cfg)
            assert least <= search.tried(change).found.peak_bytes, change
            num_told += least > 0.5 * found.peak_bytes
    assert num_told > 0  # it is no empty bound


def test_without_masters_one_rank_need_not_keep_copies_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def peak(cfg: FinetuneConfig, _: int) -> int:
        return 10 if cfg.optimizer.master == "none" and cfg.precision.all_gather == "high" else 91

    monkeypatch.setattr(fit, "dry_run", _planned_as(peak))
    device = dataclasses.replace(named_device("h100"), memory_bytes=100)

    def fitting(num_ranks: int, **keys: Any) -> list[str]:
        cfg = dataclasses.replace(CONFIG, **keys)
        return keys_of(each for each in remedies(cfg, TINY, num_ranks, device, holds(0)) if ", fits" in each)

    assert fitting(1) == ["optimizer.master=none precision.all_gather=high"]
    assert fitting(1, optimizer=OptimizerConfig(master="none")) == ["precision.all_gather=high"]
    assert fitting(1, precision=PrecisionConfig(kind="mxfp8")) == []  # it keeps none
    assert fitting(2) == []  # several ranks gather, in 8 bits half as much


def test_one_rank_that_accumulates_offloads_after_every_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = dataclasses.replace(CONFIG, global_batch_size=8)
    device = named_device("h100")
    at_end, at_once = (
        dry_run(
            dataclasses.replace(
                cfg, parallel=ParallelConfig(cpu_offload=True, reduce_every_micro_batch=every)
            ),
            TINY,
            1,
            device,
        )
        for every in (False, True)
    )
    assert at_once.peak_bytes < at_end.peak_bytes
    monkeypatch.setattr(fit, "dry_run", lambda *_, **__: at_end)  # the keys do not depend on the plans
    device = dataclasses.replace(device, memory_bytes=at_end.peak_bytes)
    lines = remedies(cfg, TINY, 1, device, at_end)
    (line,) = (line for line in lines if line.startswith("  parallel.cpu_offload=true"))
    assert line.startswith("  parallel.cpu_offload=true parallel.reduce_every_micro_batch=true: ")


def test_the_verdict_leaves_room_for_what_a_plan_does_not_count() -> None:
    found = dry_run(CONFIG, TINY, 1)
    for times, words in ((2.0, "fits "), (1.05, "may not fit "), (0.9, "does not fit ")):
        device = dataclasses.replace(named_device("4090"), memory_bytes=int(times * found.peak_bytes))
        assert verdict(found, device).startswith(words)


def test_cpu_offload_moves_what_it_says_to_the_host() -> None:
    tied = dataclasses.replace(TINY, tied=True)  # else a group of its own
    kept = dry_run(CONFIG, tied, 2)
    offloads = dataclasses.replace(CONFIG, parallel=ParallelConfig(cpu_offload=True))
    moved = dry_run(offloads, tied, 2, named_device("h100"))
    states = (memory.PARAMETERS, memory.GRADIENTS, memory.OPTIMIZER)
    counts = 4 * len([*models.build_on_meta(tied).parameters()])  # of updates, which stay
    held = sum(kept.peaks["update"][name] for name in states) - counts
    saved = kept.resting[memory.PARAMETERS] + kept.resting[memory.OPTIMIZER] - counts  # by copies
    assert held <= moved.host_bytes < 2 * held  # powers of two
    saving = CheckpointConfig(async_save=True)
    plain = dry_run(dataclasses.replace(CONFIG, checkpoint=saving), tied, 2, named_device("h100"))
    assert (plain.host_bytes, kept.copies_bytes) == (0, 0)
    assert saved <= plain.copies_bytes < 2 * saved
    copies = dataclasses.replace(offloads, checkpoint=saving)
    assert held + saved <= dry_run(copies, tied, 2, named_device("h100")).host_bytes < 2 * (held + saved)
    for phase, times in (("forward", 2), ("backward", 3), ("update", 0)):
        assert not any(moved.peaks[phase][name] for name in states)
        stays = kept.peaks[phase].total() - sum(kept.peaks[phase][name] for name in states)
        staged = moved.peaks[phase][STAGED]
        # At the moment of the largest sum on the GPU, which need not be that of both memories.
        assert stays <= moved.peaks[phase].total() - staged <= kept.peaks[phase].total()
        # Of the largest module: no less than a block of two, no more than all.
        assert staged <= times * kept.resting[memory.PARAMETERS]
        assert (staged > 0) == (times > 0)


def test_moments_alone_move_to_the_host_and_nothing_else_changes() -> None:
    kept = dry_run(CONFIG, TINY, 2)
    changed = dataclasses.replace(CONFIG, optimizer=OptimizerConfig(cpu_offload=True))
    moved = dry_run(changed, TINY, 2, named_device("h100"))
    moments = kept.resting[memory.OPTIMIZER]
    counts = 4 * len([*models.build_on_meta(TINY).parameters()])  # of updates, which stay
    assert 0 < moments - counts <= moved.host_bytes < 2 * moments  # powers of two
    assert moved.resting == kept.resting - Counter({memory.OPTIMIZER: moments})
    for phase in ("forward", "backward"):
        assert moved.peaks[phase].total() == kept.peaks[phase].total() - moments
    on_cpu = dry_run(dataclasses.replace(changed, device="cpu"), TINY, 2)  # it has one memory
    assert (on_cpu.host_bytes, on_cpu.resting[memory.OPTIMIZER] > 0) == (0, True)
    assert "optimizer.cpu_offload: " in moved.report()
    assert moved.collectives == kept.collectives


def test_with_weights_in_host_memory_embedding_and_head_are_not_gathered_together() -> None:
    offloads = dataclasses.replace(CONFIG, parallel=ParallelConfig(cpu_offload=True))
    facts = dataclasses.replace(TINY, vocab_size=2**15)
    words = 2 * facts.vocab_size * facts.hidden_size  # bytes of one of them in bfloat16; all else is less
    found = dry_run(offloads, facts, 2, named_device("h100"))
    assert words <= found.peaks["forward"][memory.GATHERED] < 2 * words


def test_what_the_host_has_is_a_limit_of_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(cfg: FinetuneConfig, *_: object, **__: object) -> SimpleNamespace:
        """100 bytes, on the GPU or, less a byte for each change, on the host."""
        on_host = 60 - saved(cfg, 2) if cfg.parallel.cpu_offload else 0
        return SimpleNamespace(peak_bytes=100 - on_host, host_bytes=on_host, peaks=NOTHING)

    monkeypatch.setattr(fit, "dry_run", planned)
    device = dataclasses.replace(named_device("h100"), memory_bytes=80)

    def fitting(host_bytes: float) -> list[str]:
        found = fit.remedies(CONFIG, TINY, 2, device, holds(0), host_bytes=host_bytes)
        return [each.words for each in found if each.fits]

    assert fitting(60) == ["parallel.cpu_offload=true"]
    assert fitting(56) == ["optimizer.kind=adamw_8bit parallel.cpu_offload=true"]
    assert fitting(52) == []
    copies = dataclasses.replace(CONFIG, checkpoint=CheckpointConfig())
    words = [each.words for each in fit.remedies(copies, TINY, 2, device, holds(0)) if each.fits]
    assert words == ["parallel.cpu_offload=true checkpoint.async_save=false"]


@pytest.mark.parametrize(
    ("keys", "export", "at_once"),
    [
        ({}, {}, 3),
        ({"keep_last": 1}, {"enabled": False}, 2),
        ({"keep_last": 5}, {"dtype": "float32"}, 6),
        ({"keep_last": 1, "keep_every": 50}, {}, 4),
        ({"keep_last": 500}, {}, 100),  # there are no more steps
        ({"at_end": False}, {"enabled": False}, 1),  # saved if a signal stops it, and then only
        ({"at_end": False, "keep_last": 1, "keep_every": 50}, {"enabled": False}, 1),
        ({"at_end": False, "every_steps": 10}, {"enabled": False}, 3),
    ],
)
def test_the_disk_is_that_of_all_checkpoints_at_once_and_the_export(
    keys: dict[str, int], export: dict[str, object], at_once: int
) -> None:
    cfg = dataclasses.replace(
        CONFIG,
        checkpoint=CheckpointConfig(**keys),
        export=ExportConfig(**export),
        num_steps=100,  # type: ignore[arg-type]
    )
    line = disk_report(cfg, 10**9, 12 * 10**9, None)
    expected = 12 * at_once + {"float32": 4}.get(str(export.get("dtype")), 2) * bool(
        export.get("enabled", True)
    )
    assert f"at most {expected:,.1f} GB: {at_once} checkpoint" in line


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_checkpoint_takes_what_the_plan_says(num_ranks: int, tmp_path: Path) -> None:
    planned = dry_run(CONFIG, TINY, num_ranks).checkpoint_bytes
    model = nn.Sequential()
    for number, parameter in enumerate(models.build_on_meta(TINY).parameters()):
        model.register_parameter(str(number), nn.Parameter(torch.zeros(parameter.shape)))
        model.get_parameter(str(number)).grad = torch.zeros(parameter.shape)
    optimizer = training.AdamW(model.parameters(), lr=0.1, fused=True)
    optimizer.step()
    with distributed.session("cpu") as world:
        folder = save(tmp_path, 1, model, optimizer, world)
    stored = [tensor for file in folder.glob("*.safetensors") for tensor in load_file(file).values()]
    assert sum(tensor.numel() * tensor.element_size() for tensor in stored) == planned
    assert planned == 4 * 3 * models.num_parameters(model)


def test_one_rank_that_offloads_keeps_its_weights_gathered_if_told_to() -> None:
    gathered = {}
    for reshard in (None, True, False):
        parallel = ParallelConfig(cpu_offload=True, reshard_after_forward=reshard)
        cfg = dataclasses.replace(CONFIG, parallel=parallel, global_batch_size=2)
        found = dry_run(cfg, TINY, 1, named_device("h100"))
        gathered[reshard] = found.peaks["forward"][memory.GATHERED]
    assert gathered[None] == gathered[True] < gathered[False]
