"""A step that is not finite leaves no trace, on any rank, and the host does not have to look for it first."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lptune import data, distributed, linear, models, training
from lptune.config import OPTIMIZER_KINDS, LoggingConfig, OptimizerConfig, ParallelConfig
from tests.helpers import tiny_run
from tests.helpers.ranks import Ranks
from tests.helpers.slow import slow_but
from tests.helpers.tiny_run import TinyRun, clip_grad_norm

KINDS = (
    "none",
    "int8_rowcol",
    "float8_delayed",
    "int8_weight_only",
    "adamw_8bit",
    "adamw_bf16",
    "muon",
    "sgd",
)
"""Of precision, or of an optimizer."""
BATCH_LOSS = tiny_run.batch_loss


class _BadGradient(torch.autograd.Function):
    """Itself, with a gradient that is not finite."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.factor, None


def _spoilt(how: str) -> Callable[..., Tensor]:
    """The recipe's batch_loss, with what is not finite in the loss, or in gradients alone."""

    def batch_loss(model: models.Decoder, batch: data.Batch, world: distributed.World) -> Tensor:
        loss: Tensor = BATCH_LOSS(model, batch, world)
        if how == "gradient":
            return _BadGradient.apply(loss, math.inf)  # type: ignore[no-any-return, no-untyped-call]
        return loss * float(how)

    return batch_loss


class _Loop:
    """The recipe's step."""

    def __init__(self, kind: str, world: distributed.World) -> None:
        precision = {"stochastic_rounding": True} if kind == "int8_rowcol" else {}
        keys: dict[str, Any] = {"parallel": ParallelConfig(tensor=world.ranks_per_row)}
        if kind in OPTIMIZER_KINDS:
            momentum = {"momentum": 0.9} if kind == "sgd" else {}
            keys["optimizer"] = OptimizerConfig(kind=kind, lr=1e-3, weight_decay=0.1, **momentum)
            kind = "int8_weight_only" if kind == "adamw_8bit" else "none"
        cfg = tiny_run.config(kind, precision=precision, **keys)
        self.run = run = TinyRun(cfg, world, tiny_run.decoder_config())
        self.update = training.Update(run.model, run.optimizer, world, cfg.max_grad_norm, run.low)

    def step(self, step: int, spoilt: str | None = None) -> training.Updated:
        """spoilt: how this rank's loss of the step is."""
        run = self.run
        batches, num_targets = run.batches(step), run.num_targets(step)
        loss = _spoilt(spoilt) if spoilt else BATCH_LOSS
        with mock.patch.object(tiny_run, "batch_loss", loss), run.low.step(step, len(batches)):
            loss_sum = tiny_run.forward_backward(run.model, batches, num_targets, run.cfg, run.world, run.low)
        return self.update(loss_sum, num_targets)

    def state(self) -> dict[str, Tensor]:
        return state_of(self.run)


def state_of(run: TinyRun) -> dict[str, Tensor]:
    """All that a later step depends on, this rank's part."""
    distributed.reshard(run.model)
    found: dict[str, Tensor] = {}
    for name, parameter in run.model.named_parameters():
        for key, value in run.optimizer.state.get(parameter, {}).items():
            found[f"{key}/{name}"] = torch.as_tensor(value)
        int8 = linear.int8_rows(parameter)
        if int8 is None:
            found[name] = linear.dequantized(parameter.detach())
        else:
            found |= {f"q/{name}": int8.q_NK, f"scale/{name}": int8.scale_N1}
    found |= run.low.state()
    return {name: distributed.on_this_rank(tensor).detach().clone() for name, tensor in found.items()}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


