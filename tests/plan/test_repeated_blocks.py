"""A dry run that executes one block of each kind says what one that executes all blocks says."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from lptune import distillation, models, training
from lptune.config import (
    DataConfig,
    DistillConfig,
    FinetuneConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    TeacherConfig,
)
from lptune.models.hf import facts as hf_facts
from lptune.models.keys import Keys
from lptune.models.presets import find_preset
from lptune.plan import dry_run as dry_run_module
from lptune.plan.dry_run import DryRun, dry_run
from lptune.plan.repeated_blocks import leave_out, run_by
from tests.helpers.slow import slow_but


def _model_config(family: str, num_layers: int, **settings: Any) -> models.Facts:
    content = find_preset(f"{family}/tiny") | {"num_hidden_layers": num_layers} | settings
    if family in models.HF_PRESETS:
        facts = hf_facts.read(Keys(content, {}, "test"), Path("test"))
        assert facts is not None
        return facts
    return models.config_from_dict(content, "test")


def _config(kind: str, num_rows: int, cls: type[RunConfig] = FinetuneConfig, **keys: Any) -> RunConfig:
    """num_rows: of the global batch, one a micro-batch."""
    precision = PrecisionConfig(kind=kind, skip=keys.pop("skip", PrecisionConfig.skip))
    return cls(
        model=ModelConfig(path="unused"),
        data=DataConfig(source="unused", seq_len=32),
        precision=precision,
        parallel=ParallelConfig(**keys.pop("parallel", {})),
        micro_batch_size=1,
        global_batch_size=num_rows,
        **keys,
    )


def _content(found: DryRun) -> dict[str, Any]:
    """All fields. Layer numbers count through the process."""
    layers = tuple(dataclasses.replace(layer, number=None) for layer in found.plan.layers)
    return vars(found) | {"plan": dataclasses.replace(found.plan, layers=layers), "text": found.report()}


CASES: dict[str, tuple[str, int, int, RunConfig]] = {
    "windows and rope tables, accumulation": ("gemma3", 10, 1, _config("none", 3)),
    "amaxes of all weights, frozen blocks, a skipped layer, averages of weights": (
        "llama3_1",
        9,
        2,
        _config(
            "int8_tensorwise",
            2,
            freeze=("embed_tokens", "model.layers.[0-1]"),
            skip=("lm_head", "model.layers.8.mlp.down_proj"),
            optimizer=OptimizerConfig(ema_decay=0.99),
        ),
    ),
    "amax histories": ("llama3_1", 4, 2, _config("float8_delayed", 2)),
    "replicas, gathers two blocks ahead, full recomputation": (
        "llama3_1",
        6,
        4,
        _config(
            "none",
            12,
            parallel={"replicate": 2, "prefetch_blocks": 2, "reduce_every_micro_batch": True},
            activation_checkpointing="full",
        ),
    ),
    "weights in INT8, tensor parallelism, offloaded": (
        "qwen2_5",
        5,
        2,
        _config("int8_weight_only", 1, parallel={"tensor": 2, "cpu_offload": True}),
    ),
    "two kinds in turns, with different gathers": (
        "llama3_1",
        5,
        2,
        _config("int8_tensorwise", 2, skip=("lm_head", "model.layers.1.*", "model.layers.3.*")),
    ),
    "updates in backward": (
        "llama3_1",
        5,
        1,
        _config("int8_rowcol", 1, optimizer=OptimizerConfig(kind="adamw_8bit", in_backward=True)),
    ),
    "updates in backward, sharded": (
        "llama3_1",
        5,
        2,
        _config("float8_delayed", 2, optimizer=OptimizerConfig(in_backward=True), max_grad_norm=0.0),
    ),
    "a teacher": (
        "llama3_1",
        4,
        1,
        _config("int8_rowcol", 1, DistillConfig, teacher=TeacherConfig(path="unused")),
    ),
}
"""Name -> family, number of blocks, number of ranks, config."""


# Updates in backward beside those of real ranks, also of blocks that were left out: test_dry_run.py.
@pytest.mark.parametrize("name", slow_but(lambda name: name.startswith(("amaxes", "a teacher")), CASES))
def test_it_says_what_a_dry_run_of_all_blocks_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, num_layers, num_ranks, cfg = CASES[name]
    ran = []
    monkeypatch.setattr(dry_run_module, "leave_out", lambda *args: ran.append(leave_out(*args)) or ran[-1])
    step, teacher = training.PlannedStep(), None
    if isinstance(cfg, DistillConfig):
        step, teacher = distillation.planned_step(cfg), _model_config("qwen2_5", 5)
    config = _model_config(family, num_layers)
    found, full = (
        dry_run(cfg, config, num_ranks, step=step, frozen_config=teacher, in_full=in_full)
        for in_full in (False, True)
    )
    assert _content(found) == _content(full)
    few, every = ran[: len(ran) // 2], ran[len(ran) // 2 :]
    # Blocks that differ from all others run all.
    assert all((len(each.times) < len(each.run_by)) != ("in turns" in name) for each in few)
    assert all(len(each.times) == len(each.run_by) for each in every)


def _assert_neighbours_are_alike(kinds: str, reach: int) -> int:
    """Each block finds the neighbours of the block that it stands for. Returns how many blocks run."""
    found = run_by(kinds, [None] * len(kinds), reach)
    kept = sorted(set(found))
    assert all(found[number] == number for number in kept)
    ends = "." * reach
    whole, short = ends + kinds + ends, ends + "".join(kinds[i] for i in kept) + ends
    for number, other in enumerate(found):
        place = kept.index(other)
        assert short[place : place + 2 * reach + 1] == whole[number : number + 2 * reach + 1]
    return len(kept)


@pytest.mark.parametrize(
    ("kinds", "reach", "num_run"),
    [
        ("a" * 32, 1, 3),
        ("a" * 32, 2, 5),
        ("ab" * 20, 1, 4),
        ("ababa", 1, 5),
        ("aaaaab" * 4 + "aa", 1, 6),
        ("aaaa" + "b" * 9, 1, 6),
        ("abcdefgh", 1, 8),
        ("a", 1, 1),
    ],
)
def test_a_block_stands_for_those_of_its_kind_with_such_neighbours(
    kinds: str, reach: int, num_run: int
) -> None:
    assert _assert_neighbours_are_alike(kinds, reach) == num_run


@pytest.mark.parametrize(
    ("family", "settings", "num_run"),
    # Every fourth block attends; the first that does makes the table of positions.
    [("qwen3_5", {}, 12), ("gemma4", {"num_kv_shared_layers": 10, "use_double_wide_mlp": True}, 16)],
)
def test_blocks_of_transformers_are_alike_but_for_those_that_share_keys(
    family: str, settings: dict[str, Any], num_run: int
) -> None:
    facts = _model_config(family, 16, layer_types=None, **settings)
    assert len(leave_out(models.build_on_meta(facts), 1).times) == num_run


def test_blocks_of_two_kinds_in_any_order_find_their_neighbours() -> None:
    for length in range(1, 11):
        for kinds in itertools.product("ab", repeat=length):
            _assert_neighbours_are_alike("".join(kinds), 1)
            _assert_neighbours_are_alike("".join(kinds), 2)


def test_a_plan_with_another_mesh_follows_in_the_same_process() -> None:
    config = _model_config("llama3_1", 1)
    for replicate in (1, 2):  # DTensor keeps what it did on the mesh of the first
        parallel = {"tensor": 2, "replicate": replicate}
        assert dry_run(_config("none", 8, parallel=parallel), config, 8).collectives
