"""Export: from a checkpoint to a Hugging Face folder, alike by any number of ranks, whole or not at all."""

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from lptune import checkpoint, distributed, models, training
from lptune.base.errors import UserError
from lptune.checkpoint import export as module
from lptune.checkpoint import files
from lptune.checkpoint.card import Part, model_card
from lptune.checkpoint.files import Scratch, save_tensors, sha256
from lptune.checkpoint.state import About, RunState, base_digests
from lptune.checkpoint.sums import is_as_written, verify_sums
from lptune.config import CheckpointConfig, ExportConfig
from lptune.distributed import Piece, World
from tests.helpers.ranks import run_ranks

NUM_FILES = 4
INDEX = "model.safetensors.index.json"
ABOUT = About(
    model="/models/tiny",
    data="rows.jsonl",
    precision="int8_rowcol",
    chat_template=None,
    dtype="original",
    max_shard_gib=0.0,
    lptune="1.2.3",
    torch="2.11.0",
)
PART = Part(1, "int8_rowcol", "bfloat16", False, (), "1.2.3", "2.11.0")


def _base(
    folder: Path, *, tied: bool = False, own_head: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """An imported model in several files whose names and sizes differ, its norms in float32.

    own_head: config.json may say `tied`, the values say otherwise.
    """
    content = dict(models.PRESETS["llama3_2"]["tiny"]) | {"tie_word_embeddings": tied, "dtype": "bfloat16"}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    model = models.build_on_meta(models.read_config(folder))
    names = [name for name, _ in model.named_parameters()]
    tensors = {
        name: model.initial_value(name, 0).to(torch.float32 if "norm" in name else dtype) for name in names
    }
    if tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + own_head
    file_of = {name: f"part-{i * i % 7}.safetensors" for i, name in enumerate(tensors)}
    assert len(set(file_of.values())) == NUM_FILES
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in tensors if file_of[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}), encoding="utf-8")
    return folder


def _trained(
    base: Path,
    folder: Path,
    world: World,
    about: dict[str, Any] | None = None,
    step: int = 3,
    **more: Any,
) -> Path:
    """A checkpoint of other weights than the base's, written by all ranks of `world`. step: decides them."""
    from torch.distributed.fsdp import fully_shard

    model = models.build_on_meta(checkpoint.read_config(checkpoint.read_index(base), print))
    fully_shard(model, mesh=world.mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for piece in distributed.local_pieces(parameter):
                whole = model.initial_value(name, step - 2) + 1 / 3
                piece.values.copy_(whole[piece.region])
    facts = {"fingerprint": base_digests(base), "about": vars(ABOUT) | {"model": str(base)} | (about or {})}
    facts |= {"stop_tokens": {}} | more
    optimizer = training.AdamW(model.parameters())
    with checkpoint.CheckpointWriter(
        folder, model, optimizer, world, CheckpointConfig(keep_last=9)
    ) as writer:
        return writer.save(step, facts, wait=True)


def _weights(base: Path, step: int = 3) -> dict[str, Tensor]:
    """What `_trained` saves."""
    model = models.build_on_meta(checkpoint.read_config(checkpoint.read_index(base), print))
    return {name: model.initial_value(name, step - 2) + 1 / 3 for name, _ in model.named_parameters()}


def _export(path: Path, base: Path, folder: Path, **cfg: Any) -> Path:
    return checkpoint.export_hf(path, checkpoint.read_index(base), folder, ExportConfig(**cfg))


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in folder.iterdir()}


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank's checkpoint."""
    with distributed.session("cpu") as world:
        return _trained(base, tmp_path_factory.mktemp("one"), world)


