"""The base checkpoint of a run: its facts, and loading its weights.

All faults of names, shapes and dtypes are found from the safetensors headers (a few kilobytes), before a
weight is read and before a run folder is made. Then each rank reads only its own part of each tensor,
directly into the parameter, by the map of adapter.py.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lptune import models
from lptune.base.errors import UserError
from lptune.checkpoint.adapter import equal_values, match_tensors, read_box, read_piece
from lptune.distributed import World, fused_rows, local_pieces, side_group
from lptune.linear import weights_changed
from lptune.models.headers import INDEX_NAME, SINGLE_NAME, HFIndex, open_tensors, read_index


@dataclass(frozen=True)
class Base:
    """The base checkpoint of a run: the headers of its tensors, and what its config.json says."""

    index: HFIndex
    config: models.Facts

    @property
    def folder(self) -> Path:
        """The folder of config.json, the weight files and the tokenizer."""
        return self.index.folder

    def build_on_meta(self, *, freeze: Iterable[str] = ()) -> models.Backbone:
        """The model without storage. freeze: patterns of parameters to freeze (models.freeze). Raises
        UserError if its parameters do not match the stored tensors, and as `Facts.check` and `models.freeze`
        do.
        """
        self.config.check()
        model = models.build_on_meta(self.config)
        match_tensors(model, self.index)
        models.freeze(model, freeze)
        return model


def read_base(
    path: str, say: Callable[[str], None], *, key: str = "model.path", backend: str = "auto"
) -> Base:
    """Reads the headers and config.json of the folder `path`, which may begin with ~. say, backend: as in
    `read_config`. key: of the config, for messages. Raises UserError as `read_index` and `read_config` do.
    """
    index = read_index(Path(path).expanduser(), key)
    return Base(index, read_config(index, say, backend))


def read_config(index: HFIndex, say: Callable[[str], None], backend: str = "auto") -> models.Facts:
    """The facts of a folder, from config.json and from the stored tensors.

    If config.json ties the head to the embeddings, but the folder stores both with different values, the head
    is not tied, as in transformers 5. say: gets a line for this, for an index file that is ignored, for
    quantized weights, and for each setting of config.json that is not applied. backend: the key
    `model.backend`. Raises UserError as `models.read_config` does.
    """
    config = models.read_config(index.folder, backend)
    for note in config.notes:
        say(f"note: {index.folder / 'config.json'}: {note}")
    if not index.has_index_file and (index.folder / INDEX_NAME).exists():
        say(f"note: {index.folder / INDEX_NAME}: not read, {SINGLE_NAME} is (as in transformers)")
    if formats := {each.quantized.format for each in index.tensors.values() if each.quantized}:
        say(
            f"note: {index.folder}: weights in {', '.join(sorted(formats))} are dequantized while they are "
            "read; an export has them in high precision, if export.quantized does not say otherwise"
        )
    embedding, head = config.word_names
    if config.tied and not equal_values(index, [name for name in (embedding, head) if name in index.tensors]):
        say(
            f"note: {index.folder}: {head} differs from {embedding}, so the head is not tied, although "
            "config.json says so (tie_word_embeddings); an export sets it to false"
        )
        return replace(config, tied=False)
    return config


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
    advance = advance or (lambda _: None)
    with side_group(world) as group, group.together((UserError,), str):
        reads = match_tensors(model, index).reads
        fused = fused_rows(model)
        pieces = {
            name: local_pieces(parameter, fused.get(name, ())) for name, parameter in model.named_parameters()
        }
        by_file: dict[str, list[str]] = {}
        for name, parts in reads.items():
            by_file.setdefault(index.tensors[parts[0].stored].file, []).append(name)
        num_read = 0
        for names in by_file.values():
            with _opened(index.folder) as open_file:  # nearly always one file: few are mapped at a time
                for name in names:
                    for piece in pieces[name]:
                        num_elements = read_piece(open_file, index, reads[name], piece)
                        num_read += num_elements
                        advance(num_elements)
        weights_changed(model)
        expected = sum(piece.values.numel() for each in pieces.values() for piece in each)
        assert num_read == expected, f"read {num_read} elements of {expected}"


def num_elements_here(model: nn.Module) -> int:
    """Number of elements of `model` that this rank holds."""
    return sum(piece.values.numel() for each in model.parameters() for piece in local_pieces(each, ()))


@contextmanager
def _opened(folder: Path) -> Iterator[Callable[[str], Any]]:
    """Opens a file of the folder at its first use, until the end of the block."""
    with ExitStack() as opened:
        yield functools.cache(lambda file: opened.enter_context(open_tensors(folder / file)))


def iter_tensors(index: HFIndex) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of every weight, one at a time, file by file; float32 if it is quantized."""
    for file in index.files:
        with _opened(index.folder) as open_file:
            for name, stored in index.tensors.items():
                if stored.file == file:
                    yield name, read_box(open_file, index, name)
