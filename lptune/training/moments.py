"""How the two moments of AdamW are stored between updates: in float32, in bfloat16, or in 8 bits with scales.

In bfloat16 the second moment is rounded stochastically: one that decays by a thousandth an update (beta2
0.999) would keep every bit if it were rounded to nearest, as steps of bfloat16 are 2**-8 of a number.

8 bits (Dettmers et al., arXiv:2110.02861). A row is cut into blocks of BLOCK elements, the last of which may
be shorter. Of a block the largest magnitude is stored, and of each element a code of 8 bits:

    scale = amax(block)                        float32, one for each block
    code  = the nearest of 256 values in [-1, 1] to bfloat16(x / scale)
    x     ~ value[code] * scale

Blocks lie within a row, so FSDP, which cuts between rows, cuts no block. An update decodes a few rows,
updates them in float32 and encodes them again (chunked_adamw.py).

The distance between values grows with their size (`_dynamic`), which keeps the relative error of small
elements near that of large ones: within a block second moments differ by a factor of 10**6, and the update
divides by their square roots. The second moment, which is never negative, has all 256 values in [0, 1]. None
above 0 is stored as 0, since the update would be exp_avg / eps. With equally spaced values the loss was
higher after 100 steps (docs/optimizers.md).

A table has the codes of all 65,536 numbers of bfloat16: to encode is a cast and a look-up, with the same bits
on every device. A search among 255 boundaries took 34 ns an element on a CPU, the look-up 0.5. The cast moves
x by at most 2**-9 (where it is near 1, and values are 2**-7 apart), and by 2**-8 of itself.

What was decoded and is encoded again gets the same codes and scales, bit for bit, so an update that is
skipped changes nothing: the largest element has the value 1 or -1, hence is the scale itself.

What stays in float32: vectors (norms, biases), which are few and matter much; stacks of matrices; matrices of
fewer than 4,096 elements or rows shorter than half a block; and what tensor parallelism cuts within a block.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lptune.distributed import blocks_are_whole, on_this_rank, zeros_by_blocks
from lptune.kernels import round_to_bfloat16
from lptune.linear import placed_as

BLOCK = 128
_CHUNK = 2**20  # elements converted at once
_FEWEST = 4096  # elements of a matrix, as in bitsandbytes and torchao
# Below it decoded values could be subnormal, and would not be encoded again to the bit: such blocks are
# stored as 0. The root of this scale is far below eps.
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-100, torch.finfo(torch.float32).max


Make = Callable[..., Tensor]
"""torch.zeros or torch.empty."""


class RandomBits(NamedTuple):
    """Where the random bits of a few rows come from (numerics.random_key)."""

    key: int
    first: int
    """Index of the first element in the whole tensor."""


class Storage(Protocol):
    """How one moment is stored: in which tensors, and how they are read and written."""

    SUFFIXES: ClassVar[tuple[str, ...]]
    """Each tensor's key in the optimizer's state and in a checkpoint is the moment's key and this."""

    def new(self, parameter: Tensor, make: Make = torch.zeros) -> tuple[Tensor, ...]:
        """Tensors for a moment of `parameter`, sharded as it is. make: torch.empty if a loader fills them."""

    def num_bytes(self, local: Tensor) -> int:
        """Bytes of `new` on this rank, which has the part `local` of the parameter."""

    def read(self, parts: tuple[Tensor, ...], first_column: int = 0) -> Tensor:
        """The float32 values of a few rows. parts: this rank's rows of the tensors of `new`. first_column: of
        them in the whole rows, for tensors that were made to read.
        """

    def write(self, parts: tuple[Tensor, ...], values_NK: Tensor, bits: RandomBits | None = None) -> None:
        """Stores new values of these rows, which may be what `read` returned; `values_NK` is used up. bits:
        for a storage that rounds stochastically; None: to nearest.
        """


class Float32:
    """A float32 tensor of the parameter's shape, which is read and written in place."""

    SUFFIXES: ClassVar[tuple[str, ...]] = ("",)

    def new(self, parameter: Tensor, make: Make = torch.zeros) -> tuple[Tensor, ...]:
        return (_like(parameter, torch.float32, make),)

    def num_bytes(self, local: Tensor) -> int:
        return 4 * local.numel()

    def read(self, parts: tuple[Tensor, ...], first_column: int = 0) -> Tensor:
        """The rows themselves, so that what changes them is stored."""
        return parts[0]

    def write(self, parts: tuple[Tensor, ...], values_NK: Tensor, bits: RandomBits | None = None) -> None:
        """Nothing to do where the values were read here."""
        if values_NK is not parts[0]:
            parts[0].copy_(values_NK)