def _save_and_export(rank: int, num_ranks: int, base: str, folder: str) -> None:
    with distributed.session("cpu") as world:
        path = _trained(Path(base), Path(folder) / "checkpoints", world)
        source = checkpoint.read_index(Path(base))
        checkpoint.export_hf(path, source, Path(folder) / "export", ExportConfig(), world)
        later = _trained(Path(base), Path(folder) / "checkpoints", world, step=4)
        mean = ExportConfig(average_checkpoints=2, dtype="float32")
        checkpoint.export_hf(later, source, Path(folder) / "mean", mean, world)
        if rank == 1:  # the disk is full for one of them, in the middle of its files
            module.save_tensors = _full_disk(after=1)
        with pytest.raises(UserError) as error:
            checkpoint.export_hf(path, source, Path(folder) / "export", ExportConfig(dtype="float32"), world)
        Path(folder, f"error-{rank}").write_text(str(error.value), encoding="utf-8")


def _full_disk(after: int) -> Callable[[Path, dict[str, Tensor]], None]:
    written: list[Path] = []

    def save(path: Path, tensors: dict[str, Tensor]) -> None:
        if len(written) >= after:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        written.append(path)
        save_tensors(path, tensors)

    return save


def test_two_ranks_export_what_one_process_does_and_fail_as_one(
    tmp_path: Path, base: Path, trained: Path
) -> None:
    run_ranks(2, _save_and_export, str(base), str(tmp_path))
    two = _digests(tmp_path / "export")  # after a second export that failed: the first is still there
    path = tmp_path / "checkpoints" / "step-00000003"
    assert len(list(path.glob("model-*.safetensors"))) == 2
    assert _digests(_export(path, base, tmp_path / "alone")) == two
    assert _digests(_export(trained, base, tmp_path / "of_one_rank")) == two
    mean = _export(
        path.with_name("step-00000004"), base, tmp_path / "one", average_checkpoints=2, dtype="float32"
    )
    assert _digests(mean) == _digests(tmp_path / "mean")
    lines = [(tmp_path / f"error-{rank}").read_text(encoding="utf-8") for rank in (0, 1)]
    assert lines[0] == lines[1]
    assert "export: the export cannot be written: " in lines[0]
    assert "No space left on device; " in lines[0]
    assert sorted(path.name for path in tmp_path.iterdir() if "export" in path.name) == ["export"]