def _with_skipped_steps(rank: int, num_ranks: int, kind: str, tensor: int) -> dict[str, Any]:
    """Steps 0 to 5, of which the last rank spoils 0, 2, 3 and 4, beside a run of steps 1 and 5 alone."""
    with distributed.session("cpu", ParallelConfig(tensor=tensor)) as world:
        loop, other = _Loop(kind, world), _Loop(kind, world)
        updated, changed = {}, {}
        for step, how in enumerate(("nan", None, "inf", "gradient", "-inf", None)):
            before = loop.state()
            # Tensor-parallel ranks compute one loss together.
            updated[step] = loop.step(step, how if rank >= num_ranks - tensor else None)
            after = loop.state()
            changed[step] = differing({name: after[name] for name in before}, before)
        for step in (1, 5):
            assert other.step(step) == updated[step]
        return {
            "skipped": [each.skipped for each in updated.values()],
            "loss_is_finite": [math.isfinite(each.loss) for each in updated.values()],
            "changed": {step: len(names) for step, names in changed.items()},
            "num_tensors": len(before),
            "unlike_a_run_without_them": differing(loop.state(), other.state()),
            "counts": loop.update.counts(),
            "not_finite": [name for name, tensor in after.items() if not tensor.isfinite().all()],
        }


@pytest.mark.parametrize(
    ("kind", "num_ranks", "tensor"),
    # On two ranks: a history that they share, weights in INT8, state that is on a rank alone (muon's), and
    # rows that they share. The others are as on one.
    slow_but(
        lambda kind, n, tensor: (
            n == 1 or tensor == 2 or kind in ("float8_delayed", "int8_weight_only", "muon")
        ),
        [*((kind, n, 1) for kind in KINDS for n in (1, 2)), ("int8_rowcol", 2, 2)],
    ),
)
def test_a_step_that_is_not_finite_on_one_rank_leaves_no_trace_on_any(
    kind: str, num_ranks: int, tensor: int, ranks: Ranks
) -> None:
    """Weights, moments, counts, histories and random bits are, after it and after the next update, those
    of a run that never took that step.
    """
    for found in ranks.run(_with_skipped_steps, num_ranks, kind, tensor):
        assert found["skipped"] == [True, False, True, True, True, False]
        # A gradient alone is enough.
        assert found["loss_is_finite"] == [False, True, False, True, False, True]
        assert {step: found["changed"][step] for step in (0, 2, 3, 4)} == dict.fromkeys((0, 2, 3, 4), 0)
        assert found["changed"][5] > found["num_tensors"] / 2
        assert found["unlike_a_run_without_them"] == []
        assert found["not_finite"] == []
        assert found["counts"] == {"num_skipped": 4, "num_skipped_in_a_row": 0}


READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__")
"""Methods of a tensor that wait for its device; operators that do are seen by _Operators."""


def _norm_of_the_first_step(rank: int, num_ranks: int, replicate: int) -> float:
    with distributed.session("cpu", ParallelConfig(replicate=replicate)) as world:
        return _Loop("none", world).step(0).grad_norm


def test_replicas_count_once_in_the_gradient_norm(ranks: Ranks) -> None:
    sharded, replicated = (ranks.run(_norm_of_the_first_step, 2, replicate)[0] for replicate in (1, 2))
    assert replicated == pytest.approx(sharded, rel=1e-5)  # sums in another order


class _Operators(TorchDispatchMode):
    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "_unique2"):
            self._reads.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads(host_tensors: list[Tensor]) -> Iterator[list[str]]:
    """Names of what reads a tensor's values meanwhile, but for tensors that are on the host on any device."""
    reads: list[str] = []
    on_host = {tensor.untyped_storage().data_ptr() for tensor in host_tensors}

    def watched(name: str) -> Callable[..., Any]:
        method = getattr(Tensor, name)

        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.untyped_storage().data_ptr() not in on_host:
                reads.append(name)
            return method(tensor, *args, **kwargs)

        return read

    with mock.patch.multiple(Tensor, **{name: watched(name) for name in READS}), _Operators(reads):
        yield reads


def _reads_of_a_step(rank: int, num_ranks: int, kind: str) -> list[dict[str, list[str]]]:
    found = []
    with distributed.session("cpu") as world:
        loop = _Loop(kind, world)
        run = loop.run
        handles = [
            module.handle for module in run.model.modules() if isinstance(module, linear.LowPrecisionLinear)
        ]
        optimizer_step = run.optimizer.step
        for step in range(3):
            batches, num_targets = run.batches(step), run.num_targets(step)
            before_the_update: list[str] = []

            def launched(so_far: list[str] = before_the_update) -> None:
                optimizer_step()
                so_far += reads

            low_step = run.low.step(step, len(batches))
            low_step.__enter__()
            with host_reads(handles) as reads, mock.patch.object(run.optimizer, "step", launched):
                loss_sum = tiny_run.forward_backward(run.model, batches, num_targets, run.cfg, world, run.low)
                low_step.__exit__(None, None, None)
                loop.update(loss_sum, num_targets)
            found.append({"before": before_the_update, "all": list(reads)})
    return found


