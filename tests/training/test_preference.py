"""Preference losses of packed rows: against transformers with each answer alone, and against TRL."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lptune import data, distributed, training
from lptune.base.errors import UserError
from lptune.cli import catalog
from lptune.cli.recipe import load_main
from lptune.config import DataConfig, ModelConfig, PreferenceConfig, PreferenceLossConfig
from lptune.data.documents import Documents, offsets_of
from lptune.data.packing import pack_groups
from lptune.models import PRESETS
from tests.helpers.models_oracle import Twins, twins
from tests.helpers.trl_peer import loss_of

batch_loss = load_main(catalog.recipes()["full_dpo"]).__globals__["batch_loss"]

SEQ_LEN = 48
NUM_PREFERENCES = 9
LOSSES = {
    "dpo": PreferenceLossConfig(beta=0.3),
    "dpo, smoothed": PreferenceLossConfig(beta=0.3, label_smoothing=0.2),
    "dpo, averaged": PreferenceLossConfig(beta=0.7, average_log_p=True),
    "ipo": PreferenceLossConfig(loss="ipo", beta=0.4),
    "ipo, summed": PreferenceLossConfig(loss="ipo", beta=0.2, average_log_p=False),
    "simpo": PreferenceLossConfig(loss="simpo"),
    "simpo, smoothed": PreferenceLossConfig(loss="simpo", beta=1.5, target_margin=0.8, label_smoothing=0.1),
    "orpo": PreferenceLossConfig(loss="orpo", beta=0.5),
}


def preferences() -> data.Rows:
    """Random tokens; answers of 1 to 9 tokens, after a prompt of 2 to 9 that both documents begin with."""
    draw = np.random.default_rng(0)
    documents, targets = [], []
    for _ in range(NUM_PREFERENCES):
        prompt = draw.integers(0, 256, draw.integers(2, 10))
        for _ in range(2):
            answer = draw.integers(0, 256, draw.integers(1, 10))
            documents.append(np.concatenate([prompt, answer]).astype(np.int32))
            targets.append(np.arange(len(documents[-1])) >= len(prompt))
    lengths = np.array([len(tokens) for tokens in documents])
    made = Documents(
        tokens_T=np.concatenate(documents),
        is_target_T=np.concatenate(targets),
        offsets_N1=offsets_of(lengths),
        answers_N2=np.zeros((len(documents), 2), dtype=np.int32),
        prompt_keys_N=np.zeros(len(documents), dtype=np.uint64),
    )
    return data.Rows(made, pack_groups(lengths, 2, SEQ_LEN, 0), seq_len=SEQ_LEN, pad_id=0)


def config(loss: PreferenceLossConfig = LOSSES["dpo"]) -> PreferenceConfig:
    return PreferenceConfig(
        model=ModelConfig(path="unused"),
        data=DataConfig(source="unused", seq_len=SEQ_LEN),
        preference=loss,
        micro_batch_size=2,
    )


@pytest.fixture
def model() -> Twins:
    return twins(PRESETS["llama3_2"]["tiny"])


@pytest.fixture(scope="module")
def before() -> Twins:
    """The model before training: other weights."""
    return twins(PRESETS["llama3_2"]["tiny"], seed=7)


def alone(theirs: nn.Module, rows: data.Rows, number: int) -> Tensor:
    """log π of the answer of one document, by transformers."""
    start, stop = rows.documents.place(number)
    tokens_S = torch.from_numpy(rows.documents.tokens_T[start:stop]).long()
    is_target_S = torch.from_numpy(rows.documents.is_target_T[start:stop])
    log_p_SV = theirs(tokens_S[None]).logits[0, :-1].log_softmax(-1)
    log_p_S: Tensor = log_p_SV.gather(1, tokens_S[1:, None])[:, 0]
    return log_p_S[is_target_S[1:]].sum()


def by_the_papers(
    w: Tensor, x: Tensor, sizes: tuple[int, ...], refs: tuple[float, ...], cfg: PreferenceLossConfig
) -> Tensor:
    """The loss of one preference, as its paper writes it. w, x: log π of both answers; refs: log ρ."""
    beta, smoothing = cfg.beta or (2.0 if cfg.loss == "simpo" else 0.1), cfg.label_smoothing
    if cfg.loss == "orpo":
        p_w, p_l = (w / sizes[0]).exp(), (x / sizes[1]).exp()
        odds_ratio = (p_w / (1 - p_w)) / (p_l / (1 - p_l))
        return -w / sizes[0] - beta * odds_ratio.log().sigmoid().log()
    if cfg.loss == "simpo":
        gamma = 0.5 if cfg.target_margin is None else cfg.target_margin
        h = beta / sizes[0] * w - beta / sizes[1] * x - gamma
        return -(1 - smoothing) * h.sigmoid().log() - smoothing * (-h).sigmoid().log()
    averages = cfg.loss == "ipo" if cfg.average_log_p is None else cfg.average_log_p
    per = sizes if averages else (1, 1)
    h = (w - refs[0]) / per[0] - (x - refs[1]) / per[1]
    if cfg.loss == "ipo":
        return (h - 1 / (2 * beta)) ** 2
    return -(1 - smoothing) * (beta * h).sigmoid().log() - smoothing * (-beta * h).sigmoid().log()


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_of_packed_preferences_equal_transformers_with_each_answer_alone(
    name: str, model: Twins, before: Twins, world: distributed.World
) -> None:
    rows, cfg = preferences(), config(LOSSES[name])
    assert rows.num_rows < NUM_PREFERENCES, "several preferences share a row"
    reference = {}
    if cfg.preference.has_reference:
        reference = training.answers_log_p(before.ours, {"train": rows}, cfg, world)
    loss, metrics_M = batch_loss(
        model.ours, rows.batch(range(rows.num_rows)), reference.get("train"), cfg, world
    )
    loss.backward()

    total = torch.zeros((), dtype=torch.float64)
    for i in range(0, 2 * NUM_PREFERENCES, 2):
        w, x = (alone(model.theirs, rows, number).double() for number in (i, i + 1))
        with torch.no_grad():
            refs = tuple(alone(before.theirs, rows, number).item() for number in (i, i + 1))
        sizes = tuple(rows.documents.num_targets_N[i : i + 2].tolist())
        total = total + by_the_papers(w, x, sizes, refs, cfg.preference)
    total.backward()  # type: ignore[no-untyped-call]

    assert loss.item() == pytest.approx(total.item(), rel=1e-5)
    assert metrics_M[training.METRICS.index("loss")] == loss.detach()
    assert_equal_gradients(model)


def assert_equal_gradients(model: Twins) -> None:
    theirs = dict(model.theirs.named_parameters())
    for key, parameter in model.ours.named_parameters():
        wanted, found = theirs[key].grad, parameter.grad
        assert wanted is not None
        assert found is not None
        assert (found - wanted).norm() <= 1e-5 * wanted.norm(), key


def test_metrics_are_those_of_the_answers(model: Twins, before: Twins, world: distributed.World) -> None:
    rows, cfg = preferences(), config()
    reference = training.answers_log_p(before.ours, {"train": rows}, cfg, world)["train"]
    with torch.no_grad():
        _, sums_M = batch_loss(model.ours, rows.batch(range(rows.num_rows)), reference, cfg, world)
        log_p_N = torch.stack([alone(model.theirs, rows, i) for i in range(rows.num_documents)])
        before_N = torch.stack([alone(before.theirs, rows, i) for i in range(rows.num_documents)])
    assert torch.allclose(reference, before_N, rtol=1e-5, atol=1e-5)
    found = training.mean_metrics(sums_M, NUM_PREFERENCES, world, "eval_")
    reward_P2 = 0.3 * (log_p_N - before_N).view(-1, 2)
    margin_P = reward_P2[:, 0] - reward_P2[:, 1]
    wanted = {
        "eval_accuracy": (margin_P > 0).float().mean(),
        "eval_reward_chosen": reward_P2[:, 0].mean(),
        "eval_reward_rejected": reward_P2[:, 1].mean(),
        "eval_margin": margin_P.mean(),
        "eval_log_p_chosen": log_p_N[0::2].mean(),
        "eval_log_p_rejected": log_p_N[1::2].mean(),
    }
    assert 0 < wanted["eval_accuracy"] < 1, "both orders occur"
    assert {key: found[key] for key in wanted} == pytest.approx(
        {k: v.item() for k, v in wanted.items()}, rel=1e-4
    )


def test_orpo_stays_exact_where_an_answer_is_nearly_certain() -> None:
    log_p_P2 = torch.tensor([[-1e-6, -30.0]], requires_grad=True)
    answers = training.preference.Answers(log_p_P2, torch.ones(1, 2), None)
    loss, _ = training.preference_loss(answers, PreferenceLossConfig(loss="orpo", beta=1.0))
    loss.backward()
    w, x = (torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in (-1e-6, -30.0))
    wanted = by_the_papers(w, x, (1, 1), (0.0, 0.0), PreferenceLossConfig(loss="orpo", beta=1.0))
    wanted.backward()
    assert w.grad is not None
    assert x.grad is not None
    assert log_p_P2.grad is not None
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-6)
    assert log_p_P2.grad[0].tolist() == pytest.approx([w.grad.item(), x.grad.item()], abs=1e-5)


@pytest.mark.filterwarnings("ignore")  # of TRL's own calls
@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo, smoothed", "orpo"])
def test_losses_equal_those_of_trl(
    name: str, model: Twins, before: Twins, world: distributed.World, tmp_path: Path
) -> None:
    """dpo and ipo: the loss of TRL's trainer on the same batch. simpo and orpo: its loss functions, on
    log-probabilities of transformers, since TRL's orpo also adds the cross-entropy of the prompt.
    """
    pytest.importorskip("trl")
    rows, cfg = preferences(), config(LOSSES[name])
    reference = training.answers_log_p(before.ours, {"train": rows}, cfg, world)["train"]
    reference_N = reference if cfg.preference.has_reference else None
    loss, _ = batch_loss(model.ours, rows.batch(range(rows.num_rows)), reference_N, cfg, world)
    mean = loss / NUM_PREFERENCES
    if cfg.preference.has_reference:
        wanted = _trl_loss(rows, model, before, cfg.preference, tmp_path)
        assert mean.item() == pytest.approx(wanted.item(), rel=1e-5)
        wanted.backward()  # type: ignore[no-untyped-call]
        mean.backward()
        assert_equal_gradients(model)
        return
    with torch.no_grad():
        log_p_N = torch.stack([alone(model.theirs, rows, i) for i in range(rows.num_documents)])
    mean_P2 = (log_p_N / torch.from_numpy(rows.documents.num_targets_N)).view(-1, 2)
    me = SimpleNamespace(
        beta=cfg.preference.beta, alpha=0.0, loss_type="simpo", simpo_gamma=cfg.preference.target_margin,
        label_smoothing=cfg.preference.label_smoothing, accelerator=SimpleNamespace(device="cpu"),
    )  # fmt: skip
    if cfg.preference.loss == "simpo":
        from trl.experimental.cpo import CPOTrainer

        wanted_P = CPOTrainer.cpo_loss(me, *mean_P2.unbind(1))[0]
    else:
        from trl.experimental.orpo import ORPOTrainer

        wanted_P = -mean_P2[:, 0] - ORPOTrainer.odds_ratio_loss(me, *mean_P2.unbind(1))[0]
    assert mean.item() == pytest.approx(wanted_P.mean().item(), rel=1e-5)


def _trl_loss(
    rows: data.Rows, model: Twins, before: Twins, loss: PreferenceLossConfig, folder: Path
) -> Tensor:
    """The mean loss of TRL's DPOTrainer over all preferences, as one batch."""
    from trl import DPOConfig, DPOTrainer

    examples = []
    for i in range(0, 2 * NUM_PREFERENCES, 2):
        example = dict[str, list[int]]()
        for name, number in (("chosen_ids", i), ("rejected_ids", i + 1)):
            start, stop = rows.documents.place(number)
            tokens = rows.documents.tokens_T[start:stop].tolist()
            num_targets = int(rows.documents.num_targets_N[number])
            example |= {"prompt_ids": tokens[:-num_targets], name: tokens[-num_targets:]}
        examples.append(example)
    settings = DPOConfig(
        output_dir=str(folder), loss_type=["sigmoid" if loss.loss == "dpo" else "ipo"], beta=loss.beta,
        per_device_train_batch_size=NUM_PREFERENCES, use_cpu=True, bf16=False, report_to=[],
    )  # fmt: skip
    return loss_of(DPOTrainer, settings, model.theirs, before.theirs, examples)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"loss": "kto"}, "preference.loss: .*dpo, ipo, simpo, orpo"),
        ({"beta": 0.0}, "preference.beta: "),
        ({"label_smoothing": 0.5}, "preference.label_smoothing: must be at least 0 and below 0.5, found 0.5"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "preference.label_smoothing: belongs to dpo and simpo"),
        ({"target_margin": 0.5}, "preference.target_margin: belongs to simpo, and preference.loss is dpo"),
        ({"loss": "orpo", "average_log_p": False}, "preference.average_log_p: belongs to dpo and ipo"),
    ],
)
def test_a_wrong_key_is_one_line(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PreferenceLossConfig(**keys)


def test_the_prompt_cannot_be_learned() -> None:
    with pytest.raises(UserError, match=r"data\.train_on_prompt: a preference compares"):
        PreferenceConfig(
            model=ModelConfig(path="unused"), data=DataConfig(source="unused", train_on_prompt=True)
        )