def test_a_change_below_half_a_step_of_bfloat16_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To nearest it is lost. The mean of n weights has a standard error of at most 1 / (2 sqrt(n)) steps."""
    monkeypatch.setattr(module, "_ROUNDED_AT_ONCE", 1000)
    base, name = _base(tmp_path / "base"), "model.embed_tokens.weight"
    with distributed.session("cpu") as world:
        path = _trained(base, tmp_path, world)
    before = _tensors(base)[name].float()
    assert before.all()
    step = before.sign() * 2.0 ** (
        before.abs().log2().floor() - 7
    )  # away from zero, where steps are as large

    def read(self: object, parameter: str, pieces: list[Piece], shape: object, dtype: object) -> None:
        pieces[0].values.copy_(before + 0.3 * step if parameter == name else torch.zeros(()))

    monkeypatch.setattr(module.StoredFiles, "read", read)

    def changed(folder: str, **cfg: Any) -> Tensor:
        after = _tensors(_export(path, base, tmp_path / folder, **cfg))[name]
        assert after.dtype == torch.bfloat16
        return (after.float() - before) / step

    assert changed("nearest", rounding="nearest").count_nonzero() == 0
    found = changed("stochastic")
    assert set(found.unique().tolist()) == {0.0, 1.0}
    assert abs(found.mean() - 0.3) < 4 / (2 * found.numel() ** 0.5)
    assert torch.equal(found, changed("again"))


def test_the_mean_of_the_last_checkpoints_is_that_of_float64_or_one_line(tmp_path: Path, base: Path) -> None:
    with distributed.session("cpu") as world:
        paths = [_trained(base, tmp_path, world, step=step) for step in (3, 4, 5)]
    for count in (1, 2, 3):
        folder = _export(
            paths[-1], base, tmp_path / f"mean-{count}", average_checkpoints=count, dtype="float32"
        )
        wanted = [_weights(base, step) for step in (3, 4, 5)[-count:]]
        for name, tensor in _tensors(folder).items():
            mean = torch.stack([weights[name].double() for weights in wanted]).mean(0)
            assert torch.equal(tensor, mean.float()), name
        card = (folder / "README.md").read_text(encoding="utf-8")
        assert ("| weights | mean of the checkpoints of steps " in card) == (count > 1)

    def refused(path: Path, count: int, line: str) -> None:
        with pytest.raises(UserError, match=line):
            _export(path, base, tmp_path / "new", average_checkpoints=count)
        assert not (tmp_path / "new").exists()

    refused(paths[0], 2, "has 1 checkpoint up to step 3, and the export is to average 2; average fewer")
    state = json.loads((paths[1] / "state.json").read_text("utf-8"))
    weights = paths[1] / "model-00000.safetensors"
    damaged = weights.read_bytes()
    weights.write_bytes(damaged[:-1] + bytes([damaged[-1] ^ 1]))
    refused(paths[2], 2, f"{weights}: its content does not match")
    shutil.rmtree(paths[1])
    with distributed.session("cpu") as world:
        other = state["fingerprint"] | {"data": "of another run"}
        _trained(base, tmp_path, world, step=4, fingerprint=other)
    refused(paths[2], 2, f"{paths[1]}: is of another run than {paths[2].name}")


def test_files_names_index_and_dtypes_are_the_imported_ones(
    tmp_path: Path, base: Path, trained: Path
) -> None:
    folder = _export(trained, base, tmp_path / "export", rounding="nearest")
    theirs, ours = checkpoint.read_index(base), checkpoint.read_index(folder)
    assert ours.tensors == theirs.tensors
    assert list(ours.tensors) == list(theirs.tensors)
    assert sorted(ours.files) == sorted(path.name for path in folder.glob("*.safetensors"))
    for name, weight in _weights(base).items():
        assert torch.equal(_tensors(folder)[name], weight.to(getattr(torch, theirs.tensors[name].dtype))), (
            name
        )
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in _tensors(folder).values())
    assert sha256(folder / "config.json") == sha256(base / "config.json")
    assert (folder / ours.files[0]).stat().st_mode == (folder / "config.json").stat().st_mode


def test_other_file_sizes_get_an_index_and_load_in_transformers(
    tmp_path: Path, base: Path, trained: Path
) -> None:
    from transformers import AutoModelForCausalLM

    limit = 64 << 10
    folder = _export(trained, base, tmp_path / "export", max_shard_gib=limit / 2**30, dtype="float32")
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    assert files[1].name == f"model-00002-of-{len(files):05d}.safetensors"
    for file in files:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= limit
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.dtype == torch.float32  # as config.json says by now
    expected = _weights(base)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, expected.pop(name)), name
    assert not expected
    whole = _export(trained, base, tmp_path / "whole", max_shard_gib=1)
    assert [path.name for path in whole.glob("model*")] == ["model.safetensors"]
    checkpoint.read_index(whole)


def test_a_head_that_differs_from_the_embeddings_is_exported_beside_them(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = _base(tmp_path / "base", tied=True, own_head=True)
    with distributed.session("cpu") as world:
        path = _trained(base, tmp_path, world)
    folder = _export(path, base, tmp_path / "export", dtype="float32")
    tensors, trained = _tensors(folder), _weights(base)
    assert tensors.keys() == trained.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, trained[name]), name
    exported = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert exported["tie_word_embeddings"] is False  # vLLM would drop the head
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(theirs.lm_head.weight, tensors["lm_head.weight"])


def test_the_names_of_a_tied_tensor_are_exported_in_one_dtype(tmp_path: Path) -> None:
    base = _base(tmp_path / "base", tied=True)
    file = base / checkpoint.read_index(base).tensors["model.embed_tokens.weight"].file
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].float()
    save_file(tensors, file)
    with distributed.session("cpu") as world:
        path = _trained(base, tmp_path, world)
    folder = _export(path, base, tmp_path / "export")
    exported = _tensors(folder)
    assert exported["model.embed_tokens.weight"].dtype == exported["lm_head.weight"].dtype == torch.float32
    assert checkpoint.read_config(checkpoint.read_index(folder), print).tied


@pytest.mark.parametrize(
    ("fails", "how"),
    [
        ("save_tensors", _full_disk(after=0)),
        ("save_tensors", _full_disk(after=NUM_FILES - 1)),
        ("write_json", _full_disk(after=0)),
        ("publish_folder", _full_disk(after=0)),
    ],
)
def test_a_full_disk_leaves_the_previous_export_and_one_line(
    tmp_path: Path, base: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, fails: str, how: Any
) -> None:
    before = _digests(_export(trained, base, tmp_path / "export"))
    monkeypatch.setattr(module, fails, how)
    with pytest.raises(UserError, match=r"No space left on device; .*step-00000003 is intact") as error:
        _export(trained, base, tmp_path / "export", dtype="float32")
    assert "\n" not in str(error.value)
    assert _digests(tmp_path / "export") == before
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_an_export_goes_for_the_next_one_only_while_nothing_in_it_was_changed(
    tmp_path: Path, base: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _export(trained, base, tmp_path / "export")
    _export(trained, base, folder, dtype="float32")
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert capsys.readouterr().out == ""
    changes: list[Callable[[], object]] = [
        lambda: (folder / "README.md").write_text("my card"),
        lambda: (folder / "README.md").unlink(),
        lambda: (folder / "config.json").rename(tmp_path / "config") and _pipe(folder / "config.json"),
        lambda: (folder / "SHA256SUMS").unlink() or _pipe(folder / "SHA256SUMS"),
        lambda: (folder / "README.md").rename(tmp_path / "card") and _link(folder / "README.md", "../card"),
        lambda: (folder / "notes").mkdir(),
        lambda: (folder / "notes.txt").write_text("mine"),
        lambda: (folder / "config.json").write_text("{}"),
        lambda: (folder / "tokenizer.json").unlink(),
        lambda: (folder / "SHA256SUMS").unlink(),
        lambda: folder.rename(tmp_path / "moved") and folder.symlink_to(tmp_path / "moved"),
    ]
    for number, change in enumerate(changes, 1):
        change()
        before = next(os.walk(folder))[1:]
        _export(trained, base, folder)
        said = capsys.readouterr().out
        assert said.endswith(f"-> old-export-{number}\n")
        assert next(os.walk(tmp_path / f"old-export-{number}"))[1:] == before
        assert is_as_written(folder)


def _pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def _link(path: Path, target: str) -> Path:
    path.symlink_to(target)
    return path


def test_the_export_of_a_run_whose_folder_was_removed_makes_no_other(
    tmp_path: Path, base: Path, trained: Path
) -> None:
    source = checkpoint.read_index(base)
    with pytest.raises(UserError, match=r"the export cannot be written: .*: No such file or directory"):
        checkpoint.export_hf(trained, source, tmp_path / "gone" / "export", ExportConfig())
    assert not (tmp_path / "gone").exists()
    checkpoint.export_hf(trained, source, tmp_path / "new" / "export", ExportConfig(), replace=False)
    assert (tmp_path / "new" / "export" / "config.json").is_file()


def test_what_a_kill_left_of_an_export_is_replaced_and_a_living_one_is_not(
    tmp_path: Path, base: Path, trained: Path
) -> None:
    dest, source = tmp_path / "dest", checkpoint.read_index(base)
    killed = Scratch(dest)
    (killed.path / "half.safetensors").touch()
    with pytest.raises(UserError, match="dest: another process is writing it; wait"):
        checkpoint.export_hf(trained, source, dest, ExportConfig(), replace=False)
    assert (killed.path / "half.safetensors").exists()
    killed._lock.close()  # as the kernel does
    checkpoint.export_hf(trained, source, dest, ExportConfig(), replace=False)
    assert [path.name for path in tmp_path.iterdir()] == ["dest"]
    assert is_as_written(dest)
    with pytest.raises(UserError, match="dest: something else was written there meanwhile"):
        checkpoint.export_hf(trained, source, dest, ExportConfig(), replace=False)
    assert [path.name for path in tmp_path.iterdir()] == ["dest"]


@pytest.mark.parametrize("moment", ["remove_leftover", "publish_folder"])
def test_two_exports_to_one_place_at_a_time_leave_one_whole_one(
    moment: str, tmp_path: Path, base: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest, found = tmp_path / "dest", list[Scratch | UserError]()

    def second() -> None:
        try:
            found.append(Scratch(dest))
        except UserError as error:
            found.append(error)

    place: Any = files if moment == "remove_leftover" else module
    work, thread = getattr(place, moment), threading.Thread(target=second)

    def meanwhile(*args: Path) -> None:
        monkeypatch.setattr(place, moment, work)
        thread.start()
        thread.join(0.3)
        work(*args)

    monkeypatch.setattr(place, moment, meanwhile)
    checkpoint.export_hf(trained, checkpoint.read_index(base), dest, ExportConfig(), replace=False)
    thread.join()
    assert is_as_written(dest)
    if moment == "remove_leftover":
        assert isinstance(found[0], UserError)


def test_a_published_folder_is_not_taken_for_that_of_the_next_export(tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    first = Scratch(dest)
    first.unmark()
    first.path.rename(dest)
    second = Scratch(dest)
    first.remove()
    assert second.path.is_dir()
    second.remove()
    assert list(tmp_path.iterdir()) == [dest]


def test_a_file_that_becomes_a_link_during_the_run_is_not_exported(
    tmp_path: Path, base: Path, trained: Path
) -> None:
    model = shutil.copytree(base, tmp_path / "model")
    source = checkpoint.read_index(model)
    (tmp_path / "secret").write_text("secret")
    (model / "vocab.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"vocab\.txt: is a link to .*secret, out of the folder"):
        checkpoint.export_hf(trained, source, tmp_path / "export", ExportConfig())
    assert not (tmp_path / "export").exists()


def test_too_little_space_is_known_before_a_byte_is_written(
    tmp_path: Path, base: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _export(trained, base, tmp_path / "export")
    taken = sum(path.stat().st_size for path in (tmp_path / "export").iterdir())
    monkeypatch.setattr(module, "free_bytes", lambda folder: taken)
    with pytest.raises(
        UserError, match=r"again: the export takes [1-9]\S* k?M?B, [1-9]\S* k?M?B are free there"
    ):
        _export(trained, base, tmp_path / "again")
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_file_that_does_not_read_back_is_not_published(
    tmp_path: Path, base: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flipped(path: Path, tensors: dict[str, Tensor]) -> None:
        save_tensors(path, tensors)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(module, "save_tensors", flipped)
    with pytest.raises(UserError, match="does not read back as written"):
        _export(trained, base, tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


def test_a_value_beyond_float16_is_an_error(tmp_path: Path, base: Path) -> None:
    with distributed.session("cpu") as world:
        path = _trained(base, tmp_path / "c", world)
    file = next(path.glob("model-*"))
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = 65520.0  # the smallest that rounds to infinity
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"'model\.norm\.weight' has values beyond float16's 65504"):
        _export(path, base, tmp_path / "export", dtype="float16")
    tensors["model.norm.weight"][0] = 65519.0
    save_file(tensors, file)
    _export(path, base, tmp_path / "export", dtype="float16")


def test_another_base_and_a_checkpoint_that_says_nothing_are_refused(
    tmp_path: Path, base: Path, trained: Path
) -> None:
    other = _base(tmp_path / "other", dtype=torch.float16)
    with pytest.raises(UserError, match=r"other: is not the model that .* the digest of weights is"):
        _export(trained, other, tmp_path / "export")
    with distributed.session("cpu") as world:
        path = _trained(base, tmp_path / "c", world, about={"dtype": 3})
    with pytest.raises(UserError, match=r"state.json: about.dtype: cannot be 3"):
        _export(path, base, tmp_path / "export")
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize(
    ("model", "base_model", "title"),
    [
        ("/hub/models--Qwen--Qwen3-0.6B/snapshots/0123", "Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
        ("/models/Llama-3.2-1B", "Llama-3.2-1B", "Llama-3.2-1B"),
        ("/models/my model: new", None, "my model: new"),
    ],
)
def test_the_card_is_valid_whatever_names_hold(model: str, base_model: str | None, title: str) -> None:
    about = vars(ABOUT) | {"model": model, "data": "a|b\n---\n[x](y).jsonl"}
    state = RunState({"about": about, "fingerprint": {}}, 7)
    _, header, body = model_card(state, [PART]).split("---\n", 2)
    values = yaml.safe_load(header)
    assert values.pop("base_model", None) == base_model
    assert values == {"library_name": "transformers", "tags": ["lptune"]}
    lines = body.splitlines()
    assert f"# {title}, fine-tuned" in lines
    for line in (
        r"| data | a\|b --- \[x\](y).jsonl |",
        "| steps | 7 |",
        "| precision in training | int8_rowcol |",
    ):
        assert line in lines
    assert "| lptune | 1.2.3 |" in lines
    assert "| torch | 2.11.0 |" in lines


@pytest.fixture(scope="module")
def taught(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose rows end answers with token 9, and calls with token 5."""
    with distributed.session("cpu") as world:
        stops = {"<|im_end|>": 9, "<|eom_id|>": 5}
        return _trained(base, tmp_path_factory.mktemp("taught"), world, stop_tokens=stops)


