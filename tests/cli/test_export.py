"""`lptune export` and `lptune verify` on what a run has left."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from lptune.checkpoint import RunState, manifest, read_state
from lptune.checkpoint.files import remove_folder, sha256
from tests.cli.conftest import Command
from tests.helpers import warm

TEMPLATE = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint of each; its export differs from the import in all it can."""
    folder = tmp_path_factory.mktemp("finished")
    assert warm.lptune(["new-checkpoint", "llama3_2/tiny", "base"], folder=folder).returncode == 0
    config = {
        "model": {"path": "base"},  # relative: the checkpoint must say where that is
        "data": {"source": "builtin", "seq_len": 64, "max_rows": 60, "chat_template": TEMPLATE},
        "checkpoint": {"every_steps": 1},
        "export": {"dtype": "bfloat16", "max_shard_gib": 1e-4},
        "compile": "none",
        "activation_checkpointing": "none",
        "device": "cpu",
        "global_batch_size": 2,
        "micro_batch_size": 2,
        "num_steps": 2,
        "output_dir": "run",
    }
    (folder / "run.yaml").write_text(json.dumps(config), encoding="utf-8")
    done = warm.lptune(["run", "full_finetune", "--config", "run.yaml"], folder=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy to damage; its base stays where it was."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in folder.iterdir()}


def test_it_writes_what_the_run_exported_itself(finished_run: Path, tmp_path: Path, command: Command) -> None:
    expected = _digests(finished_run / "export")
    assert {"README.md", "chat_template.jinja", "config.json", "tokenizer.json"} < expected.keys()
    assert sum(name.endswith(".safetensors") for name in expected) > 1
    (tmp_path / "empty").mkdir()
    last = finished_run / "checkpoints" / "step-00000002"
    for checkpoint, dest in ((finished_run, "new/folder"), (last, "empty")):
        code, out, err = command("export", str(checkpoint), dest)
        assert (code, err) == (0, "")
        assert out == f"export: {dest} (step 2, read back and compared with {last})\n"
        assert _digests(tmp_path / dest) == expected
    card = (tmp_path / "empty" / "README.md").read_text(encoding="utf-8")
    assert "| data | builtin |" in card
    assert "## Steps 1 to 2: none" in card
    assert "| model.layers.0-1.mlp.up_proj | 128 x 64 | high | high | high | high |  |" in card


def test_dtype_and_file_size_can_be_others(finished_run: Path, tmp_path: Path, command: Command) -> None:
    assert (
        "export.max_shard_gib: must be" in command("export", str(finished_run), "a", "--max-shard-gib=-1")[2]
    )
    assert command("export", str(finished_run), "a", "--dtype=float16", "--max-shard-gib=0")[0] == 0
    with safe_open(str(tmp_path / "a" / "model.safetensors"), framework="pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"F16"}  # noqa: SIM118
    assert json.loads((tmp_path / "a" / "config.json").read_text(encoding="utf-8"))["dtype"] == "float16"


def test_8_bits_that_the_run_never_had_are_refused_by_the_option_that_asked(
    finished_run: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("export", str(finished_run), "a", "--quantized", "int8")
    code, _, err = command(*asked)
    assert (code, err.count("\n")) == (2, 1)
    assert "(precision.kind=none)" in err
    assert "`lptune export RUN FOLDER --quantized none`" in err
    assert "export.quantized" not in err
    assert not (tmp_path / "a").exists()
    # Without the option, a run whose config has a format would be exported in that.

    def of_int8(of: manifest.Manifest) -> RunState:
        content = dict(read_state(of).content)
        return replace(read_state(of), content=content | {"about": content["about"] | {"quantized": "int8"}})

    monkeypatch.setattr("lptune.checkpoint.read_state", of_int8)
    assert "--quantized none`" in command(*asked)[2]
    assert "--quantized none`" in command(*asked[:3])[2]


def test_a_base_that_has_moved_is_named_and_given(run: Path, tmp_path: Path, command: Command) -> None:
    base = run.parent / "moved"
    shutil.copytree(json.loads(_state(run).read_text(encoding="utf-8"))["about"]["model"], base)
    original = Path(json.loads(_state(run).read_text(encoding="utf-8"))["about"]["model"])
    aside = original.rename(original.with_name("aside"))
    try:
        code, _, err = command("export", str(run), "out")
        assert code == 2
        assert err == (
            f"error: {original}: the model that {run}/checkpoints/step-00000002 was trained from is not "
            "there; name its folder with --base\n"
        )
        assert command("export", str(run), "out", "--base", str(base))[0] == 0
    finally:
        aside.rename(original)
    assert _digests(tmp_path / "out") == _digests(run / "export")


def _state(run: Path) -> Path:
    return run / "checkpoints" / "step-00000002" / "state.json"


def test_a_run_whose_newest_checkpoint_is_damaged_gives_the_one_before(run: Path, command: Command) -> None:
    _flip(next((run / "checkpoints" / "step-00000002").glob("model-*")))
    code, out, err = command("export", str(run), "out")
    assert code == 0
    assert err.startswith("warning: checkpoint passed over: ")
    assert "(step 1, " in out
    assert command("export", str(run / "checkpoints" / "step-00000002"), "other")[0] == 2
    _flip(_state(run).parents[1] / "step-00000001" / "state.json")
    code, _, err = command("export", str(run), "other")
    assert code == 2
    assert err.endswith("none of its 2 checkpoints is intact\n")
    assert not Path("other").exists()
    assert (
        "has no manifest.json; it is no finished checkpoint" in command("export", str(run / "export"), "a")[2]
    )


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_verify_checks_all_of_a_run_a_line_each(run: Path, command: Command) -> None:
    code, out, err = command("verify", str(run))
    assert (code, err) == (0, "")
    first, second, export = out.splitlines()
    assert first.startswith(f"ok: {run}/checkpoints/step-00000001: step 1, ")
    assert second.startswith(f"ok: {run}/checkpoints/step-00000002: step 2, ")
    assert export.startswith(f"ok: {run}/export: ")
    _flip(_state(run))
    code, out, err = command("verify", str(run))
    assert code == 2
    assert [line.partition(":")[0] for line in out.splitlines()] == ["ok", "bad", "ok"]
    assert f"{_state(run)}: its content does not match the manifest's sha256" in out
    assert err == f"error: {run}: 1 of 3 are bad; see above\n"
    next((run / "export").glob("*.safetensors")).unlink()
    code, out, err = command("verify", str(run))
    assert [line.partition(":")[0] for line in out.splitlines()] == ["ok", "bad", "bad"]
    assert "2 of 3" in err


@pytest.mark.parametrize("turn", ["step-00000001", "step-00000000"])
def test_verify_beside_a_live_run_calls_no_checkpoint_bad_that_the_run_removes(
    run: Path, command: Command, monkeypatch: pytest.MonkeyPatch, turn: str
) -> None:
    real, checkpoints = manifest.verify, run / "checkpoints"
    (checkpoints / "step-00000000").mkdir()

    def verify(folder: Path) -> manifest.Manifest:
        if folder.name == turn:  # in its own turn, or in that of the one before
            remove_folder(checkpoints / "step-00000001")
        return real(checkpoints / "step-00000002" if folder.name == "step-00000000" else folder)

    monkeypatch.setattr(manifest, "verify", verify)
    code, out, err = command("verify", str(run))
    assert (code, err) == (0, "")
    assert [line.partition(":")[0] for line in out.splitlines()] == ["ok", "gone", "ok", "ok"]
    assert f"{run}/checkpoints/step-00000001: the run removed or replaced it meanwhile" in out


def test_verify_sees_a_flipped_bit_in_an_export_and_sha256sum_agrees(run: Path, command: Command) -> None:
    export = run / "export"
    sums = subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=export, check=False)
    assert sums.returncode == 0
    *lines, card = (export / "SHA256SUMS").read_text("utf-8").splitlines()
    assert card == f"# README.md as it was written: {sha256(export / 'README.md')}"
    listed = {line.split("  ")[1] for line in lines}
    assert listed == {path.name for path in export.iterdir()} - {"README.md", "SHA256SUMS"}
    (export / "README.md").write_text("mine", encoding="utf-8")
    assert f"{len(listed)} files as they were exported" in command("verify", str(export))[1]

    weights = next(export.glob("*.safetensors"))
    _flip(weights)
    code, _, err = command("verify", str(export))
    assert code == 2
    assert err == f"error: {weights}: is not what was exported (see SHA256SUMS); export again\n"
    (export / "SHA256SUMS").write_text("?", encoding="utf-8")
    assert "SHA256SUMS: is not what sha256sum writes" in command("verify", str(export))[2]
    (export / "SHA256SUMS").unlink()
    (export / "SHA256SUMS").mkdir()
    assert "SHA256SUMS: is a folder" in command("verify", str(export))[2]


def test_verify_compares_a_download_with_the_hubs_sha256(run: Path, command: Command) -> None:
    export = run / "export"
    (export / "SHA256SUMS").unlink()  # an export says more than a download
    notes = export / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    weights = next(export.glob("*.safetensors"))
    etags = {weights.name: sha256(weights), "tokenizer.json": "0" * 40, "gone.safetensors": "0" * 64}
    for name, etag in etags.items():  # a git blob's etag is no sha256 of the file
        (notes / f"{name}.metadata").write_text(f"{'1' * 40}\n{etag}\n1700000000.0\n", encoding="utf-8")
    assert "1 file(s) with the hub's sha256" in command("verify", str(export))[1]
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1  # a last bit: finite still
    weights.write_bytes(content)
    code, _, err = command("verify", str(export))
    assert code == 2
    why = "differs from the file on the hub (another digest); remove it and download it again"
    assert err == f"error: {weights}: {why}\n"