class Bfloat16:
    """A bfloat16 tensor of the parameter's shape, rounded to nearest or, once an update, stochastically."""

    SUFFIXES: ClassVar[tuple[str, ...]] = ("_bf16",)

    def __init__(self, *, stochastic: bool) -> None:
        """stochastic: round stochastically where `write` gets random bits."""
        self._stochastic = stochastic

    def new(self, parameter: Tensor, make: Make = torch.zeros) -> tuple[Tensor, ...]:
        return (_like(parameter, torch.bfloat16, make),)

    def num_bytes(self, local: Tensor) -> int:
        return 2 * local.numel()

    def read(self, parts: tuple[Tensor, ...], first_column: int = 0) -> Tensor:
        return parts[0].to(torch.float32)

    def write(self, parts: tuple[Tensor, ...], values_NK: Tensor, bits: RandomBits | None = None) -> None:
        """Rounds the values; a number of bfloat16 stays as it is either way."""
        if self._stochastic and bits is not None:
            values_NK = round_to_bfloat16(values_NK, *bits)
        parts[0].copy_(values_NK)


class Blocks8Bit:
    """Codes of 8 bits (uint8, of the parameter's shape) and a float32 scale for each block."""

    SUFFIXES: ClassVar[tuple[str, ...]] = ("_8bit", "_scale")

    def __init__(self, values: Tensor, *, above_zero: bool) -> None:
        """values: (256,), in [-1, 1], with the ends of their range; the first is 0. above_zero: numbers above
        0 get a value above 0.
        """
        self._values, self._codes = values, _codes_of(values, above_zero)

    def new(self, parameter: Tensor, make: Make = torch.zeros) -> tuple[Tensor, ...]:
        return _like(parameter, torch.uint8, make), zeros_by_blocks(parameter, BLOCK)

    def num_bytes(self, local: Tensor) -> int:
        return local.numel() + 4 * local.shape[0] * -(-local.shape[1] // BLOCK)

    def read(self, parts: tuple[Tensor, ...], first_column: int = 0) -> Tensor:
        codes_NK, scale_NB = parts
        values_NK = _look_up(self._values, codes_NK)
        for block, scale in _blocks(values_NK, scale_NB, first_column):
            block.mul_(scale)
        return values_NK

    def write(self, parts: tuple[Tensor, ...], values_NK: Tensor, bits: RandomBits | None = None) -> None:
        """Encodes the values. A block with a NaN becomes NaN; inf becomes the largest float32."""
        codes_NK, scale_NB = parts
        for block, scale in _blocks(values_NK, scale_NB):
            amax = block.abs().amax(-1, keepdim=True).clamp_(max=_LARGEST_SCALE)
            is_zero = amax < _SMALLEST_SCALE
            scale.copy_(amax.masked_fill(is_zero, 0))
            block.div_(amax.masked_fill_(is_zero, torch.inf))
        index = values_NK.to(torch.bfloat16).view(torch.uint16)
        codes_NK.copy_(_look_up(self._codes, index))


def _like(parameter: Tensor, dtype: torch.dtype, make: Make) -> Tensor:
    """A plain tensor of the parameter's shape, sharded as it is."""
    local = make(on_this_rank(parameter).shape, dtype=dtype, device=parameter.device)
    return placed_as(parameter, local, parameter.shape) if isinstance(parameter, DTensor) else local


def _look_up(table: Tensor, index_NK: Tensor) -> Tensor:
    flat = index_NK.reshape(-1).to(torch.int32)
    return torch.index_select(_on(table, index_NK.device), 0, flat).view(index_NK.shape)


@functools.cache
def _on(table: Tensor, device: torch.device) -> Tensor:
    return table.to(device)


def _blocks(values_NK: Tensor, scale_NB: Tensor, first_column: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the blocks with their scales: the whole blocks of all rows, and what is left at their end.

    first_column: of the values, counted in the rows that the scales belong to. Yields (N, B, BLOCK) or
    (N, 1, fewer), and scales (N, B, 1).
    """
    n, k = values_NK.shape
    begin = min(-first_column % BLOCK, k)  # up to there the end of a block that began before
    whole = (k - begin) // BLOCK
    end = begin + whole * BLOCK
    first = first_column // BLOCK
    if begin:
        yield values_NK[:, :begin].view(n, 1, begin), scale_NB[:, first : first + 1, None]
        first += 1
    if whole:
        yield values_NK[:, begin:end].unflatten(1, (whole, BLOCK)), scale_NB[:, first : first + whole, None]
    if end < k:
        yield values_NK[:, end:].view(n, 1, k - end), scale_NB[:, first + whole : first + whole + 1, None]


def _dynamic(*, signed: bool) -> Tensor:
    """256 values: of each power of ten twice as many as of the one below, from 1e-6 (one, or two without a
    sign) to 1; 0, and both ends of the range.
    """
    positive = list[float]()
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1, dtype=torch.float64)
        positive += ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (i - 6)).tolist()
    if signed:
        positive[-1] = 1.0  # 127 of each sign, 0, and one more below 0
        values = [0.0, *positive, *(-each for each in positive), -positive[0] / 10]
    else:
        values = [0.0, *positive, 1.0]
    return torch.tensor(values, dtype=torch.float32)


def _codes_of(values: Tensor, above_zero: bool) -> Tensor:
    """(65536,) uint8: the code of each number of bfloat16, by its bits. above_zero: see Blocks8Bit."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)  # wraps to the negative ones
    numbers = bits.view(torch.bfloat16).to(torch.float64).nan_to_num(0.0, 1.0, -1.0)
    ascending, codes = values.to(torch.float64).sort()
    boundaries = (ascending[1:] + ascending[:-1]) / 2
    if above_zero:
        boundaries = torch.where(ascending[:-1] == 0, 0.0, boundaries)
    return codes[torch.bucketize(numbers, boundaries)].to(torch.uint8)


EXP_AVG = Blocks8Bit(_dynamic(signed=True), above_zero=False)
EXP_AVG_SQ = Blocks8Bit(_dynamic(signed=False), above_zero=True)
MOMENTS = ("exp_avg", "exp_avg_sq")
"""The moments of AdamW."""
FLOAT32 = Float32()
STORAGES: dict[str, tuple[Storage, Storage]] = {
    "adamw": (FLOAT32, FLOAT32),
    "adamw_bf16": (Bfloat16(stochastic=False), Bfloat16(stochastic=True)),
    "adamw_8bit": (EXP_AVG, EXP_AVG_SQ),
}
"""optimizer.kind -> how the MOMENTS of large matrices are stored; all others are in float32."""


def storages(kind: str, parameter: Tensor) -> tuple[Storage, Storage]:
    """How the MOMENTS of `parameter` are stored. Ranks agree on it."""
    return storages_of(kind, parameter.shape, blocks_are_whole(parameter, BLOCK))


def storages_of(kind: str, shape: torch.Size, blocks_are_whole: bool) -> tuple[Storage, Storage]:
    """How the MOMENTS of a parameter of this shape, that of all ranks together, are stored. blocks_are_whole:
    whether each block of its rows lies on one rank.
    """
    is_large = len(shape) == 2 and shape.numel() >= _FEWEST and 2 * shape[1] >= BLOCK
    if not is_large or (kind == "adamw_8bit" and not blocks_are_whole):
        return STORAGES["adamw"]
    return STORAGES[kind]


def keys(stored: tuple[Storage, Storage]) -> tuple[str, ...]:
    """Keys of the tensors of both MOMENTS."""
    return tuple(
        m + suffix for m, storage in zip(MOMENTS, stored, strict=True) for suffix in storage.SUFFIXES
    )


def new_state(
    stored: tuple[Storage, Storage], parameter: Tensor, make: Make = torch.zeros
) -> dict[str, Tensor]:
    """The tensors of both MOMENTS by their keys; see Storage.new."""
    tensors = (tensor for each in stored for tensor in each.new(parameter, make))
    return dict(zip(keys(stored), tensors, strict=True))


def convert(
    theirs: tuple[Storage, Storage],
    read: Mapping[str, Tensor],
    ours: tuple[Storage, Storage],
    state: Mapping[str, Tensor],
    first_column: int,
) -> None:
    """Writes both MOMENTS of `read`, stored as `theirs`, to those of `state`, stored as `ours`.

    first_column: of this rank's part, counted in the rows that the scales in `read` belong to.
    """
    for moment, source, target in zip(MOMENTS, theirs, ours, strict=True):
        here, there = (
            tuple(on_this_rank(tensors[moment + suffix]) for suffix in storage.SUFFIXES)
            for tensors, storage in ((state, target), (read, source))
        )
        num_rows = here[0].shape[0]
        chunk = max(1, _CHUNK // max(1, here[0][:1].numel()))
        for rows in (slice(start, start + chunk) for start in range(0, num_rows, chunk)):
            of = tuple(tensor[rows] for tensor in there)
            # A copy, since writing uses its values up.
            values_NK = source.read(of, first_column).clone()
            target.write(tuple(tensor[rows] for tensor in here), values_NK)
