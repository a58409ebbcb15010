"""What lasts on a rank is counted from shapes; a run that holds more than its device has does not start."""

import dataclasses
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lptune import distributed, linear, models, training
from lptune.base.errors import UserError
from lptune.config import (
    CheckpointConfig,
    DataConfig,
    DistillConfig,
    FinetuneConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    TeacherConfig,
)
from lptune.distillation import live
from lptune.plan import memory
from lptune.plan.dry_run import dry_run
from lptune.training import settings
from lptune.training.lasting import lasting

FACTS = models.config_from_dict(
    # 131 words divide by no number of ranks, so that some have more rows.
    models.PRESETS["llama3_1"]["tiny"] | {"vocab_size": 131, "num_hidden_layers": 4},
    "test",
)
Case = tuple[str, str, str, bool, dict[str, Any], int, tuple[str, ...]]
PAIRWISE: list[Case] = [
    # precision.kind, optimizer.kind, master, in_backward, parallel, ranks, freeze
    ("none", "adamw", "float32", False, {}, 1, ()),
    ("int8_rowcol", "adamw_8bit", "none", True, {}, 1, ("embed_tokens",)),
    ("int8_weight_only", "adamw_bf16", "float32", True, {}, 1, ()),
    ("int8_rowcol", "sgd", "float32", False, {"replicate": 2}, 4, ("embed_tokens",)),
    ("none", "adamw_bf16", "none", False, {"replicate": 2}, 4, ()),
    ("int8_weight_only", "adamw_8bit", "float32", False, {"replicate": 2}, 4, ()),
    ("int8_rowcol", "adamw_8bit", "float32", True, {"tensor": 2}, 4, ()),
    ("int8_weight_only", "adamw", "float32", False, {"tensor": 2}, 4, ("embed_tokens",)),
    ("none", "adamw_8bit", "none", False, {"tensor": 2}, 2, ("*norm*",)),
    ("int8_rowcol", "adamw_bf16", "float32", False, {"cpu_offload": True}, 2, ("embed_tokens",)),
    ("none", "adamw_8bit", "float32", False, {"cpu_offload": True}, 1, ()),
    ("int8_weight_only", "adamw_8bit", "float32", False, {"cpu_offload": True}, 2, ()),
    ("none", "adamw", "none", True, {}, 3, ()),
    ("int8_rowcol", "adamw", "none", False, {"cpu_offload": True}, 3, ("*norm*",)),
    ("int8_rowcol", "muon", "float32", False, {}, 3, ()),
]


def _config(case: Case) -> FinetuneConfig:
    kind, optimizer, master, in_backward, parallel, num_ranks, freeze = case
    is_sgd = optimizer == "sgd"
    return FinetuneConfig(
        model=ModelConfig(path="unused"),
        data=DataConfig(source="builtin", seq_len=32),
        precision=PrecisionConfig(kind=kind),
        parallel=ParallelConfig(**parallel),
        optimizer=OptimizerConfig(
            kind=optimizer, master=master, in_backward=in_backward, momentum=0.5 if is_sgd else 0.0
        ),
        freeze=freeze,
        compile="none",
        activation_checkpointing="none",
        micro_batch_size=1,
        global_batch_size=num_ranks // parallel.get("tensor", 1),
    )


def _counted(cfg: FinetuneConfig, num_ranks: int, facts: models.Facts = FACTS) -> tuple[int, int, int]:
    model = models.build_on_meta(facts)
    models.freeze(model, cfg.freeze)
    linear.convert(model, cfg.precision, device=torch.device("cpu"))
    return lasting(model, cfg, num_ranks)


def _planned(cfg: FinetuneConfig, num_ranks: int, facts: models.Facts = FACTS) -> tuple[int, int, int]:
    found = dry_run(cfg, facts, num_ranks)
    gradients = 0 if cfg.optimizer.in_backward else found.peaks["update"][memory.GRADIENTS]
    return found.resting[memory.PARAMETERS], found.resting[memory.OPTIMIZER], gradients


