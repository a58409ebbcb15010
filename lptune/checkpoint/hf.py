"""The tensors of a Hugging Face folder: lists them, checks that they fit the model, and loads them.

All faults of names, shapes and dtypes are found from the safetensors headers (a few kilobytes), before a
weight is read and before a run folder is made. Then each rank reads only its own part of each tensor,
directly into the parameter.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lptune import models
from lptune.base.errors import UserError, closest
from lptune.distributed import Piece, World, fused_rows, local_pieces, side_group
from lptune.linear import weights_changed
from lptune.models.headers import DERIVED, INDEX_NAME, SINGLE_NAME, HFIndex, open_tensors, read_index

TIED = ("model.embed_tokens.weight", "lm_head.weight")
"""The two names of the weight that embeddings and head share under `tie_word_embeddings`."""
_COMPARED_AT_ONCE = 1 << 24  # elements


@dataclass(frozen=True)
class Base:
    """The base checkpoint of a run: the headers of its tensors, and its config.json as a DecoderConfig."""

    index: HFIndex
    config: models.DecoderConfig

    @property
    def folder(self) -> Path:
        """The folder of config.json, the weight files and the tokenizer."""
        return self.index.folder

    def build_on_meta(self, *, freeze: Iterable[str] = ()) -> models.Decoder:
        """The decoder without storage. freeze: patterns of parameters to freeze (models.freeze). Raises
        UserError if its parameters do not match the stored tensors, and as `models.freeze` does.
        """
        model = models.build_on_meta(self.config)
        match_tensors(model, self.index)
        models.freeze(model, freeze)
        return model


def read_base(path: str, say: Callable[[str], None], *, key: str = "model.path") -> Base:
    """Reads the headers and config.json of the folder `path`, which may begin with ~. say: as in
    `read_config`. key: of the config, for messages. Raises UserError as `read_index` and `read_config` do.
    """
    index = read_index(Path(path).expanduser(), key)
    return Base(index, read_config(index, say))


def read_config(index: HFIndex, say: Callable[[str], None]) -> models.DecoderConfig:
    """The DecoderConfig of a folder, from config.json and from the stored tensors.

    If config.json ties the head to the embeddings, but the folder stores both with different values, the head
    is not tied, as in transformers 5. say: gets a line for this, for an index file that is ignored, and for
    each setting of config.json that is not applied. Raises UserError as `models.read_config` does.
    """
    config = models.read_config(index.folder)
    for note in config.notes:
        say(f"note: {index.folder / 'config.json'}: {note}")
    if not index.has_index_file and (index.folder / INDEX_NAME).exists():
        say(f"note: {index.folder / INDEX_NAME}: not read, {SINGLE_NAME} is (as in transformers)")
    if config.tied and not _equal_values(index, [name for name in TIED if name in index.tensors]):
        say(
            f"note: {index.folder}: lm_head.weight differs from model.embed_tokens.weight, so the head is "
            "not tied, although config.json says so (tie_word_embeddings); an export sets it to false"
        )
        return replace(config, tied=False)
    return config


def _equal_values(index: HFIndex, names: list[str]) -> bool:
    """Whether the stored tensors have equal values in float32. True if shapes differ: `match_tensors` then
    raises the error.
    """
    shapes = {tuple(index.tensors[name].shape) for name in names}
    if len(shapes) != 1 or () in shapes or len(names) < 2:
        return True
    (shape,) = shapes
    rows = max(1, _COMPARED_AT_ONCE // max(1, math.prod(shape[1:])))
    slices = [open_tensors(index.folder / index.tensors[name].file).get_slice(name) for name in names]
    for start in range(0, shape[0], rows):
        first, *others = (part[start : start + rows].float() for part in slices)
        if not all(torch.equal(first, other) for other in others):
            return False
    return True


def match_tensors(model: nn.Module, index: HFIndex) -> dict[str, list[str]]:
    """For each parameter of `model`, the stored names from which it is loaded, and to which it is exported.

    A tied parameter has several names in the model. A folder may store one of them, or several with the same
    values. Raises UserError if a tensor is missing, unexpected or of another shape, or if a tied parameter is
    stored with different values (which cannot happen with a config of `read_config`).
    """
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    known = {name for names in aliases.values() for name in names}
    unexpected = [n for n in index.tensors if n not in known and not DERIVED.search(n)]
    matched: dict[str, list[str]] = {}
    missing = []
    for name, parameter in model.named_parameters():
        stored = [alias for alias in aliases[id(parameter)] if alias in index.tensors]
        if not stored:
            missing.append(name)
        for alias in stored:
            found = index.tensors[alias]
            if found.shape != tuple(parameter.shape):
                raise UserError(
                    f"{index.folder / found.file}: tensor {alias!r} has shape {list(found.shape)}, "
                    f"config.json asks for {list(parameter.shape)}; they do not belong together"
                )
        if not _equal_values(index, stored):
            raise UserError(
                f"{index.folder}: {' and '.join(stored)} are one weight of this model, but differ; make the "
                "model with the config that checkpoint.read_config returns, which does not tie them"
            )
        matched[name] = stored
    if missing:
        hint = closest(missing[0], unexpected) or "; download the checkpoint again"
        if missing[0] == "lm_head.weight":
            hint = "; if the head is tied to the embeddings, set tie_word_embeddings in config.json"
        raise UserError(f"{index.folder}: tensor {missing[0]!r} is missing{_and_more(missing)}{hint}")
    if unexpected:
        file = index.tensors[unexpected[0]].file
        raise UserError(
            f"{index.folder / file}: tensor {unexpected[0]!r} is not part of this "
            f"model{_and_more(unexpected)}; config.json and weights do not belong together"
        )
    return matched


def weights_digest(folder: Path) -> str:
    """A digest that recognises the weights of a folder without reading them completely.

    It covers name, size, and the first and last MiB of each safetensors file. The header (names, shapes,
    offsets) begins in the first MiB.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read())
    return digest.hexdigest()