@pytest.mark.parametrize(
    ("of_model", "of_generation", "wanted"),
    [
        ({"eos_token_id": 2}, None, [2, 9, 5]),
        ({"eos_token_id": [2, 5]}, None, [2, 5, 9]),
        ({}, None, [9, 5]),
        ({"eos_token_id": 2, "use_cache": False, "temperature": 0.3, "do_sample": True}, None, [2, 9, 5]),
        ({"eos_token_id": 2}, {"bos_token_id": 1}, [2, 9, 5]),
        ({"eos_token_id": 2}, {"eos_token_id": 3, "temperature": 0.5, "do_sample": True}, [3, 9, 5]),
        ({"eos_token_id": 2}, {"eos_token_id": [3, 5]}, [3, 5, 9]),
        # transformers does not look into config.json beside the other file.
        ({"eos_token_id": [9, 5]}, {"temperature": 0.5, "do_sample": True, "note": "\ud800"}, [9, 5]),
        ({"eos_token_id": 9}, {"eos_token_id": None}, [9, 5]),
    ],
)
def test_an_export_ends_generation_where_the_training_rows_end_answers(
    tmp_path: Path,
    base: Path,
    taught: Path,
    capsys: pytest.CaptureFixture[str],
    of_model: dict[str, Any],
    of_generation: dict[str, Any] | None,
    wanted: list[int],
) -> None:
    """All else is as in the base, with and without a generation_config.json, as transformers reads both."""
    import transformers

    model, path = _model_with(base, taught, tmp_path, of_model, of_generation)
    theirs = transformers.GenerationConfig
    before = (
        theirs.from_pretrained(model, "config.json", _from_model_config=True)  # as models are loaded
        if of_generation is None
        else theirs.from_pretrained(model)
    )
    _export(path, model, tmp_path / "export")
    after = theirs.from_pretrained(tmp_path / "export")
    assert after.eos_token_id == wanted
    assert _settings(after) == _settings(before)
    assert "<|im_end|> (9)" in capsys.readouterr().out
    card = (tmp_path / "export" / "README.md").read_text("utf-8").replace("\\", "")
    assert "| answers end with | <|im_end|> (9), <|eom_id|> (5) |" in card
    assert is_as_written(tmp_path / "export")


