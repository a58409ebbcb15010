"""optimizer.in_backward: the bits of an update after backward, one micro-batch, and no NaN in any weight."""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lptune import checkpoint, distributed, linear, training
from lptune.base.errors import UserError
from lptune.config import (
    CheckpointConfig,
    DataConfig,
    FinetuneConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
)
from lptune.training.in_backward import UpdateInBackward, build_update
from tests.helpers import tiny_run
from tests.helpers.ranks import Ranks
from tests.helpers.tiny_run import TinyRun
from tests.training.test_update import differing, host_reads, state_of

Settings = tuple[str, dict[str, Any], dict[str, Any]]
"""precision.kind, keys of the optimizer, and others."""
KINDS: dict[str, Settings] = {
    "adamw": ("int8_rowcol", {}, {"activation_checkpointing": "full"}),
    "adamw_8bit": ("float8_tensorwise", {"kind": "adamw_8bit"}, {}),
    "averages": ("float8_delayed", {"ema_decay": 0.9}, {}),
    "no master": ("none", {"kind": "adamw_bf16", "master": "none"}, {"compute_dtype": "bfloat16"}),
    "stored in INT8": ("int8_weight_only", {"kind": "adamw_8bit"}, {}),
    "sgd": ("int8_rowcol", {"kind": "sgd", "momentum": 0.9}, {}),
    "muon": ("int8_rowcol", {"kind": "muon"}, {}),
}
"""The second's scales are measured after each step."""


class Loop:
    """The recipe's step of one micro-batch on each rank."""

    def __init__(
        self,
        settings: Settings,
        world: distributed.World,
        *,
        in_backward: bool,
        max_grad_norm: float = 0.0,
        cpu_offload: bool = False,
        parallel: ParallelConfig | None = None,
    ) -> None:
        """cpu_offload: of the optimizer."""
        precision, keys, more = settings
        self.cfg = tiny_run.config(
            precision,
            optimizer=OptimizerConfig(
                lr=1e-3, weight_decay=0.1, in_backward=in_backward, cpu_offload=cpu_offload, **keys
            ),
            parallel=parallel or ParallelConfig(tensor=world.ranks_per_row),
            max_grad_norm=max_grad_norm,
            **more,
        )
        self.world = world
        self.run = run = TinyRun(self.cfg, world, tiny_run.decoder_config())
        self.update = build_update(run.model, run.optimizer, world, self.cfg, run.low)
        self.num_left = 0
        """Number of gradients after backward."""

    def step(self, step: int, *, factor: float = 1.0, clip: float = 1.0) -> training.Updated:
        """factor: of this rank's loss. clip: multiplies gradients between backward and the update."""
        run, world = self.run, self.world
        batch = tiny_run.micro_batch(step, world.data_rank, run.seed)
        num_targets = sum(tiny_run.micro_batch(step, n, run.seed).num_targets for n in range(world.data_size))
        with run.low.step(step, 1):
            for each in distributed.accumulate(run.model, [batch], world, self.cfg, run.low):
                loss = tiny_run.batch_loss(run.model, each, world) * factor
                self.update.before_backward(loss)
                (loss * (world.data_size / num_targets)).backward()
        gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
        self.num_left = len(gradients)
        for gradient in gradients if clip != 1.0 else ():
            distributed.on_this_rank(gradient).mul_(torch.tensor(clip))
        return self.update(loss.detach(), num_targets)

    def state(self) -> dict[str, Tensor]:
        return state_of(self.run)


def _beside_an_update_after_backward(
    rank: int, num_ranks: int, kinds: list[str], axes: dict[str, int]
) -> dict[str, Any]:
    found = {}
    with distributed.session("cpu", ParallelConfig(**axes)) as world:
        for kind in kinds:
            after, within = (Loop(KINDS[kind], world, in_backward=each) for each in (False, True))
            before = within.state()
            updated = [(after.step(step), within.step(step)) for step in range(3)]
            state = within.state()
            found[kind] = {
                "updated": updated,
                "left": (after.num_left, within.num_left),
                "differing": differing(after.state(), state),
                "trained": len(differing({name: state[name] for name in before}, before)),
                "num_parameters": len(list(within.run.model.parameters())),
            }
    return found