def load_hf(
    model: nn.Module,
    index: HFIndex,
    world: World | None = None,
    *,
    advance: Callable[[float], object] | None = None,
) -> None:
    """Reads this rank's part of each parameter from the folder, in place, cast to the parameter's dtype.

    model: must have storage; may be sharded. world: all of its ranks call this; None: this process alone.
    advance: called with the number of elements of each part that was read, of `num_elements_here` in all.
    Raises UserError, the same on all ranks: as `match_tensors` does, for a weight that is not finite, and for
    a file that cannot be read.
    """
    with side_group(world) as group, group.together((UserError,), str):
        _load(model, index, advance or (lambda _: None))


def num_elements_here(model: nn.Module) -> int:
    """Number of elements of `model` that this rank holds."""
    return sum(piece.values.numel() for each in model.parameters() for piece in local_pieces(each, ()))


def _load(model: nn.Module, index: HFIndex, advance: Callable[[float], object]) -> None:
    matched = match_tensors(model, index)
    fused = fused_rows(model)
    pieces = {
        name: local_pieces(parameter, fused.get(name, ())) for name, parameter in model.named_parameters()
    }
    by_file: dict[str, list[tuple[str, str]]] = {}
    for name, stored in matched.items():
        by_file.setdefault(index.tensors[stored[0]].file, []).append((stored[0], name))
    num_read = 0
    for file, pairs in by_file.items():
        with open_tensors(index.folder / file) as tensors:
            for stored_name, name in pairs:
                for piece in pieces[name]:
                    num_elements = read_piece(tensors, stored_name, piece, index.folder / file)
                    num_read += num_elements
                    advance(num_elements)
    weights_changed(model)
    expected = sum(piece.values.numel() for each in pieces.values() for piece in each)
    assert num_read == expected, f"read {num_read} elements of {expected}"


@torch.no_grad()
def read_piece(tensors: Any, name: str, piece: Piece, file: Path) -> int:
    """Copies the box of `piece` from the stored tensor `name`; returns the number of elements.

    Raises UserError if a value is not finite, because the loss would be NaN from the first step on.
    """
    values = piece.values
    # safetensors does not accept an empty index, for a tensor without dimensions.
    part = tensors.get_slice(name)[piece.region] if piece.start else tensors.get_tensor(name)
    assert part.shape == values.shape, (name, part.shape, values.shape)
    # Both extremes are NaN if any value is. aminmax takes 0.5 ns per element, isfinite 20 ns.
    smallest, largest = (part.float() if part.dtype == torch.float64 else part).aminmax()
    if not (smallest.isfinite() and largest.isfinite()):
        raise UserError(
            f"{file}: tensor {name!r} holds NaN or infinite values, so training would fail; download the "
            "checkpoint again (`lptune verify` counts these values)"
        )
    values.copy_(part)
    return int(part.numel())


def iter_tensors(index: HFIndex) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of every stored tensor, one at a time, file by file."""
    for file in index.files:
        with open_tensors(index.folder / file) as tensors:
            for name, stored in index.tensors.items():
                if stored.file == file:
                    yield name, tensors.get_tensor(name)


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
