"""The map between the tensors of a Hugging Face folder and the parameters of a model, and reading by it.

Most stored tensors are one parameter, under the same name. A model may also join several into one parameter
(the experts of a mixture), cut one into several (a fused projection), transpose or rename it. The model says
so for each parameter, as a list of boxes (`Backbone.stored_as`, `models.Part`). `match_tensors` checks the
map against the headers, from both sides, before a weight is read:

    reads     parameter      -> the boxes of stored tensors that fill it       (hf.py)
    writes    stored tensor  -> the boxes of parameters that it consists of    (export.py)

Loading, export, averages and `lptune verify` go by it, so an export has the names of its base. A rank reads
of each box the part that it holds, and nothing else: of a quantized weight (models/quantized.py) the codes of
that part, and the scales of these codes. The product of code and scale is computed in float32 and not rounded
to the dtype that config.json names: float32 master weights keep what the folder has.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lptune.base.errors import UserError, closest
from lptune.distributed import Piece
from lptune.models import Backbone, HFIndex, Part, aliases
from lptune.models.headers import DERIVED, StoredTensor, open_tensors
from lptune.models.quantized import MX_GROUP, PACKED, Quantized

_COMPARED_AT_ONCE = 1 << 24  # elements
# e2m1: a sign, two bits of exponent, one of mantissa.
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_NO_EXPONENT = 255  # NaN in E8M0


class Source(NamedTuple):
    """A box of a parameter, as a part of a stored tensor."""

    parameter: str
    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    part: Part


@dataclass(frozen=True)
class Matched:
    """The map between one folder and one model."""

    reads: dict[str, tuple[Part, ...]]
    """By parameter: what it is loaded from."""
    writes: dict[str, tuple[Source, ...]]
    """By stored tensor: what it consists of. Those that the model passes on (`Backbone.passes_on`) have no
    source. A tied parameter is in each tensor that stores it.
    """


def match_tensors(model: nn.Module, index: HFIndex) -> Matched:
    """The map between `index` and `model`: of a Backbone its own, of any other module one tensor a name.

    A tied parameter has several names in the model. A folder may store one of them, or several with the same
    values. Raises UserError if a tensor is missing, unexpected or of another shape, or if a tied parameter is
    stored with different values (which cannot happen with the facts of `read_config`).
    """
    names = {group[0]: {name: _parts(model, name) for name in group} for group in aliases(model)}
    shapes = _shapes([part for group in names.values() for parts in group.values() for part in parts])
    passed = [name for name in index.tensors if isinstance(model, Backbone) and model.passes_on(name)]
    known = {*shapes, *passed}
    unexpected = [name for name in index.tensors if name not in known and not DERIVED.search(name)]
    reads, writes, missing = dict[str, tuple[Part, ...]](), dict[str, dict[Source, None]](), dict[str, None]()
    for parameter, group in names.items():
        shape = tuple(model.get_parameter(parameter).shape)
        stored = [parts for parts in group.values() if all(part.stored in index.tensors for part in parts)]
        if not stored:
            missing |= {part.stored: None for part in group[parameter] if part.stored not in index.tensors}
        for part in (part for parts in stored for part in parts):
            found = index.tensors[part.stored]
            if found.shape != shapes[part.stored]:
                raise UserError(
                    f"{index.folder / found.file}: tensor {part.stored!r} has shape {list(found.shape)}, "
                    f"config.json asks for {list(shapes[part.stored])}; they do not belong together"
                )
            writes.setdefault(part.stored, {})[Source(parameter, shape, part)] = None
        for parts in zip(*stored, strict=True):
            same = list(dict.fromkeys(part.stored for part in parts))
            if not equal_values(index, same):
                raise UserError(
                    f"{index.folder}: {' and '.join(same)} are one weight of this model, but differ; make "
                    "the model with the config that checkpoint.read_config returns, which does not tie them"
                )
        if stored:
            reads[parameter] = tuple(stored[0])
    if missing:
        first = next(iter(missing))
        hint = closest(first, unexpected) or "; download the checkpoint again"
        if isinstance(model, Backbone) and first == model.facts.word_names[1]:
            hint = "; if the head is tied to the embeddings, set tie_word_embeddings in config.json"
        raise UserError(f"{index.folder}: tensor {first!r} is missing{_and_more(list(missing))}{hint}")
    if unexpected:
        file = index.tensors[unexpected[0]].file
        raise UserError(
            f"{index.folder / file}: tensor {unexpected[0]!r} is not part of this "
            f"model{_and_more(unexpected)}; config.json and weights do not belong together"
        )
    for name, sources in writes.items():
        covered = sum(math.prod(source.part.sizes) for source in sources)
        assert covered == math.prod(shapes[name]), f"stored_as covers {covered} elements of {name!r}"
    return Matched(reads, dict.fromkeys(passed, ()) | {name: tuple(each) for name, each in writes.items()})


def _parts(model: nn.Module, name: str) -> list[Part]:
    shape = tuple(model.get_parameter(name).shape)
    if not isinstance(model, Backbone):
        return [Part(name, (0,) * len(shape), shape)]
    parts = list(model.stored_as(name, shape))
    covered = sum(math.prod(part.sizes) for part in parts)
    assert covered == math.prod(shape), f"stored_as({name!r}) covers {covered} elements of {list(shape)}"
    return parts


def _shapes(parts: list[Part]) -> dict[str, tuple[int, ...]]:
    """The shape that each stored tensor must have: as far as its boxes reach."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts:
        ends = [each.stop for each in region(part)]
        shapes[part.stored] = tuple(map(max, ends, shapes.get(part.stored, ends)))
    return shapes


