"""Export: an ordinary Hugging Face folder with the tensor names, files and index of the imported one.

It is written beside its final place, read back and compared tensor by tensor with the weights in memory, and
only then published and reported.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

import lptune
from lptune.checkpoint.files import (
    fresh_folder,
    fsync_path,
    publish_folder,
    read_json,
    save_tensors,
    set_aside,
    write_json,
    write_text,
)
from lptune.checkpoint.hf import INDEX_NAME, HFIndex, match_tensors
from lptune.distributed import World, full_tensor, fused_rows, reshard
from lptune.linear import dequantized

# Everything of the imported folder that describes the model and tokenizer; weights and code are not copied.
_COPIED = ("*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt")


@torch.no_grad()
def export_hf(
    model: nn.Module,
    source: HFIndex,
    folder: Path,
    dtype: str,
    world: World,
    *,
    card: dict[str, Any],
    chat_template: str | None = None,
) -> Path:
    """Writes `model` as a Hugging Face folder; returns `folder`. All ranks call it, the main rank writes.

    source: the imported checkpoint; its tensor names and shard files are kept, config.json and tokenizer
    files copied.
    dtype: `original` (each tensor's stored dtype) or a torch dtype's name. card: what README.md states of the
    run.
    chat_template: written as chat_template.jinja when the run used another than the tokenizer's own.
    Raises RuntimeError if what was written does not read back equal.
    """
    reshard(model)
    partial = folder.with_name(f".tmp-{folder.name}")
    if world.is_main:
        fresh_folder(partial)
    stored_to_parameter = {
        stored: parameter for parameter, names in match_tensors(model, source).items() for stored in names
    }
    parameters, fused = dict(model.named_parameters()), fused_rows(model)
    for file in source.files:
        tensors: dict[str, Tensor] = {}
        for name, stored in source.tensors.items():
            if stored.file != file or name not in stored_to_parameter:
                continue
            parameter = stored_to_parameter[name]
            full = full_tensor(dequantized(parameters[parameter]), fused.get(parameter, ()))
            if world.is_main:
                target = stored.dtype if dtype == "original" else getattr(torch, dtype)
                tensors[name] = full.to(device="cpu", dtype=target, copy=True).contiguous()
        if world.is_main:
            _write_and_compare(partial / file, tensors)
    if world.is_main:
        _write_rest(partial, source, stored_to_parameter, dtype, card, chat_template)
        # The old export goes only when the new one is there; a symbolic link is replaced, not followed.
        old = set_aside(folder) if folder.exists() or folder.is_symlink() else None
        publish_folder(partial, folder)
        if old is not None:
            old.unlink() if old.is_symlink() else shutil.rmtree(old)
    world.barrier()
    return folder


def _write_and_compare(path: Path, tensors: dict[str, Tensor]) -> None:
    save_tensors(path, tensors)
    with safe_open(str(path), framework="pt", device="cpu") as written:
        for name, tensor in tensors.items():
            if not _same_bits(written.get_tensor(name), tensor):
                raise RuntimeError(f"{path}: tensor {name!r} does not read back as it was written")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    # Compared as bytes: NaN equals itself and -0.0 differs from 0.0.
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)


def _write_rest(
    partial: Path,
    source: HFIndex,
    stored_to_parameter: dict[str, str],
    dtype: str,
    card: dict[str, Any],
    chat_template: str | None,
) -> None:
    for pattern in _COPIED:
        for path in source.folder.glob(pattern):
            if path.is_file() and path.name != INDEX_NAME:
                shutil.copyfile(path, partial / path.name)
    if dtype != "original":
        config = read_json(partial / "config.json")
        # transformers 5 writes `dtype`, older versions `torch_dtype`; whichever is there is corrected.
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype
        write_json(partial / "config.json", config)
    if chat_template is not None:
        write_text(partial / "chat_template.jinja", chat_template)
    if source.has_index_file:
        weight_map = {name: t.file for name, t in source.tensors.items() if name in stored_to_parameter}
        total_size = sum(_num_bytes(partial / file) for file in source.files)
        write_json(partial / INDEX_NAME, {"metadata": {"total_size": total_size}, "weight_map": weight_map})
    write_text(partial / "README.md", _model_card(card))
    for path in partial.iterdir():
        fsync_path(path)


def _num_bytes(path: Path) -> int:
    with safe_open(str(path), framework="pt", device="cpu") as tensors:
        loaded = (tensors.get_tensor(name) for name in tensors.keys())  # noqa: SIM118  (no mapping)
        return sum(tensor.numel() * tensor.element_size() for tensor in loaded)


def _model_card(card: dict[str, Any]) -> str:
    lines = [
        "---",
        "library_name: transformers",
        "tags: [lptune]",
        "---",
        "",
        f"# {card.get('name', 'Fine-tuned model')}",
        "",
    ]
    lines += [f"Full fine-tuning with lptune {lptune.__version__} (torch {torch.__version__}).", ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in card.items() if key != "name"]
    return "\n".join(lines) + "\n"
