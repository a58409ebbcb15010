"""A dry run of some ranks says what as many real ones do, hold and exchange."""

import copy
import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lptune import distributed, linear, models, training
from lptune.cli import catalog, recipe
from lptune.config import (
    DataConfig,
    FinetuneConfig,
    KtoConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    PreferenceConfig,
    RunConfig,
)
from lptune.distributed import record_collectives
from lptune.models import chunks
from lptune.plan import memory
from lptune.plan.dry_run import dry_run, precision_lines
from lptune.training import muon
from lptune.training.in_backward import build_update
from lptune.training.lasting import lasting
from tests.helpers.ranks import Ranks
from tests.helpers.slow import slow_but

NUM_MICRO_BATCHES = 4
"""More than the three that a dry run goes through."""


def test_a_shape_stands_apart_from_its_names_however_long() -> None:
    """As those of experts: 128 x 1536 x 2048."""
    model = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(16, 16), "b": torch.nn.Linear(2**27, 2**27, device="meta")}
    )
    lines = precision_lines(linear.convert(model, "int8_rowcol", device=torch.device("cpu")))
    assert lines[-2:] == ["  16 x 16                a", "  134217728 x 134217728  b"]


Case = tuple[dict[str, Any], dict[str, Any], str]
CASES: list[tuple[int, list[Case]]] = [
    (1, [({"kind": "int8_rowcol"}, {}, "adamw")]),
    (2, [({"kind": "float8_delayed", "emulate": True}, {"reduce_dtype": "int8"}, "muon")]),
    (
        1,
        [
            ({"kind": "mxfp8"}, {}, "adamw_8bit"),
            ({"kind": "int8_rowcol"}, {}, "adamw_8bit, no master"),
            ({"kind": "float8_tensorwise", "emulate": True}, {"reshard_after_forward": True}, "adamw_bf16"),
        ],
    ),
    (
        2,
        [
            ({"kind": "int8_weight_only"}, {"reshard_after_forward": False}, "adamw"),
            ({"kind": "float8_delayed", "emulate": True}, {}, "adamw_8bit"),
            ({"kind": "int8_rowcol"}, {"reduce_dtype": "int8"}, "adamw, no master"),
            ({"kind": "int8_rowcol"}, {"context": 2}, "adamw"),
        ],
    ),
    (
        4,
        [
            ({"kind": "int8_rowcol"}, {"replicate": 2, "reduce_every_micro_batch": True}, "sgd"),
            ({"kind": "int8_rowcol", "grad_weight": "folded"}, {"tensor": 2}, "adamw_8bit"),
        ],
    ),
]
"""Number of ranks, keys of precision and of parallel, and optimizer.kind, perhaps without masters or with an
update in backward. The last one gathers tokens in 8 bits, too. The first two run in the suite."""


def _config(
    num_data_ranks: int, precision: dict[str, Any], parallel: dict[str, Any], optimizer: str = "adamw"
) -> FinetuneConfig:
    in_backward = optimizer.endswith("in backward")
    return FinetuneConfig(
        model=ModelConfig(path="unused"),
        data=DataConfig(source="unused", seq_len=32),
        precision=PrecisionConfig(**precision),
        parallel=ParallelConfig(**parallel),
        optimizer=OptimizerConfig(
            kind=optimizer.partition(",")[0],
            momentum=0.5 if optimizer == "sgd" else 0.0,
            master="none" if "no master" in optimizer else "float32",
            in_backward=in_backward,
        ),
        device="cpu",
        activation_checkpointing="selective",
        compile="none",
        micro_batch_size=2,
        global_batch_size=2 * (1 if in_backward else NUM_MICRO_BATCHES) * num_data_ranks,
    )


def _model_config(vocab_size: int = 131) -> models.DecoderConfig:
    content = copy.deepcopy(models.PRESETS["llama3_1"]["tiny"])
    # 131 rows divide by no number of ranks, so that something is padded. Of 4 blocks a dry run executes 3.
    return models.config_from_dict(content | {"vocab_size": vocab_size, "num_hidden_layers": 4}, "test")


def _steps(rank: int, num_ranks: int, cases: list[Case]) -> list[dict[str, Any]]:
    found = []
    with distributed.session("cpu") as every:
        for precision, parallel, optimizer in cases:
            config = ParallelConfig(**parallel)
            axes = distributed.mesh_axes(config, num_ranks)
            mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
            world = dataclasses.replace(every, mesh=mesh, **distributed.neighbours(config, mesh))
            found.append(_step(world, precision, parallel, optimizer))
    return found


