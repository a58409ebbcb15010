"""`lptune advise`: which kind."""

import re
from pathlib import Path

import pytest

from lptune.tools.advise import measure
from lptune.tools.advise.measure import Measured, Pair, Times
from tests.cli.conftest import Command

TINY = ("--config", "llama3_2/1b", "--preset", "llama3_2/tiny", "data.source=builtin", "data.seq_len=32")
SMALL = (*TINY, "micro_batch_size=2", "global_batch_size=8", "compile=none")


@pytest.fixture
def timings(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Kind -> how many times as fast as `none` it is to seem; `o` gains nothing. Changed by a test."""
    speeds = {"int8_rowcol": 2.0, "int8_rotated": 1.4, "int8_tensorwise": 1.5, "int8_weight_only": 0.5}

    def fake(cfg: object, config: object, kinds: tuple[str, ...], *_: object) -> Measured:
        return Measured(
            groups=tuple(groups),
            kinds=tuple(kinds),
            pairs={
                (group, kind): Pair(
                    Times(1e-3 / speeds[kind] if group.label != "o" else 1e-3, 1e-4), Times(1e-3, 1e-4)
                )
                for group in groups
                for kind in kinds
            },
            blocks_s=10e-3,
            head_s=1e-3,
            update_s=1e-3,
            update_blocks=tuple(groups),
            tokens=64,
            timed_tokens=64,
            duration_s=1.0,
        )

    import torch

    from lptune import linear, models
    from lptune.config import PrecisionConfig
    from lptune.tools.advise.measure import groups_of

    model = models.build_on_meta(models.config_from_dict(models.PRESETS["llama3_2"]["tiny"], "test"))
    plan = linear.convert(model, PrecisionConfig(kind="int8_rowcol"), device=torch.device("cpu"))
    groups = groups_of(model, plan)
    monkeypatch.setattr(measure, "measure", fake)
    return speeds


@pytest.mark.slow  # the timing: test_measure.py; ranks: below
def test_a_small_model_is_timed_ranked_and_fits_the_width_of_a_terminal(command: Command) -> None:
    code, out, err = command("advise", *SMALL, "--seconds", "1")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    ranked = re.findall(r"^(\w+) +([\d.]+ m?s) +([\d.]+)x", out, re.MULTILINE)
    kinds = {"none", "int8_rowcol", "int8_rotated", "int8_tensorwise", "int8_weight_only"}
    assert {kind for kind, _, _ in ranked} == kinds
    assert [speed for _, _, speed in ranked] == sorted((speed for _, _, speed in ranked), reverse=True)
    assert "float8_tensorwise, float8_delayed, float8_rowwise" in out, "emulated here, and said to be"
    assert re.search(r"^advice: precision.kind=", out, re.MULTILINE)
    assert list(Path().iterdir()) == []


def test_the_fastest_kind_that_keeps_the_loss_is_recommended(
    command: Command, timings: dict[str, float]
) -> None:
    code, out, _ = command("advise", *SMALL)
    assert code == 0
    assert re.search(r"^advice: precision.kind=int8_rotated, [\d.]+x as fast as none; ", out, re.MULTILINE)
    assert "the fastest, int8_rowcol, has" in " ".join(out.split())
    timings.update(int8_rotated=0.8)
    code, out, _ = command("advise", *SMALL)
    found = r"kind=int8_rowcol, [\d.]+x as fast as none, with a loss of \+1.69 ± 0.09 % on another"
    assert re.search(found, " ".join(out.split()))
    assert max(map(len, out.splitlines())) <= 80
    ranked = re.findall(r"^(\w+) +[\d.]+ m?s +([\d.]+)x", out, re.MULTILINE)
    assert {kind for kind, _ in ranked} == {"none", *timings}
    assert [speed for _, speed in ranked] == sorted((speed for _, speed in ranked), reverse=True)
    assert list(Path().iterdir()) == []


def test_where_nothing_pays_none_is_recommended(command: Command, timings: dict[str, float]) -> None:
    timings.update(int8_rowcol=0.9, int8_rotated=0.8, int8_tensorwise=0.8)
    code, out, _ = command("advise", *SMALL, "precision.kind=int8_rowcol")
    assert code == 0
    text = " ".join(out.split())
    assert "advice: precision.kind=none: the best other kind, int8_rowcol, has 0.94x of its speed" in text


def test_a_gpu_that_is_not_here_is_predicted_and_said_to_be(command: Command) -> None:
    code, out, err = command("advise", *SMALL, "--world-size", "2", "--device", "a100")
    assert (code, err) == (0, "")
    assert "a step of each of 2 ranks is 2 micro-batches of 64 tokens" in out
    assert "predicted, not measured" in out
    assert max(map(len, out.splitlines())) <= 80
    kinds = re.findall(r"^(\w+) +[\d.]+ m?s +[\d.]+x", out, re.MULTILINE)
    assert set(kinds) == {"none", "int8_rowcol", "int8_rotated"}, "an A100 has no float8"


def test_another_recipe_is_advised_on_and_what_is_left_out_is_named(
    command: Command, timings: dict[str, float]
) -> None:
    keys = (*SMALL[2:], "--kind", "int8_rowcol")
    more = ("--config", "llama3_2/1b_distill", "teacher.path=there")
    code, out, err = command("advise", "distill", *more, *keys)
    assert (code, err) == (0, "")
    assert "not in these figures: the model in teacher.path" in out


@pytest.mark.slow
def test_the_quality_of_the_model_decides_if_it_is_measured(
    command: Command, timings: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("new-checkpoint", "llama3_2/tiny", "tiny")
    small = ("--config", "llama3_2/1b", "model.path=tiny", *TINY[4:], *SMALL[len(TINY) :])
    code, out, err = command("advise", *small, "--quality", "--seconds", "1")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    measured = re.findall(r"^int8_\w+ .* ([+-][\d.]+ ± [\d.]+) %$", out, re.MULTILINE)
    assert len(measured) == 4
    text = " ".join(out.split())
    assert re.search(r"measured here, [\d,]+ targets of tiny, whose loss in none is [\d.]+", text)
    assert re.search(
        r"int8_rowcol: no GEMM is below 20 dB; the lowest is [\d.]+ dB, \w+ of model\.layers", text
    )
    # A limit that no kind keeps: none.
    monkeypatch.setattr("lptune.tools.advise.quality.LIMIT", -1.0)
    code, out, _ = command("advise", *small, "--quality", "--seconds", "1", "--kind", "int8_rowcol")
    assert "advice: precision.kind=none: the best other kind, int8_rowcol" in out


def test_too_little_memory_is_said_in_one_line(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def full(*_: object) -> Measured:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(measure, "measure", full)
    code, _, err = command("advise", *SMALL)
    assert code == 2
    assert err == (
        "error: advise: 64 tokens in a micro-batch do not fit the memory here; lower micro_batch_size, or "
        "name the GPU of the run with --device for a prediction\n"
    )
