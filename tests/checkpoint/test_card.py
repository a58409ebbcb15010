"""The model card names the precision of every step of a run, however often it was resumed."""

import json
from pathlib import Path
from typing import Any

import pytest

from lptune import linear, models
from lptune.base.errors import UserError
from lptune.checkpoint.card import model_card, read_parts, run_parts
from lptune.checkpoint.manifest import Manifest
from lptune.checkpoint.state import RunState, about_run, read_state
from lptune.config import DataConfig, FinetuneConfig, ModelConfig, PrecisionConfig


def _config(kind: str) -> FinetuneConfig:
    return FinetuneConfig(
        model=ModelConfig(path="/models/base"),
        data=DataConfig(source="rows.jsonl"),
        precision=PrecisionConfig(kind=kind, emulate=kind.startswith("float8")),
    )


def _plan(kind: str) -> linear.Plan:
    model = models.build_on_meta(models.config_from_dict(models.PRESETS["llama3_1"]["tiny"], "test"))
    return linear.convert(model, _config(kind).precision)


def _saved(folder: Path, step: int, kind: str, **state: Any) -> RunState:
    """What a run of `kind` would say in its checkpoint of `step`; files and shards are not looked at."""
    fingerprint = {"weights": "0123abcd", "data": "4567cdef"}
    content = {"step": step, "fingerprint": fingerprint, "about": about_run(_config(kind), None), **state}
    path = folder / f"{step}"
    path.mkdir()
    (path / "state.json").write_text(json.dumps(content), encoding="utf-8")
    return read_state(Manifest(path, step, 1, {}, {}))


def _card(state: RunState) -> list[str]:
    return model_card(state, read_parts(state)).splitlines()


def test_a_run_that_was_resumed_under_another_kind_names_both_with_their_steps(tmp_path: Path) -> None:
    state = None
    for step, kind in ((10, "int8_rowcol"), (20, "int8_rowcol"), (25, "none"), (40, "float8_rowwise")):
        parts = run_parts(_config(kind), _plan(kind), state)
        state = _saved(tmp_path, step, kind, parts=parts)
    assert state is not None
    assert [(part.from_step, part.precision) for part in read_parts(state)] == [
        (1, "int8_rowcol"),
        (21, "none"),
        (26, "float8_rowwise"),
    ]
    lines = _card(state)
    for line in (
        "| precision in training | int8_rowcol (steps 1 to 20); none (steps 21 to 25); "
        "float8_rowwise (steps 26 to 40) |",
        "| base, digest of its weights | 0123abcd |",
        "| data, digest of its rows | 4567cdef |",
        "## Steps 1 to 20: int8_rowcol",
        "| model.layers.0-1.mlp.up_proj | 128 x 64 | int8 row | int8 folded | int8 column | int8 rows |  |",
        "| lm_head | 256 x 64 | high | high | high | high | precision.skip: lm_head |",
        "## Steps 21 to 25: none",
        "## Steps 26 to 40: float8_rowwise, emulated in wider arithmetic",
        "| model.layers.0-1.mlp.up_proj | 128 x 64 | e4m3 row | e4m3 folded | e4m3 column | e4m3 rows |  |",
    ):
        assert line in lines
    assert sum("`high` is bfloat16." in line for line in lines) == 3


def test_a_checkpoint_from_before_parts_were_kept_resumes_and_exports(tmp_path: Path) -> None:
    old = _saved(tmp_path, 10, "int8_rowcol")
    new = _saved(tmp_path, 20, "none", parts=run_parts(_config("none"), _plan("none"), old))
    for state, spans in ((old, ["1 to 10: int8_rowcol"]), (new, ["1 to 10: int8_rowcol", "11 to 20: none"])):
        lines = _card(state)
        assert [line for line in lines if line.startswith("## ")] == [f"## Steps {span}" for span in spans]
        assert sum("did not record more" in line for line in lines) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda parts: parts[0].update(from_step=2),
        lambda parts: parts[0].update(precision=3),
        lambda parts: parts[0].pop("torch"),
        lambda parts: parts[0].update(layers=[["q_proj"]]),
        lambda parts: parts[0].update(more=1),
        lambda parts: parts.append({**parts[0], "from_step": 12}),
        lambda parts: parts.append("x"),
        lambda parts: parts.clear(),
    ],
)
def test_parts_that_lptune_did_not_write_are_one_line(tmp_path: Path, damage: Any) -> None:
    parts = json.loads(json.dumps(run_parts(_config("int8_rowcol"), _plan("int8_rowcol"), None)))
    damage(parts)
    state = _saved(tmp_path, 10, "int8_rowcol", parts=parts)
    with pytest.raises(UserError, match=r"state.json: parts: cannot be read"):
        read_parts(state)