@pytest.mark.parametrize(
    "kind", slow_but(lambda kind: kind in ("int8_rowcol", "float8_delayed", "adamw_8bit", "muon"), KINDS)
)
def test_the_host_reads_once_a_step_and_only_after_the_update_was_launched(kind: str, ranks: Ranks) -> None:
    for found in ranks.run(_reads_of_a_step, 2, kind):
        assert found == [{"before": [], "all": ["tolist"]}] * 3


def test_reads_are_seen_however_they_are_made() -> None:
    tensor, host = torch.ones(2), torch.ones(1)
    with host_reads([host]) as reads:
        float(tensor[0])
        tensor.tolist()
        bool((tensor > 0).all())
        tensor[tensor > 0]
        torch.equal(tensor, tensor)
        float(host)
    assert {"__float__", "tolist", "__bool__", "equal"} <= set(reads)
    assert len(reads) > len(set(reads)) - 1 >= 4


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, foreach=False),
        lambda parameters: torch.optim.RMSprop(parameters),
    ],
)
def test_an_optimizer_that_does_not_read_found_inf_is_not_called_in_a_skipped_step(
    make: Callable[[Any], torch.optim.Optimizer], capsys: pytest.CaptureFixture[str]
) -> None:
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    optimizer, expected = make(model.parameters()), make(twin.parameters())
    with distributed.session("cpu") as world:
        update = training.Update(model, optimizer, world, 0.0)
        for value in (math.nan, 1.0, math.inf, 2.0):
            for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
                parameter.grad = torch.full_like(parameter, value)
                other.grad = parameter.grad.clone()
            assert update(torch.tensor(1.0), 1).skipped == (not math.isfinite(value))
            if math.isfinite(value):
                expected.step()
            assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert update.counts() == {"num_skipped": 2, "num_skipped_in_a_row": 0}
    said = capsys.readouterr().out.splitlines()
    assert said == [
        f"{type(optimizer).__name__} does not read found_inf, so each update waits until the loss and the "
        "gradient norm are known"
    ]


def _norms_beside_plain(rank: int, num_ranks: int, is_sharded: bool) -> list[float]:
    """The norm of 4 x 4 gradients of 3 and a plain vector of 4, by clip_grad_norm and by an update."""
    with distributed.session("cpu") as world:
        weight = torch.zeros(4, 4)
        model = nn.Module()
        placed = distribute_tensor(weight, world.mesh, [Shard(0)]) if is_sharded else weight
        model.weight, model.bias = nn.Parameter(placed), nn.Parameter(torch.zeros(4))
        found = []
        for clips in (True, False):
            model.weight.grad, model.bias.grad = torch.full_like(model.weight, 3.0), torch.full((4,), 4.0)
            if clips:
                found.append(float(clip_grad_norm(model, 0.0)))
            else:
                # Two groups: the fused kernel takes no DTensor beside a plain tensor.
                groups = [{"params": [model.weight]}, {"params": [model.bias]}]
                optimizer = training.AdamW(groups, fused=True)
                update = training.Update(model, optimizer, world, 0.0)
                found.append(update(torch.tensor(1.0), 1).grad_norm)
        return found


@pytest.mark.parametrize("is_sharded", [True, False])
def test_the_gradient_of_a_plain_parameter_counts_once_on_several_ranks(
    ranks: Ranks, is_sharded: bool
) -> None:
    norm = math.sqrt(16 * 9 + 4 * 16)
    for found in ranks.run(_norms_beside_plain, 2, is_sharded):
        assert found == pytest.approx([norm, norm])