@pytest.mark.parametrize(
    ("num_ranks", "axes", "kinds"),
    [
        (1, {}, ["adamw", "no master", "stored in INT8"]),  # the others are on two ranks
        (2, {}, ["adamw_8bit", "no master"]),  # stand for the others there
        pytest.param(2, {}, ["adamw", "averages", "stored in INT8", "sgd", "muon"], marks=pytest.mark.slow),
        pytest.param(2, {"tensor": 2}, ["adamw", "adamw_8bit"], marks=pytest.mark.slow),
    ],
    ids=["one rank", "fsdp", "fsdp, others", "tensor"],
)
def test_without_clipping_it_has_the_bits_of_an_update_after_backward(
    num_ranks: int, axes: dict[str, int], kinds: list[str], ranks: Ranks
) -> None:
    for by_kind in ranks.run(_beside_an_update_after_backward, num_ranks, kinds, axes):
        for kind, found in by_kind.items():
            assert found["differing"] == [], kind
            assert all(after == within for after, within in found["updated"]), kind
            assert found["left"][1] == 0 < found["left"][0], kind
            assert found["trained"] >= found["num_parameters"], kind


def _clipped(rank: int, num_ranks: int) -> list[Any]:
    """Steps that are clipped in backward, beside ones whose gradients are multiplied by hand."""
    limit, found = 0.5, []
    with distributed.session("cpu") as world:
        within = Loop(KINDS["adamw"], world, in_backward=True, max_grad_norm=limit)
        by_hand = Loop(KINDS["adamw"], world, in_backward=False)
        factor = 1.0  # the first step does not clip
        for step, spoilt in enumerate((1.0, 1.0, math.nan, 1.0)):
            updated = within.step(step, factor=spoilt)
            if updated.skipped:
                continue
            norm = by_hand.step(step, clip=factor).grad_norm
            assert updated.grad_norm == pytest.approx(norm / factor, rel=1e-6)  # its own is before clipping
            # As Update computes it, in float32, of the norm of the last step that was not skipped.
            norm = torch.tensor(updated.grad_norm, dtype=torch.float32)
            factor = float((limit / (norm + 1e-6)).clamp(max=1.0))
            assert factor < 1
            found.append(differing(within.state(), by_hand.state()))
            assert within.update.counts()["last_grad_norm"] == updated.grad_norm
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_it_clips_by_the_norm_of_the_step_before(num_ranks: int, ranks: Ranks) -> None:
    assert ranks.run(_clipped, num_ranks) == [[[], [], []]] * num_ranks


SPOILT = "model.layers.1.mlp.gate_up_proj.weight"
"""Its gradient is not finite; those of block 0 and of the embedding are."""


def _with_bad_steps(rank: int, num_ranks: int, kind: str) -> dict[str, Any]:
    """A good step; one with a NaN in the loss of the last rank; one with inf in an element of a gradient of
    the last rank; a good step.
    """
    is_last = rank == num_ranks - 1
    with distributed.session("cpu") as world:
        loop, twin = (Loop(KINDS[kind], world, in_backward=True) for _ in range(2))
        states, updated = [], []
        for step in range(4):
            factor = math.nan if step == 1 and is_last else 1.0
            with mock.patch.object(torch, "_foreach_norm", _spoiling(loop) if step == 2 else _FOREACH_NORM):
                updated.append(loop.step(step, factor=factor))
            states.append(loop.state())
        twin.step(0)
        with mock.patch.object(torch, "_foreach_norm", _spoiling(twin)):
            twin.step(2)
        twin.step(3)
        return {
            "skipped": [each.skipped for each in updated],
            "loss_is_finite": [math.isfinite(each.loss) for each in updated],
            "by_loss": differing(states[0], states[1]),
            "by_gradient": differing(states[1], states[2]),
            "not_finite": [name for name, each in states[-1].items() if not each.isfinite().all()],
            "unlike_a_run_without_the_first": differing(states[-1], twin.state()),
            "counts": loop.update.counts(),
            "names": [name for name, _ in loop.run.model.named_parameters()],
        }


_FOREACH_NORM = torch._foreach_norm


