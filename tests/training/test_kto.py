"""KTO: loss and gradients against transformers with each answer alone, on one and two ranks; and TRL."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lptune import data, distributed, models, training
from lptune.base.errors import UserError
from lptune.cli import catalog
from lptune.cli.recipe import load_main
from lptune.config import DataConfig, KtoConfig, KtoLossConfig, ModelConfig
from lptune.data.documents import Documents, offsets_of
from lptune.data.packing import one_document_per_row, pack
from lptune.distributed.shards import local_rows
from lptune.models import PRESETS
from tests.helpers.models_oracle import Twins, twins
from tests.helpers.ranks import Ranks
from tests.helpers.trl_peer import loss_of
from tests.training.test_preference import alone, assert_equal_gradients

batch_loss = load_main(catalog.recipes()["full_kto"]).__globals__["batch_loss"]

SEQ_LEN = 48
NUM_ANSWERS = 16
NUM_ROWS = 4
TINY = PRESETS["llama3_2"]["tiny"]
LOSS = KtoLossConfig(beta=0.07, desirable_weight=1.25, undesirable_weight=0.75)


def answers() -> data.Rows:
    """Random tokens; answers of 1 to 9 tokens, after a prompt of 2 to 9; three of five are desirable."""
    draw = np.random.default_rng(0)
    sizes = np.stack([draw.integers(2, 10, NUM_ANSWERS), draw.integers(1, 10, NUM_ANSWERS)], 1)
    lengths = sizes.sum(1)
    made = Documents(
        tokens_T=draw.integers(0, 256, lengths.sum()).astype(np.int32),
        is_target_T=np.concatenate([np.repeat([False, True], size) for size in sizes]),
        offsets_N1=offsets_of(lengths),
        answers_N2=np.stack([sizes[:, 0], lengths], 1).astype(np.int32),
        prompt_keys_N=draw.permutation(NUM_ANSWERS).astype(np.uint64),
        is_desirable_N=np.arange(NUM_ANSWERS) % 5 < 3,
    )
    rows = data.Rows(made, pack(lengths, SEQ_LEN, 0), seq_len=SEQ_LEN, pad_id=0)
    assert rows.num_rows >= NUM_ROWS
    assert rows.num_documents_per_row.max() > 2, "several answers share a row"
    return rows


def config(micro_batch_size: int = 1) -> KtoConfig:
    return KtoConfig(
        model=ModelConfig(path="unused"),
        data=DataConfig(source="unused", seq_len=SEQ_LEN),
        kto=LOSS,
        micro_batch_size=micro_batch_size,
        global_batch_size=NUM_ROWS,
        compute_dtype="float32",
        compile="none",
        activation_checkpointing="none",
    )


@pytest.fixture(scope="module")
def before() -> Twins:
    """The model before training."""
    return twins(TINY)


@pytest.fixture
def model() -> Twins:
    """Weights that are a little different from those before training. They are smaller, so that unrelated
    answers have become more probable and z is above 0.
    """
    made, other = twins(TINY), twins(TINY, seed=7)
    with torch.no_grad():
        for mine, its in zip(made.theirs.parameters(), other.theirs.parameters(), strict=True):
            mine.lerp_(its, 0.2)
    made.ours.load_state_dict(made.theirs.state_dict())
    return made


def numbers_of_step(rows: data.Rows) -> list[int]:
    """The documents of step 0."""
    loader = data.Loader.for_run(rows, config(), rank=0, num_ranks=1)
    batches = loader.micro_batches(0)
    found = [number for batch in batches for number in batch.numbers_D.tolist() if number >= 0]
    assert len(found) == loader.num_documents(0)
    return found


def by_the_paper(model: nn.Module, before: nn.Module, rows: data.Rows) -> tuple[Tensor, float]:
    """The mean loss of step 0, float64, as the paper writes it, and z before the maximum with 0."""
    numbers = numbers_of_step(rows)
    with torch.no_grad():
        ratios = [alone(model, rows.mismatched, i) - alone(before, rows.mismatched, i) for i in numbers]
    mean = torch.stack(ratios).double().mean().item()
    z, total = max(0.0, mean), torch.zeros((), dtype=torch.float64)
    for i in numbers:
        with torch.no_grad():
            reference = alone(before, rows, i).double()
        r = alone(model, rows, i).double() - reference
        if rows.documents.is_desirable_N[i]:
            total = total + 1.25 * (1 - (0.07 * (r - z)).sigmoid())
        else:
            total = total + 0.75 * (1 - (0.07 * (z - r)).sigmoid())
    return total / len(numbers), mean


def of_one_step(
    world: distributed.World, now: dict[str, Tensor], past: dict[str, Tensor], micro_batch_size: int
) -> dict[str, Tensor]:
    """Loss, z and whole gradients of step 0 as the recipe computes it, from the weights `now` and `past`."""
    cfg, rows = config(micro_batch_size), answers()
    model = models.build_on_meta(models.config_from_dict(TINY))
    distributed.parallelize(model, world, cfg)
    distributed.materialize(model, world, cfg)
    for weights in (past, now):
        distributed.reshard(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                local, start = local_rows(parameter)
                local.copy_(weights[name][start : start + local.shape[0]])
        if weights is past:
            found = training.answers_log_p(model, {"train": rows}, cfg, world, mismatched=True)
            reference_N2 = found["train"]
    loader = data.Loader.for_run(rows, cfg, rank=world.data_rank, num_ranks=world.data_size)
    z = training.unrelated_ratio(model, loader.mismatched(0), reference_N2, world)
    sums_M = torch.zeros(len(training.SUMS))
    for batch in loader.micro_batches(0):
        loss, found_M = batch_loss(model, batch, rows, reference_N2, z, cfg)
        (loss * (world.data_size / loader.num_documents(0))).backward()
        sums_M += found_M
    metrics = training.kto_metrics(sums_M, z, world)
    found = {f"metric {name}": torch.tensor(value) for name, value in metrics.items()}
    for name, parameter in model.named_parameters():
        found[name] = distributed.full_tensor(parameter.grad)
    return found


def _of_one_step_on(rank: int, num_ranks: int, *arguments: Any) -> dict[str, Tensor]:
    with distributed.session("cpu") as world:
        return of_one_step(world, *arguments)


@pytest.mark.parametrize(("num_ranks", "micro_batch_size"), [(1, 1), (1, 4), (2, 2)])
def test_loss_and_gradients_equal_transformers_with_each_answer_alone(
    num_ranks: int, micro_batch_size: int, model: Twins, before: Twins, ranks: Ranks
) -> None:
    wanted, mean = by_the_paper(model.theirs, before.theirs, answers())
    assert mean > 0.1, "z is not cut off at 0"
    wanted.backward()  # type: ignore[no-untyped-call]
    now, past = (
        {key: each.detach().clone() for key, each in of.theirs.named_parameters()} for of in (model, before)
    )
    found = ranks.run(_of_one_step_on, num_ranks, now, past, micro_batch_size)[0]
    assert found["metric loss"].item() == pytest.approx(wanted.item(), rel=1e-5)
    assert found["metric kl"].item() == pytest.approx(mean, rel=1e-4)  # of differences of sums of about 30
    for name, parameter in model.theirs.named_parameters():
        assert parameter.grad is not None
        assert (found[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name


def step_of_ours(
    model: Twins, before: Twins, rows: data.Rows, world: distributed.World
) -> tuple[Tensor, ...]:
    """The summed loss, the sums and z over all answers, as one batch of the recipe; and the reference."""
    cfg = config()
    reference_N2 = training.answers_log_p(before.ours, {"rows": rows}, cfg, world, mismatched=True)["rows"]
    everything = range(rows.num_rows)
    z = training.unrelated_ratio(model.ours, [rows.mismatched.batch(everything)], reference_N2, world)
    loss, sums_M = batch_loss(model.ours, rows.batch(everything), rows, reference_N2, z, cfg)
    return loss, sums_M, z, reference_N2


def test_metrics_are_those_of_the_answers(model: Twins, before: Twins, world: distributed.World) -> None:
    rows = answers()
    with torch.no_grad():
        _, sums_M, z, reference_N2 = step_of_ours(model, before, rows, world)
        log_p_N, before_N = (
            torch.stack([alone(of.theirs, rows, i) for i in range(NUM_ANSWERS)]) for of in (model, before)
        )
        unrelated = [alone(before.theirs, rows.mismatched, i) for i in range(NUM_ANSWERS)]
    assert torch.allclose(
        reference_N2, torch.stack([before_N, torch.stack(unrelated)], 1), rtol=1e-5, atol=1e-5
    )
    label_N = torch.from_numpy(rows.documents.is_desirable_N)
    reward_N = 0.07 * (log_p_N - before_N)
    found = training.kto_metrics(sums_M, z, world, "eval_")
    wanted = {
        "eval_reward_desirable": reward_N[label_N].mean().item(),
        "eval_reward_undesirable": reward_N[~label_N].mean().item(),
        "eval_margin": (reward_N[label_N].mean() - reward_N[~label_N].mean()).item(),
        "eval_log_p_desirable": log_p_N[label_N].mean().item(),
        "eval_log_p_undesirable": log_p_N[~label_N].mean().item(),
    }
    assert {key: found[key] for key in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert found.keys() - wanted.keys() == {"eval_loss", "eval_kl"}


def test_answers_of_one_label_have_no_metrics_of_the_other(world: distributed.World) -> None:
    sums_M = torch.tensor([1.0, 2.0, 0.0, 3.0, 0.0, -8.0, 0.0])
    found = training.kto_metrics(sums_M, torch.tensor(0.5), world)
    assert found == {"loss": 0.5, "kl": 0.5, "reward_desirable": 1.5, "log_p_desirable": -4.0}
    json.dumps(found, allow_nan=False)


def test_a_negative_estimate_is_cut_off_at_zero(
    model: Twins, before: Twins, world: distributed.World
) -> None:
    rows = answers()
    _, mean = by_the_paper(before.theirs, model.theirs, rows)
    assert mean < -0.1
    _, _, z, _ = step_of_ours(before, model, rows, world)
    assert z.item() == 0.0


@pytest.mark.parametrize(("distance", "label"), [(90.0, True), (-90.0, True), (90.0, False), (-90.0, False)])
def test_the_loss_stays_exact_where_an_answer_is_far_from_z(distance: float, label: bool) -> None:
    """Against float64: 1 - sigmoid(x) would be 0 in float32 from x = 17 on, with a gradient of 0."""
    rows = answers()
    rows = data.Rows(rows.documents.select(np.array([0])), one_document_per_row(1), seq_len=SEQ_LEN, pad_id=0)
    rows.documents.is_desirable_N[0] = label
    batch = rows.batch([0])
    log_p_BS = torch.zeros(1, SEQ_LEN)
    log_p_BS[batch.labels_BS >= 0] = 2.0 / batch.num_targets
    log_p_BS.requires_grad_()
    reference_N2 = torch.tensor([[2.0 - distance - 1.0, 0.0]])
    loss, _ = training.kto_loss(
        log_p_BS, batch, rows, reference_N2, torch.tensor(1.0), KtoLossConfig(beta=0.5)
    )
    loss.backward()  # type: ignore[no-untyped-call]
    x = 0.5 * distance * (1 if label else -1)
    wanted = 1 / (1 + math.exp(x))
    slope = -0.5 * (1 if label else -1) * wanted * (1 - wanted)
    assert log_p_BS.grad is not None
    assert loss.item() == pytest.approx(
        wanted, rel=1e-4
    )  # x = 45 has 24 bits: its exp is right to 45 * 2^-24
    if abs(slope) > 0:
        assert log_p_BS.grad[batch.labels_BS >= 0][0].item() == pytest.approx(slope, rel=1e-4)


@pytest.mark.filterwarnings("ignore")  # of TRL's own calls
def test_loss_and_gradients_equal_those_of_trl(
    model: Twins, before: Twins, world: distributed.World, tmp_path: Path
) -> None:
    pytest.importorskip("trl")
    rows = answers()
    loss, _, z, _ = step_of_ours(model, before, rows, world)
    mean = loss / NUM_ANSWERS
    assert z.item() > 0.1
    wanted = _trl_loss(rows, model, before, tmp_path)
    assert mean.item() == pytest.approx(wanted.item(), rel=1e-5)
    wanted.backward()  # type: ignore[no-untyped-call]
    mean.backward()  # type: ignore[no-untyped-call]
    assert_equal_gradients(model)


def _trl_loss(rows: data.Rows, model: Twins, before: Twins, folder: Path) -> Tensor:
    """The mean loss of TRL's KTOTrainer over all answers, as one batch, with the mismatched answers of ours:
    TRL rotates those of a batch in their order, ours rotate within a packed row.
    """
    from trl import KTOConfig, KTOTrainer

    examples = []
    for i in range(NUM_ANSWERS):
        example: dict[str, Any] = {"label": bool(rows.documents.is_desirable_N[i])}
        for name, each in (("completion_ids", rows), ("KL_completion_ids", rows.mismatched)):
            start, stop = each.documents.place(i)
            tokens = each.documents.tokens_T[start:stop].tolist()
            first = int(each.documents.answers_N2[i, 0])
            example |= {"prompt_ids": tokens[:first], name: tokens[first:]}
        examples.append(example)
    settings = KTOConfig(
        output_dir=str(folder), beta=LOSS.beta, desirable_weight=LOSS.desirable_weight,
        undesirable_weight=LOSS.undesirable_weight, per_device_train_batch_size=NUM_ANSWERS, use_cpu=True,
        bf16=False, report_to=[], train_sampling_strategy="sequential",
    )  # fmt: skip
    return loss_of(KTOTrainer, settings, model.theirs, before.theirs, examples)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"beta": 0.0}, "kto.beta: "),
        ({"desirable_weight": -1.0}, "kto.desirable_weight: must be at least 0, found -1"),
        ({"undesirable_weight": math.nan}, "kto.undesirable_weight: "),
        ({"desirable_weight": 0.0, "undesirable_weight": 0.0}, "both are 0, so there is nothing to learn"),
    ],
)
def test_a_wrong_key_is_one_line(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        KtoLossConfig(**keys)


def test_the_prompt_cannot_be_learned() -> None:
    with pytest.raises(UserError, match=r"data\.train_on_prompt: a label is that of an answer"):
        KtoConfig(model=ModelConfig(path="unused"), data=DataConfig(source="unused", train_on_prompt=True))
