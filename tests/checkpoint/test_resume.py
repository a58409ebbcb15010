"""When a run is finished: its config is the same, no step is left, and its export is there."""

import datetime
import json
import re
from pathlib import Path
from typing import Any

import pytest

from lptune import checkpoint, distributed
from lptune.base.errors import UserError
from lptune.checkpoint.resume import state_of_run
from lptune.checkpoint.state import RunState
from lptune.config import ExportConfig, FinetuneConfig, key_paths, load_config
from lptune.linear import Plan

WITHOUT_EFFECT = {
    "output_dir": "elsewhere",
    "resume": "none",
    "num_epochs": 7,  # with num_steps given
    "precision.verify": False,
    "precision.shadow_every": 7,
    "precision.shadow_on_bad": "fallback",
    "precision.shadow_min_sqnr_db": 7.0,
    "parallel.reshard_after_forward": True,  # the default was true once
    "logging.tensorboard": True,
    "logging.wandb_project": "p",
    "logging.trackio_project": "p",
}
ONLY_VALUES = {  # of keys whose next value is not any other of their type
    "schedule.decay_shape": "1-sqrt",
    "precision.kind": "int8_rowcol",
    "optimizer.kind": "adamw_8bit",
    "optimizer.momentum": "0.5",
    "optimizer.master": "none",
    "parallel.reduce_dtype": "int8",
    "precision.output": "high",
    "precision.grad_input": "high",
    "precision.grad_weight": "high",
    "precision.grad_format": "e4m3",
    "precision.all_gather": "high",
    "precision.tp_all_gather": "high",
    "schedule.kind": "linear",
    "device": "cpu",
    "compute_dtype": "float32",
    "compile": "none",
    "activation_checkpointing": "full",
    "data.eval_source": "x.jsonl",
    "optimizer.beta1": 0.5,
    "optimizer.beta2": 0.5,
    "optimizer.ema_decay": 0.5,
    "schedule.min_lr_ratio": 0.5,
    "global_batch_size": 64,
    "micro_batch_size": 2,
}


def config(tmp_path: Path, *overrides: str) -> FinetuneConfig:
    path = tmp_path / "c.yaml"
    path.write_text(
        f"model: {{path: {tmp_path}/model}}\ndata: {{source: builtin, eval_source: e.jsonl}}\nnum_steps: 4\n"
    )
    return load_config(FinetuneConfig, path, overrides)


def state_now(cfg: FinetuneConfig, tmp_path: Path, num_steps: int = 4) -> RunState:
    """What state.json of a run with `cfg` says."""
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_bytes(b"{}")
    return state_of_run(cfg, Plan("none", ()), None, num_steps, "digest", datetime.date(2026, 1, 1), None)


def saved(tmp_path: Path, state: RunState) -> RunState:
    """`state`, as it is read from a checkpoint of step 4."""
    folder = tmp_path / "step-00000004"
    folder.mkdir(exist_ok=True)
    (folder / "state.json").write_text(json.dumps({"step": 4, **state.content}))
    return checkpoint.read_state(checkpoint.Manifest(folder, 4, 1, {}, {}))


def changed(cfg: FinetuneConfig, key: str) -> str:
    """`key=value` with another legal value."""
    value: Any = cfg
    for name in key.split("."):
        value = getattr(value, name)
    if key in ONLY_VALUES:
        return f"{key}={ONLY_VALUES[key]}"
    if isinstance(value, bool):
        return f"{key}={not value}"
    return f"{key}={value + 1 if isinstance(value, (int, float)) else 'other'}"


DECIDING = [
    key
    for key in key_paths(FinetuneConfig)
    if key not in WITHOUT_EFFECT
    and (not key.startswith(("model.", "data.", "checkpoint.", "export.")) or key.startswith("data.eval_s"))
]


@pytest.mark.parametrize("key", DECIDING)
def test_a_run_without_steps_left_is_not_finished_for_another_config(tmp_path: Path, key: str) -> None:
    needed = ("schedule.kind=wsd", "schedule.decay_steps=2") if key.startswith("schedule.decay") else ()
    needed = ("optimizer.kind=sgd",) if key == "optimizer.momentum" else needed
    cfg = config(tmp_path, *needed)
    before, override = saved(tmp_path, state_now(cfg, tmp_path)), changed(cfg, key)
    num_steps = 5 if key == "num_steps" else 4
    now = state_now(config(tmp_path, *needed, override), tmp_path, num_steps)
    with pytest.raises(UserError, match=rf"no step is left to train.*\b{key} .+ \(now ") as caught:
        checkpoint.check_unchanged(before, now, print)
    assert str(caught.value).count("(now ") == 1
    assert "choose another output_dir" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "template", "tokenizer_config", "changed"),
    [
        ("data.prompt_template={a}", None, "{}", "data.prompt_template"),
        ("data.chat_template=x.jinja", "new", "{}", "data.chat_template"),
        ("seed=0", None, '{"chat_template": "new"}', "tokenizer_config.json in model.path"),
        ("seed=0", "edited", "{}", "the text of data.chat_template"),
        ("seed=0", None, "{}", "none of data.* but the content of the files that data.source names"),
    ],
)
def test_a_changed_template_is_named_by_its_key_or_file(
    tmp_path: Path, override: str, template: str | None, tokenizer_config: str, changed: str
) -> None:
    def state(digest: str, template: str | None, *overrides: str) -> RunState:
        state_now(config(tmp_path), tmp_path)  # makes the model's folder
        day = datetime.date(2026, 1, 1)
        cfg = config(tmp_path, *overrides)
        return state_of_run(cfg, Plan("none", ()), None, 4, digest, day, template)

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    before = saved(tmp_path, state("before", None))
    (tmp_path / "model" / "tokenizer_config.json").write_text(tokenizer_config)
    now = state("after", template, override)
    with (
        distributed.session("cpu") as world,
        pytest.raises(
            UserError, match=rf"with data 'before'.*\(a digest of the .* changed: {re.escape(changed)}\)"
        ),
    ):
        checkpoint.check_fingerprint(before, now, world)