def region(
    part: Part, start: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None
) -> tuple[slice, ...]:
    """The index that takes a box of the parameter, within `part`, from the stored tensor. Default: `part`."""
    start, sizes = start or part.start, sizes or part.sizes
    dims = part.dims or tuple(range(len(start)))
    origin = part.origin or (0,) * sum(dim is not None for dim in dims)
    found = [slice(first, first + 1) for first in origin]
    for dim, first, size, begin in zip(dims, start, sizes, part.start, strict=True):
        if dim is not None:
            found[dim] = slice(origin[dim] + first - begin, origin[dim] + first - begin + size)
    return tuple(found)


def arranged(part: Part, stored: Tensor) -> Tensor:
    """A view of a box of the stored tensor (`region`), in the dimensions of the parameter."""
    if not part.dims:
        return stored
    kept = [dim for dim in part.dims if dim is not None]
    others = [dim for dim in range(stored.dim()) if dim not in kept]
    view = stored.permute(*kept, *others)
    for _ in others:
        view = view[..., 0]
    for place, dim in enumerate(part.dims):
        view = view.unsqueeze(place) if dim is None else view
    return view


def read_box(
    open_file: Callable[[str], Any], index: HFIndex, name: str, box: tuple[slice, ...] = ()
) -> Tensor:
    """A box of the tensor `name`, in its dtype, or float32 if it is quantized. (): the whole tensor.

    open_file: gives the opened safetensors file of that name. Raises UserError for a scale that is not
    finite.
    """
    stored = index.tensors[name]
    if stored.quantized is None:
        tensors = open_file(stored.file)
        # safetensors does not accept an empty index, for a tensor without dimensions.
        part: Tensor = tensors.get_slice(name)[box] if box else tensors.get_tensor(name)
        return part
    bounds = [each.indices(size)[:2] for each, size in zip(box, stored.shape, strict=False)]
    bounds += [(0, size) for size in stored.shape[len(bounds) :]]
    values, scale = _dequantized(open_file, stored, stored.quantized, bounds)
    if not (scale.isfinite() & (scale >= 0)).all():
        how = stored.quantized
        raise UserError(
            f"{index.folder / how.scale_file}: scale {how.scale!r} holds values that are not finite or are "
            "below 0; download the checkpoint again"
        )
    return values