@pytest.mark.parametrize(
    ("of_model", "of_generation"),
    [({"eos_token_id": 2}, {"eos_token_id": [9, 2, 5]}), ({"eos_token_id": [5, 9]}, None)],
)
def test_a_model_that_stops_there_already_keeps_its_files_to_the_byte(
    tmp_path: Path,
    base: Path,
    taught: Path,
    capsys: pytest.CaptureFixture[str],
    of_model: dict[str, Any],
    of_generation: dict[str, Any] | None,
) -> None:
    model, path = _model_with(base, taught, tmp_path, of_model, of_generation)
    _export(path, model, tmp_path / "export")
    assert capsys.readouterr().out == ""
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "export" / name).exists() == (model / name).exists()
        if (model / name).exists():
            assert (tmp_path / "export" / name).read_bytes() == (model / name).read_bytes()


def test_the_templates_of_a_tokenizer_that_has_several_are_exported_and_verified(
    tmp_path: Path, base: Path, trained: Path
) -> None:
    model = shutil.copytree(base, tmp_path / "model")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    export = tmp_path / "export"
    _export(trained, model, export)
    copied = export / "additional_chat_templates" / "tool_use.jinja"
    assert copied.read_text() == "{{ tools }}"
    assert is_as_written(export)
    copied.write_text("{{ messages }}")
    assert not is_as_written(export)
    with pytest.raises(UserError, match=r"tool_use\.jinja: is not what was exported"):
        verify_sums(export)