@pytest.mark.parametrize("key", [*WITHOUT_EFFECT, "checkpoint.keep_last", "data.on_bad_row"])
def test_what_has_no_effect_on_a_result_does_not_stop_a_finished_run(tmp_path: Path, key: str) -> None:
    before = saved(tmp_path, state_now(config(tmp_path), tmp_path))
    value = {**WITHOUT_EFFECT, "checkpoint.keep_last": 5, "data.on_bad_row": "skip"}[key]
    checkpoint.check_unchanged(before, state_now(config(tmp_path, f"{key}={value}"), tmp_path), print)


def test_every_changed_key_is_named_with_both_values(tmp_path: Path) -> None:
    before = saved(tmp_path, state_now(config(tmp_path), tmp_path))
    with pytest.raises(UserError) as caught:
        checkpoint.check_unchanged(
            before, state_now(config(tmp_path, "precision.kind=mxfp8", "optimizer.lr=1"), tmp_path), print
        )
    assert "precision.kind 'none' (now 'mxfp8'), optimizer.lr 2e-05 (now 1.0); choose" in str(caught.value)


def test_a_finished_run_that_does_not_say_its_config_is_finished_with_a_note(tmp_path: Path) -> None:
    said: list[str] = []
    checkpoint.check_unchanged(
        saved(tmp_path, RunState({})), state_now(config(tmp_path), tmp_path), said.append
    )
    assert len(said) == 1
    assert "state.json does not say which config the run had, so nothing was compared" in said[0]


def test_a_key_that_a_finished_run_did_not_have_is_compared_with_its_default(tmp_path: Path) -> None:
    state = state_now(config(tmp_path), tmp_path)
    for key in ("precision.skip", "diverged_after_steps"):
        del state.content["config"][key]
    state.content["config"]["optimizer.gone"] = 1
    said: list[str] = []
    before = saved(tmp_path, state)
    checkpoint.check_unchanged(before, state_now(config(tmp_path), tmp_path), said.append)
    assert len(said) == 1
    assert said[0].endswith("not compared, since this version has no such key: optimizer.gone")
    with pytest.raises(UserError, match=r"trained with diverged_after_steps 3 \(now 4\); choose"):
        checkpoint.check_unchanged(
            before, state_now(config(tmp_path, "diverged_after_steps=4"), tmp_path), said.append
        )


def test_an_export_of_another_form_is_named_and_one_of_an_older_step_is_none(tmp_path: Path) -> None:
    with distributed.session("cpu") as world:
        run = checkpoint.RunFolder(tmp_path, world)
    assert not run.is_exported(4, ExportConfig())
    run.export.mkdir()
    run.write_exported(4, ExportConfig())
    assert run.is_exported(4, ExportConfig())
    assert not run.is_exported(5, ExportConfig(dtype="float32"))
    with pytest.raises(UserError, match=r"export\.dtype 'original' \(now 'float32'\); delete that folder"):
        run.is_exported(4, ExportConfig(dtype="float32"))
    (tmp_path / "export.json").write_text('{"step": 4}')  # as an older version wrote it
    assert run.is_exported(4, ExportConfig())


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b'{"step": 2, "dty', "line 1: not valid JSON: Unterminated string"),
        (b"[4]", "expected a JSON object, found list"),
        (b'{"step": true}', "does not say of which step export/ is"),
        (100_000 * b"[", "its brackets are nested too deep"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_an_export_json_that_no_run_writes_is_named_with_what_to_do(
    tmp_path: Path, content: bytes, what: str
) -> None:
    with distributed.session("cpu") as world:
        run = checkpoint.RunFolder(tmp_path, world)
    run.export.mkdir()
    (tmp_path / "export.json").write_bytes(content)
    with pytest.raises(UserError, match=f"export.json: ({what}).*; remove that file to export again"):
        run.is_exported(4, ExportConfig())