@pytest.mark.parametrize(
    "case",
    [
        case if i in (1, 5, 6, 11, 14) else pytest.param(case, marks=pytest.mark.slow)
        for i, case in enumerate(PAIRWISE)
    ],
    ids=str,
)
def test_what_lasts_is_what_a_dry_run_holds_to_the_byte(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five cases run always: each kind of stored weight, each axis of the mesh, frozen, in backward, and in
    host memory, of which pinning takes more (plan/test_fit.py).
    """
    cfg, num_ranks = _config(case), case[-2]
    counted = _counted(cfg, num_ranks)
    if cfg.parallel.cpu_offload:
        monkeypatch.setattr(memory, "pinned_size", lambda num_bytes: num_bytes)
        cfg = dataclasses.replace(cfg, checkpoint=CheckpointConfig(async_save=False))
        model = models.build_on_meta(FACTS)
        models.freeze(model, cfg.freeze)
        counts = 4 * sum(each.requires_grad for each in model.parameters())  # of updates, which stay
        assert sum(counted) == dry_run(cfg, FACTS, num_ranks).host_bytes + counts
    else:
        assert counted == _planned(cfg, num_ranks)


def test_averages_and_counts_are_in_it() -> None:
    cfg = _config(PAIRWISE[0])
    without = _counted(cfg, 1)
    averaging = dataclasses.replace(cfg, optimizer=OptimizerConfig(ema_decay=0.9))
    model = models.build_on_meta(FACTS)
    num_counts = len(list(model.parameters()))
    assert _counted(averaging, 1)[1] - without[1] == 4 * models.num_parameters(model) + 4 * num_counts


@pytest.mark.slow  # builds it by transformers; the fast cases have the same rules on our decoder
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_models_of_transformers_are_counted_with_their_float32_parameters(num_ranks: int) -> None:
    facts = models.facts_of_preset("qwen3_moe/tiny")
    cfg = dataclasses.replace(
        _config(PAIRWISE[0]),
        precision=PrecisionConfig(kind="int8_rowcol"),
        optimizer=OptimizerConfig(kind="adamw_8bit", master="none"),
        global_batch_size=num_ranks,
    )
    assert _counted(cfg, num_ranks, facts) == _planned(cfg, num_ranks, facts)


@pytest.mark.parametrize("precision", ["int8_weight_only", pytest.param("none", marks=pytest.mark.slow)])
def test_a_teacher_counts(precision: str) -> None:
    cfg = DistillConfig(
        model=ModelConfig(path="unused"),
        data=DataConfig(source="builtin", seq_len=32),
        teacher=TeacherConfig(path="teacher", precision=precision),
        compile="none",
        micro_batch_size=1,
        global_batch_size=2,
    )
    model = models.build_on_meta(FACTS)
    live._freeze(model, cfg, SimpleNamespace(device=torch.device("cpu")))  # type: ignore[arg-type]
    assert sum(lasting(model, cfg, 2)) == lasting(model, cfg, 2).weights
    found = dry_run(cfg, FACTS, 2, step=live.planned_step(cfg), frozen_config=FACTS)
    assert lasting(model, cfg, 2).weights == found.resting[memory.TEACHER]


def test_counting_8b_takes_less_than_a_third_of_a_second() -> None:
    facts = models.facts_of_preset("llama3_1/8b")
    model = models.build_on_meta(facts)
    cfg = dataclasses.replace(_config(PAIRWISE[6]), global_batch_size=4)
    started = time.process_time()
    lasting(model, cfg, 8)
    assert time.process_time() - started < 0.3


def _world(lines: list[str], device: str = "cpu", size: int = 1) -> distributed.World:
    return cast(
        distributed.World, SimpleNamespace(device=torch.device(device), size=size, print=lines.append)
    )


def test_a_run_that_holds_more_than_the_host_has_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cfg, model, lines = _config(PAIRWISE[0]), models.build_on_meta(FACTS), list[str]()
    needed = sum(lasting(model, cfg, 1))
    monkeypatch.setattr(settings, "available_bytes", lambda: needed)
    training.check_memory(model, cfg, _world(lines))
    assert lines == [
        f"memory: {needed / 2**20:.1f} MiB for weights, gradients and the optimizer; activations on top"
    ]
    monkeypatch.setattr(settings, "available_bytes", lambda: needed - 1)
    with pytest.raises(
        UserError, match=r"^memory: .* take .* and the host has .*; lower it by optimizer\."
    ) as at:
        training.check_memory(model, cfg, _world(lines))
    assert "\n" not in str(at.value)
    # Ranks of one machine share it.
    two = dataclasses.replace(cfg, global_batch_size=2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(settings, "available_bytes", lambda: 2 * sum(lasting(model, two, 2)) - 1)
    with pytest.raises(UserError, match="the host has"):
        training.check_memory(model, two, _world(lines, size=2))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    training.check_memory(model, two, _world(lines, size=2))


def test_a_run_that_holds_more_than_its_gpu_has_is_told_a_command_that_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cfg, model, lines = _config(PAIRWISE[0]), models.build_on_meta(FACTS), list[str]()
    needed = sum(lasting(model, cfg, 1))
    here = SimpleNamespace(name="NVIDIA GeForce RTX 4090", total_memory=needed - 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: here)
    monkeypatch.setattr(settings, "available_bytes", lambda: needed)
    monkeypatch.setenv("LPTUNE_COMMAND", "full_finetune --config my.yaml data.source='a b'")
    with pytest.raises(UserError) as at:
        training.check_memory(model, cfg, _world(lines, "cuda"))
    assert str(at.value).endswith(
        "lptune plan full_finetune --config my.yaml data.source='a b' --world-size 1 --device "
        "'GeForce RTX 4090' --write FILE"
    )
    # The host has one byte more.
    training.check_memory(
        model, dataclasses.replace(cfg, parallel=ParallelConfig(cpu_offload=True)), _world(lines, "cuda")
    )
    assert lines[-1].startswith(
        f"memory: {needed / 2**20:.1f} MiB of {needed / 2**20:.1f} MiB of the host for"
    )