def _step(
    world: distributed.World,
    precision: dict[str, Any],
    parallel: dict[str, Any],
    kind: str = "adamw",
    vocab_size: int = 131,
) -> dict[str, Any]:
    """The step of a recipe with values in it; what it took."""
    cfg = _config(world.data_size, precision, parallel, kind)
    model = models.build_on_meta(_model_config(vocab_size))
    plan = linear.convert(model, cfg.precision, device=world.device)
    said = lasting(model, cfg, world.size)
    distributed.parallelize(model, world, cfg)
    with memory.MemoryLog() as log:
        distributed.materialize(model, world, cfg)
        with torch.no_grad():
            for parameter in model.parameters():
                distributed.local_rows(parameter)[0].normal_(0.0, 0.02)
        optimizer = training.build_optimizer(model, cfg.optimizer, cfg.seed)
        low = linear.LowPrecision(model, plan, optimizer, world=world, seed=cfg.seed, verify=False)
        update = build_update(model, optimizer, world, cfg, low)
        num_micro_batches = cfg.global_batch_size // cfg.micro_batch_size // world.data_size
        tokens_BS = torch.ones(cfg.micro_batch_size, cfg.data.seq_len, dtype=torch.int64)
        documents = models.DocumentBounds.single(*tokens_BS.shape)
        exchanged = []
        for step in range(2):
            with record_collectives(world.mesh, world.context) as counted:
                with low.step(step, num_micro_batches):
                    loss_sum = torch.zeros(())
                    for _ in distributed.accumulate(model, range(num_micro_batches), world, cfg, low):
                        log.phase("forward" if step == 0 else "later forward")
                        loss = model(tokens_BS, documents, tokens_BS)
                        update.before_backward(loss)
                        log.phase("backward" if step == 0 else "later backward")
                        (loss * (world.data_size / tokens_BS.numel())).backward()
                        loss_sum += loss.detach()
                gradients = memory.storage_bytes(p.grad for p in model.parameters() if p.grad is not None)
                log.phase("update")
                updated = update(loss_sum, tokens_BS.numel())
            log.phase("end")
            exchanged.append(sorted([*each, count] for each, count in counted.items()))
    assert not updated.skipped
    assert isinstance(optimizer, training.ListsMoments)
    assert all(
        torch.isfinite(distributed.on_this_rank(state[optimizer.moment_keys(parameter)[-1]])).all()
        for parameter, state in optimizer.state.items()
    )
    return {
        "collectives": exchanged,
        memory.PARAMETERS: memory.storage_bytes(model.parameters()),
        memory.GRADIENTS: gradients,
        memory.OPTIMIZER: memory.storage_bytes(
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ),
        "peaks": {name: found.total() for name, found in log.peaks().items()},
        "said": sum(said),
    }


@pytest.mark.parametrize(("num_ranks", "cases"), slow_but(lambda *case: case in CASES[:2], CASES))
def test_it_tells_the_collectives_and_the_memory_of_real_ranks(
    ranks: Ranks, num_ranks: int, cases: list[Case]
) -> None:
    by_rank = ranks.run(_steps, num_ranks, cases)
    for number, (precision, parallel, kind) in enumerate(cases):
        data_size = ParallelConfig(**parallel).data_ranks(num_ranks)
        found = dry_run(_config(data_size, precision, parallel, kind), _model_config(), num_ranks)
        steps = (found.first_collectives, found.collectives)
        in_first, expected = (sorted([*each, count] for each, count in step.items()) for step in steps)
        assert (in_first != expected) == (precision["kind"] == "float8_delayed")
        assert ("the first step of a run has no amax history, and" in found.report()) == (
            in_first != expected
        )
        if kind == "adamw" or "tensor" in parallel:  # which leaves some rows in float32
            assert (found.checkpoint_bytes == 12 * found.num_parameters) == (kind == "adamw")
        else:
            weights = (2 if kind.endswith("no master") else 4) * found.num_parameters
            assert found.checkpoint_bytes == weights + _moment_bytes(kind.partition(",")[0])
        if num_ranks == 1:
            assert not expected
        else:
            reduces = "all_to_all" if "reduce_dtype" in parallel else "reduce_scatter"
            assert {each[0] for each in expected} >= {"all_gather", reduces}
            # The update's: losses and squares of gradients, two float64 of every rank.
            assert ["all_reduce", "float64", 16] in [each[:3] for each in expected]
        for rank in range(num_ranks):
            took = by_rank[rank][number]
            assert took["collectives"] == [in_first, expected], (precision, parallel)
            if rank > 0:
                continue  # the dry run's rank is 0; others may have fewer rows
            for category in (memory.PARAMETERS, memory.OPTIMIZER):
                assert took[category] == found.resting[category] > 0, (category, precision, parallel)
            assert took[memory.GRADIENTS] == found.peaks["update"][memory.GRADIENTS] > 0
            lasts = sum(took[each] for each in (memory.PARAMETERS, memory.GRADIENTS, memory.OPTIMIZER))
            assert took["said"] == lasts, (precision, parallel)
            assert found.resting[memory.GRADIENTS] == 0
            # The state of the optimizer, which its first step made, is there in all later ones. What gloo has
            # exchanged, its two threads let go of a moment later than the fake group does.
            late = 2 * max((each.num_bytes for each in found.collectives), default=0)
            if num_ranks == 1 and "reshard_after_forward" not in parallel:
                # Of each parameter a copy in bf16; or in 8 bits, with a scale for each row.
                copies = found.peaks["backward"][memory.GATHERED]
                has_masters = not kind.endswith("no master")
                assert copies == _copied_bytes(precision["kind"], has_masters)
            for phase in ("forward", "backward", "update"):
                peak = found.peaks[phase].total()
                if phase != "update":
                    peak -= found.resting[memory.OPTIMIZER]
                else:  # where real norms and counts of each gradient take some bytes
                    late += 1e-3 * peak
                assert 0 <= took["peaks"][phase] - peak <= late, (phase, precision, parallel)


