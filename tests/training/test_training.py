"""Schedules, optimizer groups, clipping, greedy answers, metrics."""

import copy
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lptune import distributed, training
from lptune.base.errors import UserError
from lptune.config import LoggingConfig, OptimizerConfig, ScheduleConfig
from tests.helpers.tiny_run import clip_grad_norm


def _rates(num_steps: int = 10, **keys: object) -> list[float]:
    cfg = ScheduleConfig(**keys)  # type: ignore[arg-type]
    return [training.learning_rate(step, num_steps, 2.0, cfg) for step in range(num_steps)]


def test_warm_up_rises_linearly_to_the_peak() -> None:
    assert _rates(warmup_steps=4, kind="constant") == [0.5, 1.0, 1.5, 2.0] + [2.0] * 6


def test_cosine_and_linear_fall_from_peak_to_floor() -> None:
    cosine, linear = _rates(kind="cosine"), _rates(kind="linear", min_lr_ratio=0.5)
    assert cosine[0] == linear[0] == 2.0
    assert cosine[5] == pytest.approx(1.0)
    assert linear[5] == pytest.approx(2.0 * (0.5 + 0.5 * 0.5))
    for rates in (cosine, linear):
        assert all(a > b for a, b in itertools.pairwise(rates))
    assert training.learning_rate(10, 10, 2.0, ScheduleConfig(min_lr_ratio=0.1)) == pytest.approx(0.2)


def test_warm_up_longer_than_the_run_is_no_division_by_zero() -> None:
    assert _rates(3, warmup_steps=5) == pytest.approx([0.4, 0.8, 1.2])


@pytest.mark.parametrize(
    ("shape", "left"),
    [
        ("linear", lambda done: 1 - done),
        ("cosine", lambda done: (1 + math.cos(math.pi * done)) / 2),
        ("1-sqrt", lambda done: 1 - done**0.5),
    ],
)
def test_wsd_warms_up_stays_at_the_peak_and_decays_to_the_floor(
    shape: str, left: Callable[[float], float]
) -> None:
    rates = _rates(20, kind="wsd", warmup_steps=4, decay_steps=8, decay_shape=shape, min_lr_ratio=0.1)
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4:12] == [2.0] * 8
    expected = [2.0 * (0.1 + 0.9 * left(i / 8)) for i in range(8)]
    assert rates[12:] == pytest.approx(expected, rel=1e-12)
    cfg = ScheduleConfig(kind="wsd", decay_steps=8, decay_shape=shape, min_lr_ratio=0.1)
    assert training.learning_rate(20, 20, 2.0, cfg) == pytest.approx(0.2)


@pytest.mark.parametrize("shape", ["linear", "cosine", "1-sqrt"])
@pytest.mark.parametrize("decay_steps", [1, 5])
def test_wsd_counts_the_steps_of_its_decay_as_transformers(shape: str, decay_steps: int) -> None:
    import transformers

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)
    schedule = transformers.get_wsd_schedule(
        optimizer, num_warmup_steps=0, num_decay_steps=decay_steps, num_training_steps=12,
        decay_type=shape, min_lr_ratio=0.1,
    )  # fmt: skip
    theirs = []
    for _ in range(12):
        theirs += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    keys = {"kind": "wsd", "decay_shape": shape, "min_lr_ratio": 0.1}
    assert _rates(12, decay_steps=decay_steps, **keys) == pytest.approx(theirs, rel=1e-12)
    if shape == "linear":
        assert theirs[-1] == pytest.approx({1: 2.0, 5: 2.0 * 0.28}[decay_steps])


def test_the_stable_phase_does_not_depend_on_the_length_of_the_run() -> None:
    keys = {"kind": "wsd", "warmup_steps": 3, "decay_steps": 5, "decay_shape": "1-sqrt"}
    short, long = _rates(20, **keys), _rates(90, **keys)
    assert short[:15] == long[:15]
    assert short[15:] != long[15:20]
    assert short[15:] == long[-5:]


def test_a_schedule_that_does_not_fit_its_run_is_refused() -> None:
    with pytest.raises(UserError, match="10 steps of warm-up and 30 of decay do not fit into the 39 steps"):
        ScheduleConfig(kind="wsd", warmup_steps=10, decay_steps=30).check_fits(39)
    ScheduleConfig(kind="wsd", warmup_steps=10, decay_steps=30).check_fits(40)
    with pytest.raises(UserError, match=r"schedule\.decay_steps: wsd needs the number of steps"):
        ScheduleConfig(kind="wsd")
    with pytest.raises(
        UserError, match=r"schedule\.decay_steps: belongs to schedule\.kind=wsd, found .*cosine"
    ):
        ScheduleConfig(decay_steps=3)
    with pytest.raises(UserError, match=r"schedule\.decay_shape: belongs to schedule\.kind=wsd"):
        ScheduleConfig(decay_shape="1-sqrt")