def test_stop_ids_that_cannot_be_read_are_one_line_and_nothing_is_published(
    tmp_path: Path, base: Path, taught: Path
) -> None:
    why = r"generation_config\.json: (eos_token_id|expected a JSON object|line 1: not valid JSON)"
    for content in ('{"eos_token_id": "2"}', "[1]", "{", '{"eos_token_id": [true]}'):
        model, path = _model_with(base, taught, tmp_path, {"eos_token_id": 2}, None)
        (model / "generation_config.json").write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match=why):
            _export(path, model, tmp_path / "export")
        assert not (tmp_path / "export").exists()
        shutil.rmtree(model)
        shutil.rmtree(path)


def test_a_checkpoint_that_names_no_stop_tokens_says_so(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with distributed.session("cpu") as world:
        path = _trained(base, tmp_path / "c", world, stop_tokens=None)
    _export(path, base, tmp_path / "export")
    assert "does not say which tokens end an answer" in capsys.readouterr().out
    assert not (tmp_path / "export" / "generation_config.json").exists()


def _model_with(
    base: Path, taught: Path, folder: Path, of_model: dict[str, Any], of_generation: dict[str, Any] | None
) -> tuple[Path, Path]:
    """`base` with other files, and the checkpoint `taught` as one of it."""
    model, path = shutil.copytree(base, folder / "model"), folder / taught.name
    content = json.loads((base / "config.json").read_text("utf-8"))
    content = {key: value for key, value in content.items() if key != "eos_token_id"} | of_model
    (model / "config.json").write_text(json.dumps(content), encoding="utf-8")
    if of_generation is not None:
        (model / "generation_config.json").write_text(json.dumps(of_generation), encoding="utf-8")
    shutil.copytree(taught, path)
    state = json.loads((path / "state.json").read_text("utf-8"))
    state["fingerprint"] |= base_digests(model)
    (path / "state.json").write_text(json.dumps(state), encoding="utf-8")
    return model, path


def _settings(config: Any) -> dict[str, Any]:
    """What differs from transformers' defaults, but the stop ids and what says how it was made."""
    dropped = ("eos_token_id", "transformers_version", "_from_model_config")
    kept = {key: value for key, value in config.to_dict().items() if key not in dropped and value}
    return kept | {"use_cache": config.use_cache is not False}
