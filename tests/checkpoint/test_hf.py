"""Hugging Face folders: every layout that loads, every fault that is named."""

import dataclasses
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lptune import checkpoint, models
from lptune.base.errors import UserError

CONFIG = models.PRESETS["llama3_2"]["tiny"]


def _config(tied: bool) -> dict[str, object]:
    return dict(CONFIG) | {"tie_word_embeddings": tied}


def _weights(tied: bool = False, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    model = models.build_on_meta(models.config_from_dict(_config(tied), "test"))
    return {name: model.initial_value(name, 0).to(dtype) for name, _ in model.named_parameters()}


def _folder(path: Path, tensors: dict[str, torch.Tensor], tied: bool = False, num_files: int = 1) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(_config(tied)), encoding="utf-8")
    if num_files == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    weight_map = {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        part = {name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % num_files == number}
        save_file(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return path


def _load(folder: Path) -> dict[str, torch.Tensor]:
    model = models.build_on_meta(models.read_config(folder))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    checkpoint.load_hf(model, checkpoint.read_index(folder))
    return dict(model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_files", [1, 3])
def test_single_and_sharded_files_of_any_dtype_load_exactly(
    tmp_path: Path, dtype: torch.dtype, num_files: int
) -> None:
    tensors = _weights(dtype=dtype)
    loaded = _load(_folder(tmp_path / "model", tensors, num_files=num_files))
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == torch.float32
        assert torch.equal(loaded[name], tensor.float()), name


@pytest.mark.parametrize(
    "stored",
    [["model.embed_tokens.weight"], ["lm_head.weight"], ["model.embed_tokens.weight", "lm_head.weight"]],
)
def test_a_tied_checkpoint_may_store_either_name_or_both(tmp_path: Path, stored: list[str]) -> None:
    tensors = _weights(tied=True)
    embedding = tensors.pop("model.embed_tokens.weight")
    folder = _folder(tmp_path / "model", tensors | {name: embedding.clone() for name in stored}, tied=True)
    assert torch.equal(_load(folder)["model.embed_tokens.weight"], embedding)
    index = checkpoint.read_index(folder)
    model = models.build_on_meta(models.read_config(folder))
    writes = checkpoint.match_tensors(model, index).writes
    found = [name for name, (source,) in writes.items() if source.parameter == "model.embed_tokens.weight"]
    assert sorted(found) == sorted(stored)


@pytest.mark.parametrize("said", [True, None])
def test_a_head_that_differs_from_the_embeddings_is_its_own_as_in_transformers(
    tmp_path: Path, said: bool | None
) -> None:
    import transformers

    tensors = _weights()
    folder = _folder(tmp_path / "model", tensors, tied=True)
    if said is None:  # the family's default
        content = dict(models.PRESETS["smollm3"]["tiny"])
        del content["tie_word_embeddings"]
        (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
        model = models.build_on_meta(dataclasses.replace(models.read_config(folder), tied=False))
        tensors = {name: model.initial_value(name, 0) for name, _ in model.named_parameters()}
        save_file(tensors, folder / "model.safetensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    index, said_lines = checkpoint.read_index(folder), list[str]()
    config = checkpoint.read_config(index, said_lines.append)
    ours = models.build_on_meta(config)
    ours.to_empty(device="cpu")
    checkpoint.load_hf(ours, index)
    assert not config.tied
    assert "lm_head.weight differs from model.embed_tokens.weight" in said_lines[0]
    loaded = dict(theirs.named_parameters())
    assert loaded.keys() == dict(ours.named_parameters()).keys() == tensors.keys()
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, loaded[name]), name


def test_a_tied_model_refuses_two_different_values(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", _weights(), tied=True)
    with pytest.raises(UserError, match="are one weight of this model, but differ"):
        _load(folder)


def test_a_tied_model_whose_weights_are_numbers_is_refused_in_one_line(tmp_path: Path) -> None:
    names = ("model.embed_tokens.weight", "lm_head.weight")
    numbers = {name: torch.tensor(1.0) for name in names}
    index = checkpoint.read_index(_folder(tmp_path / "model", _weights() | numbers, tied=True))
    model = models.build_on_meta(checkpoint.read_config(index, print))
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight"):
        checkpoint.match_tensors(model, index)


def test_the_single_file_is_read_where_an_index_names_others(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", _weights(), num_files=3)
    tensors = {name: tensor + 1 for name, tensor in _weights().items()}
    save_file(tensors, folder / "model.safetensors")
    said = list[str]()
    checkpoint.read_config(checkpoint.read_index(folder), said.append)
    assert said == [
        f"note: {folder}/model.safetensors.index.json: not read, model.safetensors is (as in transformers)"
    ]
    for name, parameter in _load(folder).items():
        assert torch.equal(parameter, tensors[name]), name


def test_tables_that_follow_from_the_config_are_ignored(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert len(_load(_folder(tmp_path / "model", _weights() | extra))) == len(_weights())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update({"model.norms.weight": t.pop("model.norm.weight")}),
            r"'model.norm.weight' is missing \(did you mean 'model.norms.weight'\?\)",
        ),
        (lambda t: t.pop("lm_head.weight"), "'lm_head.weight' is missing; if the head is tied"),
    ],
)
def test_what_a_missing_tensor_may_be_is_said(tmp_path: Path, change: Any, message: str) -> None:
    tensors = _weights()
    change(tensors)
    with pytest.raises(UserError, match=message):
        _load(_folder(tmp_path / "model", tensors))


def test_links_of_the_hubs_cache_are_followed_and_links_elsewhere_are_not(tmp_path: Path) -> None:
    tensors = _weights()
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.parent.mkdir()
    folder = _folder(snapshot, tensors)
    for path in list(folder.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    assert _load(folder).keys() == tensors.keys()
    linked = tmp_path / "linked"
    linked.symlink_to(folder)  # of the folder itself anyone may make a link
    assert _load(linked).keys() == tensors.keys()
    copied = tmp_path / "copied"
    copied.mkdir()
    for path in folder.iterdir():
        (copied / path.name).symlink_to(blobs / path.name)
    with pytest.raises(
        UserError, match=r"config.json: is a link to .*blobs/config.json, out of the folder; copy"
    ):
        checkpoint.read_index(copied)


@pytest.mark.parametrize("name", ["tokenizer.model", "chat_template.jinja", "README.md"])
def test_a_link_out_of_the_folder_is_refused_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    folder, secret = _folder(tmp_path / "model", _weights()), tmp_path / "secret"
    secret.write_text("secret")
    for target in (secret, tmp_path, "../secret", "../model/../secret"):
        (folder / name).symlink_to(target)
        with pytest.raises(UserError, match=rf"{name}: is a link to {tmp_path}.*, out of the folder; copy"):
            checkpoint.read_index(folder)
        (folder / name).unlink()
    (folder / "within").write_text("")
    (folder / name).symlink_to("within")
    checkpoint.read_index(folder)


@pytest.mark.parametrize("name", [b"\xffx.json", b"two\nlines"])
def test_a_name_that_no_export_could_list_is_refused_at_the_start(tmp_path: Path, name: bytes) -> None:
    folder = _folder(tmp_path / "model", _weights())
    (folder / os.fsdecode(name)).write_text("{}")
    with pytest.raises(UserError, match=r"model: holds a file whose name is '.*\\.*'; rename it"):
        checkpoint.read_index(folder)


def test_templates_and_pipes_of_a_model_are_looked_at_as_well(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", _weights())
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").symlink_to("/etc/hostname")
    with pytest.raises(UserError, match=r"tool\.jinja: is a link to /etc/hostname, out of the folder"):
        checkpoint.read_index(folder)
    (folder / "additional_chat_templates" / "tool.jinja").unlink()
    os.mkfifo(folder / "other.safetensors")  # a digest of the weights would wait for it
    with pytest.raises(UserError, match=r"other\.safetensors: is a pipe, where a model has files"):
        checkpoint.read_index(folder)


def test_only_the_hubs_own_cache_may_link_to_blobs(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    (tmp_path / "snapshots").mkdir()  # and no models--OWNER--NAME above it
    folder = _folder(tmp_path / "snapshots" / "0123", _weights())
    blobs.mkdir()
    (folder / "config.json").rename(blobs / "config.json")
    (folder / "config.json").symlink_to("../../blobs/config.json")
    with pytest.raises(UserError, match="out of the folder; copy"):
        checkpoint.read_index(folder)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_weight_that_is_not_finite_is_named_while_loading(
    tmp_path: Path, value: float, dtype: torch.dtype
) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in _weights().items()}
    bad = list(tensors)[len(tensors) // 2]
    tensors[bad].view(-1)[-1] = value
    folder = _folder(tmp_path / "model", tensors)
    with pytest.raises(UserError, match=rf"safetensors: tensor '{re.escape(bad)}' holds NaN or infinite"):
        _load(folder)


def test_a_merged_model_beside_an_adapter_is_read(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", _weights())
    (folder / "adapter_config.json").write_text("{}", encoding="utf-8")
    assert checkpoint.read_index(folder).files == ["model.safetensors"]


def test_real_checkpoints_load_exactly(assets: Path) -> None:
    for name in ("story_llama", "tiny_llama3", "tiny_qwen3"):
        folder = assets / "models" / name
        stored, loaded = load_file(folder / "model.safetensors"), _load(folder)
        if name == "story_llama":
            stored["model.embed_tokens.weight"] = stored.pop("lm_head.weight")
        assert loaded.keys() == stored.keys()
        for key, tensor in stored.items():
            assert torch.equal(loaded[key], tensor.float()), key