def test_state_that_a_skipped_first_step_makes_is_zero() -> None:
    torch.full((10, 4096), 7.0)  # what freed memory may hold
    model = nn.Linear(4096, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    with distributed.session("cpu") as world:
        update = training.Update(model, optimizer, world, 0.0)
        for value in (float("nan"), 1.0):
            model.weight.grad = torch.full_like(model.weight, value)
            assert update(torch.tensor(value), 1).skipped == (value != 1.0)
            if value != 1.0:
                assert not optimizer.state[model.weight]["momentum_buffer"].any()
    assert torch.equal(model.weight, torch.full_like(model.weight, 1.0 - 0.1))


def test_steps_in_a_row_are_counted_through_a_resume_and_end_the_run_in_one_line() -> None:
    with distributed.session("cpu") as world:
        loop = _Loop("none", world)
        saved = {"num_skipped": 7, "num_skipped_in_a_row": 1}
        run = loop.run
        loop.update = training.Update(run.model, run.optimizer, world, 1.0, run.low)
        loop.update.restore(saved)
        loop.step(4, "nan")
        assert loop.update.counts() == {"num_skipped": 8, "num_skipped_in_a_row": 2}
        error = loop.update.diverged(5, Path("run/checkpoints/step-00000002"), Path("run"))
        assert error.exit_code == 3
        text = str(error)
        assert "\n" not in text
        assert text.startswith(
            "diverged at step 5: loss nan, gradient norm nan, not finite for 2 steps in a row"
        )
        assert "still those of step 3, and the newest checkpoint is run/checkpoints/step-00000002." in text
        assert "or precision.kind=none and output_dir=run (this run's); where" in text
        loop.step(5)
        assert loop.update.counts() == {"num_skipped": 8, "num_skipped_in_a_row": 0}
        assert "there is no checkpoint" in str(loop.update.diverged(6, None, Path("run")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_without_master_weights_is_told_what_float32_needs(dtype: torch.dtype) -> None:
    with distributed.session("cpu") as world:
        layer = nn.Linear(4, 4).to(dtype)
        optimizer = training.build_optimizer(layer, OptimizerConfig())
        text = str(training.Update(layer, optimizer, world, 1.0).diverged(1, None, Path("run")))
        assert "set compute_dtype=float32" in text
        # optimizer.master=none is refused with compute_dtype=float32.
        assert ("with optimizer.master=float32," in text) == (dtype == torch.bfloat16)


def test_the_record_of_a_skipped_step_is_strict_json_and_is_always_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"

    def refuse(name: str) -> float:
        raise AssertionError(name)

    with training.MetricsWriter(path, LoggingConfig(), enabled=True, num_steps=99, first_step=0) as metrics:
        metrics.write({"step": 11, "loss": 1.0, "grad_norm": 2.0, "num_skipped": 0})
        metrics.write({"step": 12, "loss": math.nan, "grad_norm": math.inf, "num_skipped": 1, "mfu": None})
    lines = path.read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[1], parse_constant=refuse) == {
        "step": 12,
        "loss": None,
        "grad_norm": None,
        "num_skipped": 1,
        "mfu": None,
    }
    assert capsys.readouterr().out == "step 12/99  loss nan  grad_norm inf  num_skipped 1\n"


def test_averages_of_the_weights_keep_every_bit_in_a_skipped_step() -> None:
    model = nn.Linear(3, 2)
    initial = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = training.build_optimizer(model, OptimizerConfig(lr=0.1, ema_decay=0.99))
    with distributed.session("cpu") as world:
        update = training.Update(model, optimizer, world, 0.0)
        expected = [parameter.double() for parameter in initial]
        num_updates = 0
        for value in (math.nan, 1.0, math.inf, 2.0):  # the first step is skipped: averages begin there
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, value)
            before = [dict(optimizer.state.get(parameter, {})) for parameter in model.parameters()]
            before = [state["ema"].clone() for state in before if state] or initial
            update(torch.tensor(1.0), 1)
            found = [optimizer.state[parameter]["ema"] for parameter in model.parameters()]
            if not math.isfinite(value):
                assert all(map(torch.equal, found, before))
                continue
            num_updates += 1
            decay = (1 + num_updates) / (10 + num_updates)
            weights = [parameter.detach().double() for parameter in model.parameters()]
            expected = [decay * e + (1 - decay) * w for e, w in zip(expected, weights, strict=True)]
            for average, mean in zip(found, expected, strict=True):
                assert (average.double() - mean).abs().amax() <= 8 * 2**-24 * mean.abs().amax()