def _spoiling(loop: Loop) -> Any:
    """_foreach_norm that sets an element of SPOILT's gradient on the last rank to inf before it looks."""
    parameter = loop.run.model.get_parameter(SPOILT)

    def norms(gradients: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        of = None if parameter.grad is None else distributed.on_this_rank(parameter.grad)
        if loop.world.rank == loop.world.size - 1 and of is not None:
            for each in gradients:
                if each.data_ptr() == of.data_ptr():
                    each[0, 0] = math.inf
        return _FOREACH_NORM(gradients, *args, **kwargs)

    return norms


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [
        *((kind, 1) for kind in ("adamw", "adamw_8bit", "stored in INT8", "sgd")),
        ("adamw_8bit", 2),  # stands for the others on two ranks
        *(pytest.param(kind, 2, marks=pytest.mark.slow) for kind in ("adamw", "stored in INT8", "sgd")),
    ],
)
def test_what_is_not_finite_gets_into_no_weight_on_any_rank(
    kind: str, num_ranks: int, ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    for found in ranks.run(_with_bad_steps, num_ranks, kind):
        assert found["skipped"] == [False, True, True, False]
        assert found["loss_is_finite"] == [True, False, True, True]
        assert found["by_loss"] == []
        # Of all parameters but one the weight, and what is kept of it.
        assert SPOILT in found["names"]
        changed = {name.rpartition("/")[2] for name in found["by_gradient"]}
        assert changed == {name for name in found["names"] if name != SPOILT}
        assert found["not_finite"] == []
        assert found["unlike_a_run_without_the_first"] == []
        assert found["counts"]["num_skipped"] == 2
        assert found["counts"]["num_skipped_in_a_row"] == 0


def test_a_step_that_is_updated_in_part_is_told_and_so_is_the_end_of_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with distributed.session("cpu") as world:
        loop = Loop(KINDS["adamw"], world, in_backward=True)
        loop.step(0)
        loop.step(1, factor=math.nan)
        assert "the weights are still those of step 1," in str(loop.update.diverged(2, None, Path("run")))
        assert capsys.readouterr().out == ""
        with mock.patch.object(torch, "_foreach_norm", _spoiling(loop)):
            loop.step(2)
        assert capsys.readouterr().out.startswith("warning: a gradient was not finite; ")
        text = str(loop.update.diverged(3, None, Path("run")))
        assert "those of step 1, but for parameters with finite gradients since, and there is no" in text
        assert "\n" not in text


def test_a_resume_clips_by_the_norm_that_was_saved() -> None:
    with distributed.session("cpu") as world:
        loops = [Loop(KINDS["adamw"], world, in_backward=True, max_grad_norm=0.1) for _ in range(3)]
        whole, resumed, forgetful = loops
        for loop in loops:
            loop.step(0)
        for loop in (resumed, forgetful):
            loop.update = build_update(loop.run.model, loop.run.optimizer, world, loop.cfg, loop.run.low)
        resumed.update.restore(whole.update.counts())
        for loop in loops:
            loop.step(1)
        assert differing(whole.state(), resumed.state()) == []
        assert differing(whole.state(), forgetful.state()) != []


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_the_host_reads_once_a_step(kind: str) -> None:
    with distributed.session("cpu") as world:
        loop = Loop(KINDS[kind], world, in_backward=True, max_grad_norm=0.1)
        layers = [each for each in loop.run.model.modules() if isinstance(each, linear.LowPrecisionLinear)]
        for step in range(2):
            batch = tiny_run.micro_batch(step, 0, 0)
            with (
                mock.patch.object(tiny_run, "micro_batch", return_value=batch),
                host_reads([each.handle for each in layers]) as reads,
            ):
                loop.step(step)
            assert reads == ["tolist"]


def test_the_order_of_loss_and_backward_and_their_number_are_checked() -> None:
    with distributed.session("cpu") as world:
        layer = nn.Linear(4, 4)
        update = UpdateInBackward(
            layer, training.build_optimizer(layer, OptimizerConfig(in_backward=True)), world, 1.0
        )

        def loss() -> Tensor:
            return layer(torch.ones(2, 4)).sum()

        with pytest.raises(RuntimeError, match=r"step\.add\(loss\) comes before loss\.backward\(\)"):
            loss().backward()
        layer.zero_grad()
        update.before_backward(loss())
        loss().backward()
        with pytest.raises(RuntimeError, match=r"one loss and one backward\(\) in a step"):
            loss().backward()
        with pytest.raises(RuntimeError, match=r"one loss and one backward\(\) in a step"):
            update.before_backward(loss())
        layer.zero_grad()
        update(torch.tensor(1.0), 1)
        update.before_backward(loss())  # a new step
        with pytest.raises(UserError, match=r"in_backward: RMSprop does not read found_inf"):
            UpdateInBackward(layer, torch.optim.RMSprop(layer.parameters()), world, 1.0)


def test_a_parameter_without_a_gradient_does_not_keep_the_others_of_its_block_waiting(ranks: Ranks) -> None:
    assert ranks.run(_with_a_part_unused, 2) == [[True, False]] * 2


def _with_a_part_unused(rank: int, num_ranks: int) -> list[bool]:
    """Whether the two layers of a module, of which one is used, have changed."""
    with distributed.session("cpu") as world:
        block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model = nn.Sequential(block)
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        execution = distributed.Execution(compute_dtype="float32", compile="none")
        distributed.parallelize(model, world, execution, blocks=[block])
        update = UpdateInBackward(
            model, training.build_optimizer(model, OptimizerConfig(in_backward=True)), world, 0.0
        )
        before = [distributed.on_this_rank(p.detach()).clone() for p in model.parameters()]
        with mock.patch.object(block, "forward", lambda x: block[0](x)):
            loss = model(torch.ones(2, 4)).sum()
        update.before_backward(loss)
        loss.backward()
        assert not update(loss.detach(), 1).skipped
        changed = [
            not torch.equal(distributed.on_this_rank(p.detach()), then)
            for p, then in zip(model.parameters(), before, strict=True)
        ]
        return [all(changed[:2]), any(changed[2:])]


BASE = FinetuneConfig(
    model=ModelConfig(path="unused"),
    data=DataConfig(source="unused"),
    optimizer=OptimizerConfig(in_backward=True),
    global_batch_size=8,
    micro_batch_size=2,
)


def test_more_than_one_micro_batch_a_step_is_refused_with_what_to_set() -> None:
    BASE.check_ranks(4)
    dataclasses.replace(BASE, parallel=ParallelConfig(tensor=2)).check_ranks(8)
    with pytest.raises(UserError) as error:
        BASE.check_ranks(2)
    text = str(error.value)
    assert "a rank has 2 in a step; set global_batch_size=4 or micro_batch_size=4, or in_backward" in text
    dataclasses.replace(BASE, global_batch_size=4).check_ranks(2)
    dataclasses.replace(BASE, micro_batch_size=4).check_ranks(2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {
                "parallel": ParallelConfig(cpu_offload=True),
                "optimizer": OptimizerConfig(in_backward=True, ema_decay=0.9),
            },
            "updates weights on the host",
        ),
        ({"parallel": ParallelConfig(replicate=2)}, "would save no memory"),
        ({"optimizer": OptimizerConfig(kind="sgd", in_backward=True)}, "set max_grad_norm=0"),
    ],
)
def test_what_cannot_be_right_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        dataclasses.replace(BASE, **keys)
    dataclasses.replace(BASE, optimizer=OptimizerConfig(kind="sgd", in_backward=True), max_grad_norm=0.0)


def test_a_save_in_the_background_is_copied_before_backward_changes_a_weight(tmp_path: Path) -> None:
    def slow(tensor: Tensor) -> Tensor:
        time.sleep(0.02)  # of each of some 30 tensors: the step after it would be done
        return linear.dequantized(tensor)

    with distributed.session("cpu") as world, mock.patch.object(checkpoint.save, "dequantized", slow):
        loop = Loop(KINDS["adamw"], world, in_backward=True)
        loop.step(0)
        run, cfg = loop.run, CheckpointConfig()
        with checkpoint.CheckpointWriter(tmp_path, run.model, run.optimizer, world, cfg) as writer:
            then = loop.state()
            path = writer.save(1, {"num_skipped": 0, "num_skipped_in_a_row": 0})
            loop.step(1)
            now = loop.state()
            writer.wait()
        saved = {
            name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()
        }
    changed = [name for name in saved if name in then and not torch.equal(then[name], now[name])]
    assert len(changed) > 10
    assert [name for name in changed if not torch.equal(saved[name], then[name])] == []