def _dequantized(
    open_file: Callable[[str], Any], stored: StoredTensor, how: Quantized, bounds: list[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """(values, the scales they were made with) of the box between `bounds`."""
    codes, scales = open_file(stored.file).get_slice(how.codes), open_file(how.scale_file)
    if how.format == "mxfp4":
        (e, e_end), (k, k_end), (n, n_end) = bounds
        group, group_end = k // MX_GROUP, -(-k_end // MX_GROUP)
        bytes_ENGB = codes[e:e_end, n:n_end, group:group_end]
        exponent = scales.get_slice(how.scale)[e:e_end, n:n_end, group:group_end].int()
        pairs = torch.stack((bytes_ENGB & 0x0F, bytes_ENGB >> 4), -1).flatten(-2)  # low half first
        values = torch.ldexp(_FP4[pairs.int()], exponent[..., None] - 127).flatten(-2)
        first = group * MX_GROUP
        values = values[..., k - first : k_end - first].transpose(1, 2)
        return values, torch.where(exponent == _NO_EXPONENT, torch.nan, 1.0)
    (row, row_end), (column, column_end) = bounds
    height, width = how.block
    here = (slice(row // height, -(-row_end // height)), slice(column // width, -(-column_end // width)))
    if len(scales.get_slice(how.scale).get_shape()) == 2:
        scale = scales.get_slice(how.scale)[here].float()
    else:  # one, or one for each row
        grid = (-(-stored.shape[0] // height), -(-stored.shape[1] // width))
        scale = scales.get_tensor(how.scale).float().reshape(grid)[here]
    expanded = scale[torch.arange(row, row_end) // height - here[0].start]
    if scale.shape[1] > 1:
        expanded = expanded[:, torch.arange(column, column_end) // width - here[1].start]
    if how.format == "int4":
        first = column // PACKED
        packed = codes[row:row_end, first : -(-column_end // PACKED)]
        nibbles = (packed.unsqueeze(2) >> (4 * torch.arange(PACKED, dtype=torch.int32))) & 15
        begin = first * PACKED
        values = nibbles.flatten(1)[:, column - begin : column_end - begin].float() - 8
    else:
        values = codes[row:row_end, column:column_end].float()
    return values.mul_(expanded), scale


@torch.no_grad()
def read_piece(open_file: Callable[[str], Any], index: HFIndex, parts: tuple[Part, ...], piece: Piece) -> int:
    """Fills a box of a parameter, cast to its dtype, from `parts`; returns the number of elements.

    open_file: gives the opened safetensors file of that name. Raises UserError if a value is not finite,
    because the loss would be NaN from the first step on.
    """
    found = []
    box = tuple(zip(piece.start, piece.values.shape, strict=True))
    for part in parts:
        starts = tuple(max(pair) for pair in zip(part.start, piece.start, strict=True))
        ends = [
            min(begin + number, first + size)
            for begin, number, (first, size) in zip(part.start, part.sizes, box, strict=True)
        ]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        if all(size > 0 for size in sizes):
            here = tuple(
                slice(start - first, end - first)
                for start, end, (first, _) in zip(starts, ends, box, strict=True)
            )
            values = read_box(open_file, index, part.stored, region(part, starts, sizes))
            _check_finite(values, part.stored, index)
            found.append((here, arranged(part, values)))
    whole = found[0][1]
    if len(found) > 1:  # put together first, since a weight in 8 bits is not filled box by box
        dtype = functools.reduce(torch.promote_types, (values.dtype for _, values in found))
        whole = torch.empty(piece.values.shape, dtype=dtype)
        for here, values in found:
            whole[here] = values
    assert whole.shape == piece.values.shape, (parts, whole.shape, piece.values.shape)
    piece.values.copy_(whole)
    return sum(values.numel() for _, values in found)


def _check_finite(part: Tensor, name: str, index: HFIndex) -> None:
    # Both extremes are NaN if any value is. aminmax takes 0.5 ns per element, isfinite 20 ns.
    smallest, largest = (part.float() if part.dtype == torch.float64 else part).aminmax()
    if not (smallest.isfinite() and largest.isfinite()):
        raise UserError(
            f"{index.folder / index.tensors[name].file}: tensor {name!r} holds NaN or infinite values, so "
            "training would fail; download the checkpoint again (`lptune verify` counts these values)"
        )


def equal_values(index: HFIndex, names: list[str]) -> bool:
    """Whether the stored tensors have equal values in float32. True if shapes differ: `match_tensors` then
    raises the error.
    """
    shapes = {tuple(index.tensors[name].shape) for name in names}
    if len(shapes) != 1 or () in shapes or len(names) < 2:
        return True
    (shape,) = shapes
    rows = max(1, _COMPARED_AT_ONCE // max(1, math.prod(shape[1:])))
    open_file = functools.cache(lambda file: open_tensors(index.folder / file))
    for start in range(0, shape[0], rows):
        box = (slice(start, start + rows),)
        first, *others = (read_box(open_file, index, name, box).float() for name in names)
        if not all(torch.equal(first, other) for other in others):
            return False
    return True


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