def test_weight_decay_is_on_matrices_only() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = training.build_optimizer(model, OptimizerConfig(weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        "0.weight": 0.1,
        "0.bias": 0.0,
        "1.weight": 0.0,
        "1.bias": 0.0,
    }


def test_clipping_reports_the_norm_before_and_bounds_the_norm_after() -> None:
    model = nn.Linear(4, 4)
    model.weight.grad, model.bias.grad = torch.full((4, 4), 3.0), torch.full((4,), 4.0)
    norm = clip_grad_norm(model, 1.0)
    expected = math.sqrt(16 * 9 + 4 * 16)
    assert float(norm) == pytest.approx(expected)
    after = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))  # type: ignore[union-attr]
    assert after == pytest.approx(1.0, rel=1e-5)
    model.weight.grad.fill_(3.0)
    clip_grad_norm(model, 0.0)
    assert (model.weight.grad == 3.0).all()


class _Operators(TorchDispatchMode):
    """Counts the operators that run on plain tensors, views and copies to the same device apart."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its operators on local tensors come here
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_sharded", [False, True])
def test_norm_and_clipping_are_one_operator_each_for_all_gradients(is_sharded: bool) -> None:
    names = []
    with distributed.session("cpu") as world:
        for num_layers in (1, 7):
            model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(num_layers)))
            if is_sharded:
                fully_shard(model, mesh=world.mesh)
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 3.0)
            with _Operators() as operators:
                clip_grad_norm(model, 1.0)
            names.append([name for name in operators.names if name not in ("detach", "view")])
    assert names[0] == names[1]
    assert names[0].count("_foreach_norm") == names[0].count("_foreach_mul_") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_norm", [0.1, 1e9])
def test_clipped_gradients_have_the_bits_of_torch(dtype: torch.dtype, max_norm: float) -> None:
    model = nn.Sequential(nn.Linear(31, 17), nn.Linear(17, 5)).to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    twin = copy.deepcopy(model)
    for ours, its in zip(model.parameters(), twin.parameters(), strict=True):
        its.grad = ours.grad.clone()  # type: ignore[union-attr]
    norm = clip_grad_norm(model, max_norm)
    nn.utils.clip_grads_with_norm_(twin.parameters(), max_norm, norm)
    for ours, its in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, its.grad)  # type: ignore[arg-type]


def test_without_gradients_the_norm_is_zero_and_without_parameters_to_train_there_is_no_optimizer() -> None:
    model = nn.Linear(4, 4)
    assert float(clip_grad_norm(model, 1.0)) == 0.0
    assert float(clip_grad_norm(nn.Module(), 1.0)) == 0.0
    with distributed.session("cpu") as world:
        before = model.weight.detach().clone()
        optimizer = training.build_optimizer(model, OptimizerConfig())
        updated = training.Update(model, optimizer, world, 1.0)(torch.tensor(3.0), 2)
    assert updated == (1.5, 0.0)
    assert torch.equal(model.weight, before)
    with pytest.raises(ValueError, match="no parameter has requires_grad, so there is nothing to train"):
        training.build_optimizer(model.requires_grad_(False), OptimizerConfig())


class _Counter(nn.Module):
    """Predicts token + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot((tokens_BS + 1) % 50, 50).float()


def test_greedy_answers_rows_of_different_length_and_stops() -> None:
    answers = training.greedy(
        _Counter(), [[3], [10, 20], [6, 7]], max_new_tokens=4, stop_ids=[9, 23], pad_id=0
    )
    assert answers == [[4, 5, 6, 7], [21, 22], [8]]
    assert training.greedy(_Counter(), [], max_new_tokens=4, stop_ids=[], pad_id=0) == []


def test_metrics_read_back_bit_for_bit(tmp_path: Path) -> None:
    loss = 0.1 + 0.2
    path = tmp_path / "metrics.jsonl"
    with training.MetricsWriter(path, LoggingConfig(), enabled=True, num_steps=2, first_step=0) as metrics:
        metrics.write({"step": 1, "loss": loss, "mfu": None})
        metrics.write({"step": 2, "loss": 1e-300})
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert records == [{"step": 1, "loss": loss, "mfu": None}, {"step": 2, "loss": 1e-300}]


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    with training.MetricsWriter(path, LoggingConfig(), enabled=False, num_steps=2, first_step=0) as metrics:
        metrics.write({"step": 1, "loss": 1.0})
    assert not path.exists()
    assert capsys.readouterr().out == ""


def test_a_missing_tracker_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for keys, package in (
        ({"tensorboard": True}, "tensorboard"),
        ({"wandb_project": "p"}, "wandb"),
        ({"trackio_project": "p"}, "trackio"),
    ):
        with pytest.raises(UserError, match=rf"{package} is not installed; run: .* '{package}>=\d"):
            training.check_logging(LoggingConfig(**keys))  # type: ignore[arg-type]
    training.check_logging(LoggingConfig())