IN_BACKWARD: list[tuple[int, list[Case]]] = [
    (1, [({"kind": "int8_weight_only"}, {}, "adamw_8bit, in backward")]),
    (2, [({"kind": "int8_rowcol"}, {"reshard_after_forward": False}, "adamw, no master, in backward")]),
    (
        1,
        [
            ({"kind": "int8_rowcol"}, {}, "adamw, in backward"),
            ({"kind": "int8_rowcol"}, {}, "adamw_8bit, no master, in backward"),
            ({"kind": "none"}, {"reshard_after_forward": True}, "adamw_bf16, in backward"),
        ],
    ),
    (2, [({"kind": "float8_delayed", "emulate": True}, {}, "adamw_8bit, in backward")]),
    (
        4,
        [
            ({"kind": "int8_rowcol"}, {}, "adamw, in backward"),
            ({"kind": "int8_rowcol"}, {"tensor": 2}, "adamw_8bit, in backward"),
        ],
    ),
]
"""As CASES."""


@pytest.mark.parametrize(("num_ranks", "cases"), slow_but(lambda *case: case in IN_BACKWARD[:2], IN_BACKWARD))
def test_it_tells_the_peaks_and_collectives_of_updates_in_backward(
    ranks: Ranks, num_ranks: int, cases: list[Case]
) -> None:
    by_rank = ranks.run(_steps, num_ranks, cases)
    for number, (precision, parallel, kind) in enumerate(cases):
        took = by_rank[0][number]
        cfg = _config(num_ranks // parallel.get("tensor", 1), precision, parallel, kind)
        found = dry_run(cfg, _model_config(), num_ranks)
        assert took["collectives"][1] == sorted([*each, count] for each, count in found.collectives.items())
        assert took[memory.GRADIENTS] == 0
        assert took[memory.OPTIMIZER] == found.resting[memory.OPTIMIZER] > 0
        assert found.resting[memory.GRADIENTS] == 0
        # As in other steps, gloo's threads let go of what they exchanged a moment later.
        late = 2 * max((each.num_bytes for each in found.collectives), default=0)
        for phase in ("forward", "backward"):
            peak, real = found.peaks[phase].total(), took["peaks"][f"later {phase}"]
            assert -0.01 * peak <= real - peak <= 0.01 * peak + late, (phase, precision, parallel, kind)
        after = dataclasses.replace(cfg, optimizer=dataclasses.replace(cfg.optimizer, in_backward=False))
        all_of_them = dry_run(after, _model_config(), num_ranks).peaks["update"][memory.GRADIENTS]
        assert found.peaks["backward"][memory.GRADIENTS] < 0.5 * all_of_them
        assert took["said"] == took[memory.PARAMETERS] + took[memory.OPTIMIZER]


def _moment_bytes(kind: str) -> int:
    """Of what is kept: for large matrices bfloat16, or codes and a scale for each 128 elements of a row."""
    total, model = 0, models.build_on_meta(_model_config())
    of_blocks = muon.matrices(model)
    for name, parameter in model.named_parameters():
        is_low = parameter.dim() == 2 and parameter.numel() >= 4096
        scales = 4 * len(parameter) * -(-parameter.shape[-1] // 128)
        low = {"adamw_8bit": parameter.numel() + scales, "adamw_bf16": 2 * parameter.numel()}
        each = low.get(kind, 4 * parameter.numel()) if is_low else 4 * parameter.numel()
        is_one = kind == "sgd" or (kind == "muon" and name in of_blocks)
        total += each * (1 if is_one else 2)
    return total


def _copied_bytes(kind: str, has_masters: bool) -> int:
    model = models.build_on_meta(_model_config())
    linear.convert(model, kind, device=torch.device("cpu"))
    total = 0
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            is_low = isinstance(module, linear.LowPrecisionLinear) and module.spec.gathers_low
            copied = 2 * parameter.numel() if has_masters else 0
            total += parameter.numel() + 4 * len(parameter) if is_low else copied
    return total


def _peaks_in_chunks(rank: int, num_ranks: int) -> dict[str, int]:
    with distributed.session("cpu", ParallelConfig()) as world, mock.patch.object(*_CHUNKS_OF_20):
        found: dict[str, int] = _step(world, {"kind": "none"}, {}, vocab_size=_MANY)["peaks"]
        return found


_MANY = 4096
"""Words of which the head is the largest part of the peak."""
_CHUNKS_OF_20 = (chunks, "MAX_LOGITS_PER_CHUNK", 20 * _MANY)


def test_it_tells_the_memory_of_a_loss_in_chunks(ranks: Ranks) -> None:
    (took,) = ranks.run(_peaks_in_chunks, 1)
    whole = dry_run(_config(1, {"kind": "none"}, {}), _model_config(_MANY), 1)
    with mock.patch.object(*_CHUNKS_OF_20):
        found = dry_run(_config(1, {"kind": "none"}, {}), _model_config(_MANY), 1)
    for phase in ("forward", "backward"):
        assert took[phase] == found.peaks[phase].total() - found.resting[memory.OPTIMIZER], phase
        assert found.peaks[phase] != whole.peaks[phase], phase


# The bytes of both are counted by the same code, and those of weights in INT8 are measured above.
@pytest.mark.parametrize("kind", ["none", pytest.param("int8_weight_only", marks=pytest.mark.slow)])
def test_frozen_parameters_take_no_gradients_and_no_moments(kind: str) -> None:
    cfg = dataclasses.replace(_config(2, {"kind": kind}, {}), global_batch_size=4)
    patterns = ("embed_tokens", "layers.0", "*norm*")
    found = dry_run(dataclasses.replace(cfg, freeze=patterns), _model_config(), 2)
    model = models.build_on_meta(_model_config())
    models.freeze(model, patterns)
    # A rank has half of the rows of each parameter, rounded up.
    sharded = [p for p in model.parameters() if p.requires_grad]
    here = sum(-(-p.shape[0] // 2) * p[0].numel() for p in sharded)
    assert found.resting[memory.OPTIMIZER] == pytest.approx(2 * 4 * here, rel=0.01)  # and a count for each
    assert found.peaks["update"][memory.GRADIENTS] == 4 * here
    assert "frozen, without gradient and optimizer state: " in found.report()
    whole = dry_run(cfg, _model_config(), 2)
    assert whole.resting[memory.PARAMETERS] == found.resting[memory.PARAMETERS]
    assert whole.resting[memory.OPTIMIZER] > found.resting[memory.OPTIMIZER]


@pytest.mark.parametrize(("name", "config"), [("full_dpo", PreferenceConfig), ("full_kto", KtoConfig)])
def test_it_computes_the_objective_of_the_recipe(
    name: str, config: type[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, seen = models.Decoder.forward, []

    def spy(self: Any, tokens: Any, documents: Any, labels: Any, loss: Any) -> Any:
        seen.append(loss)
        return forward(self, tokens, documents, labels, loss)

    monkeypatch.setattr(models.Decoder, "forward", spy)
    cfg = config(
        model=ModelConfig(path="x"),
        data=DataConfig(source="x", seq_len=64),
        device="cpu",
        micro_batch_size=2,
        global_batch_size=4,
    )
    step = recipe.planned_step(catalog.find_recipe(name), cfg)
    assert step is not None
    assert dry_run(cfg, _model_config(), 2, step=step).peak_bytes > 0
    assert set(seen) == {models.log_probabilities}
