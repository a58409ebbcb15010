"""lptune's own C++ for CPUs: quantizers (quantize.cpp, rotated.cpp, stochastic.cpp) and the INT8
GEMM (gemm.cpp).

INT8 has all of them. Float8 is emulated on CPUs; it has those with one scale, or with scales that are known.
The functions here call the library (library.py) through ctypes, with raw pointers. Call them if `available`;
elsewhere operations of torch do the same work: slower, with the same bits.
"""

import ctypes

import torch
from torch import Tensor

from lptune.kernels.native.library import load
from lptune.numerics import FORMATS

_ROUNDED_TO_BFLOAT16 = 2  # after 0 for float32 and 1 for bfloat16
_FORMATS = {"int8": 0, "e4m3": 1, "e5m2": 2}

_Result = tuple[Tensor, Tensor]


def has_format(fmt: str) -> bool:
    """Whether quantizers with one scale, or with known scales, have `fmt`; all others have INT8 alone."""
    return fmt in _FORMATS


def available() -> bool:
    """Whether the library exists or could be compiled; logged once if not."""
    return load() is not None


def quantize_rows(
    x_MK: Tensor,
    multiplier_1K: Tensor | None,
    rounded_to: torch.dtype | None = None,
    out: _Result | None = None,
    rotated: bool = False,
) -> _Result:
    """INT8 rows of `x * multiplier`: q (M, K) row by row, scale (M, 1). rounded_to: x is rounded to it first.
    rotated: then it is rotated along its rows, and there is no multiplier.

    out: q and scale to write to; their rows may be any distance apart. A scale may have several columns: the
    first is the scale, the others become 0.
    """
    x, element = _rounded(x_MK, rounded_to)
    q, scale = out or _outputs(x, (x.shape[0], 1))
    results = (q, q.stride(0), scale, scale.stride(0), scale.shape[1])
    if rotated:
        assert multiplier_1K is None
        _run("quantize_rotated_rows", x, element, *x.shape, *results)
    else:
        _run("quantize_rows", x, element, *x.shape, _contiguous(multiplier_1K), *results)
    return q, scale


def quantize_columns(x_MK: Tensor, multiplier_M1: Tensor | None) -> _Result:
    """INT8 columns of `x * multiplier`: q (M, K) row by row, scale (1, K)."""
    x = _prepare(x_MK)
    q, scale = _outputs(x, (1, x.shape[1]))
    rows = (None, None, None)
    _run("quantize", x, _is_bfloat16(x), *x.shape, *rows, _contiguous(multiplier_M1), q, scale)
    return q, scale


def rotate_rows(x_MK: Tensor, dtype: torch.dtype) -> Tensor:
    """`numerics.rotate(x)`, rounded once to `dtype`."""
    x = _prepare(x_MK)
    out = torch.empty(x.shape, dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    _run("rotate_rows", x, _is_bfloat16(x), *x.shape, out, _is_bfloat16(out))
    return out.to(dtype)


def quantize_rows_and_columns(
    x_MK: Tensor, multiplier_1K: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """INT8 rows of `x * multiplier`, and INT8 columns of `x`."""
    x = _prepare(x_MK)
    rows, columns = _outputs(x, (x.shape[0], 1)), _outputs(x, (1, x.shape[1]))
    _run("quantize", x, _is_bfloat16(x), *x.shape, _contiguous(multiplier_1K), *rows, None, *columns)
    return *rows, *columns


def quantize_tensor(
    x_MK: Tensor, fmt: str = "int8", power_of_two: bool = False, past: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, scale, amax) of `x` by one scale: that of the amax `past`, float32 with one element, if it is
    positive; else that of its own amax.

    scale, (1, 1), is NaN if x is not finite. amax, (), is that of x; with `past`, q comes from the same pass.
    """
    x = _prepare(x_MK)
    (q, scale), amax = _outputs(x, (1, 1), fmt), torch.empty(())
    how = (_is_bfloat16(x), _FORMATS[fmt], x.numel(), past, power_of_two)
    _run("quantize_tensor", x, *how, q, scale, amax)
    return q, scale, amax


def quantize_by_amax(
    x_MK: Tensor,
    amax: Tensor,
    fmt: str,
    power_of_two: bool,
    block: int | None,
    first_row: int,
    rounded_to: torch.dtype | None,
) -> _Result:
    """(q, scale) as `kernels.quantize_by_amax`: reads x once."""
    x, element = _rounded(x_MK, rounded_to)
    q, scale = _outputs(x, amax.shape, fmt)
    if block is None:  # one block that holds all of x
        block, first_row = max(*x.shape, 1), 0
    amaxes = (amax.contiguous(), amax.numel(), amax.shape[1], block, first_row)
    _run("quantize_by_amax", x, element, _FORMATS[fmt], *x.shape, *amaxes, power_of_two, q, scale)
    return q, scale


def block_amaxes(x_MK: Tensor, block: int, above: int) -> Tensor:
    """The amaxes of blocks as `kernels.block_amaxes`: reads x once."""
    x = _prepare(x_MK)
    amax = torch.empty(-(-(above + x.shape[0]) // block), -(-x.shape[1] // block))
    _run("block_amaxes", x, _is_bfloat16(x), *x.shape, block, above, amax)
    return amax


def quantize_rows_stochastic(
    x_MK: Tensor,
    multiplier_1K: Tensor | None,
    key: int,
    first: int,
    before: _Result | None = None,
    found_inf: Tensor | None = None,
) -> _Result:
    """INT8 rows of `x * multiplier`, rounded as by `round_stochastically`: q (M, K), scale (M, 1).

    before: q and scale that are the results where `found_inf`, float32 with one element, is 1.
    """
    x = _prepare(x_MK)
    q, scale = _outputs(x, (x.shape[0], 1))
    kept: tuple[Tensor | None, ...] = (None, None, None)
    if before is not None and found_inf is not None:
        kept = (found_inf, *(each.contiguous() for each in before))
    how = (_contiguous(multiplier_1K), key, first, *kept)
    _run("quantize_rows_stochastic", x, _is_bfloat16(x), *x.shape, *how, q, scale)
    return q, scale


def round_stochastically(x_MK: Tensor, inverse: Tensor, key: int, first: int) -> Tensor:
    """`numerics.stochastic_round_to(x * inverse)` to INT8, (M, K), by the bits of `key` for the elements with
    index `first` and higher. inverse: float32, (M, 1), (1, K) or (1, 1).
    """
    x, inverse = _prepare(x_MK), inverse.contiguous()
    q = torch.empty(x.shape, dtype=torch.int8)
    inverses = (inverse, inverse.shape[0] > 1, inverse if inverse.shape[1] > 1 else None)
    _run("round_stochastically", x, _is_bfloat16(x), *x.shape, *inverses, key, first, q)
    return q


def round_to_bfloat16(x_MK: Tensor, key: int, first: int) -> Tensor:
    """`numerics.stochastic_round_to_bfloat16(x)`, by the bits of `key` for the elements from `first` on."""
    x, out = x_MK.contiguous(), torch.empty(x_MK.shape, dtype=torch.bfloat16)
    _run("round_to_bfloat16", x, *x.shape, key, first, out)
    return out


def instruction_set() -> str:
    """The instruction set of `int8_mm`, one of library.INSTRUCTION_SETS; empty if there is none."""
    library = load()
    if library is None:
        return ""
    library.lptune_instruction_set.restype = ctypes.c_char_p
    found: bytes = library.lptune_instruction_set()
    return found.decode()


def int8_mm(
    a_MK: Tensor,
    b_KN: Tensor,
    scale_a_M1: Tensor | None,
    scale_b_1N: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """`((a @ b).float() * scale_a * scale_b).to(out_dtype)`, (M, N), for up to 133,144 products in a sum.

    a_MK, b_KN: int8; fast if one of their dimensions is contiguous. Scales: float32, (M, 1) and (1, N), or
    (1, 1), or None for 1. Call it if there is an `instruction_set`. Raises MemoryError.
    """
    (m, k), n = a_MK.shape, b_KN.shape[1]
    if not k:
        return apply_scales(torch.zeros(m, n, dtype=torch.int32), scale_a_M1, scale_b_1N, out_dtype)
    out = _product(m, n, out_dtype)
    if m and n:
        a, b = (x if 1 in x.stride() else x.contiguous() for x in (a_MK, b_KN))
        operands = (*_operand(a, along=1), *_operand(b, along=0), m, k, n)
        scales = (*_scale(scale_a_M1), *_scale(scale_b_1N))
        if _run("int8_mm", *operands, *scales, out, _is_bfloat16(out)):
            raise MemoryError(f"no memory to pack the operands of an INT8 GEMM of {m} x {k} x {n}")
    return out.to(out_dtype)


def apply_scales(
    acc_MN: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """`(acc.float() * scale_a * scale_b).to(out_dtype)`. acc: int32; scales: float32."""
    m, n = acc_MN.shape
    out, scales = _product(m, n, out_dtype), (*_scale(scale_a), *_scale(scale_b))
    _run("apply_scales", acc_MN.contiguous(), m, n, *scales, out, _is_bfloat16(out))
    return out.to(out_dtype)


def _operand(x: Tensor, along: int) -> tuple[Tensor, int, bool]:
    """x, its stride, and whether it is contiguous along dimension `along`, and not along the other one."""
    contiguous = x.stride(along) == 1
    return x, x.stride(1 - along if contiguous else along), contiguous


def _scale(scale: Tensor | None) -> tuple[Tensor, bool]:
    """The scales of an operand, and whether there are several."""
    scale = torch.ones(1) if scale is None else scale.contiguous()
    return scale, scale.numel() > 1


def _product(m: int, n: int, dtype: torch.dtype) -> Tensor:
    """What the C++ writes for a result of `dtype`."""
    return torch.empty(m, n, dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)


def _prepare(x: Tensor) -> Tensor:
    x = x if x.dtype in (torch.bfloat16, torch.float32) else x.to(torch.float32)
    return x.contiguous()


def _rounded(x: Tensor, rounded_to: torch.dtype | None) -> tuple[Tensor, int]:
    """x for a function that rounds it, and its element type there."""
    # Of the conversions that round, C++ has that of masters to the usual compute dtype.
    rounds = (x.dtype, rounded_to) == (torch.float32, torch.bfloat16)
    x = _prepare(x if rounds or rounded_to is None else x.to(rounded_to))
    return x, _ROUNDED_TO_BFLOAT16 if rounds else _is_bfloat16(x)


def _is_bfloat16(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _outputs(x: Tensor, scale_shape: tuple[int, ...], fmt: str = "int8") -> _Result:
    return torch.empty(x.shape, dtype=FORMATS[fmt].dtype), torch.empty(scale_shape, dtype=torch.float32)


def _run(name: str, *arguments: Tensor | int | None) -> int:
    """Calls `lptune_NAME`, which takes tensors by their address (None: a null pointer), all numbers as
    int64_t, and at last the number of threads. Returns what it returns.
    """
    library = load()
    assert library is not None
    given: list[ctypes.c_void_p | ctypes.c_int64] = []
    for each in arguments:
        if isinstance(each, int):
            given.append(ctypes.c_int64(each))
        else:
            given.append(ctypes.c_void_p(None if each is None else each.data_ptr()))
    result: int = getattr(library, f"lptune_{name}")(*given, ctypes.c_int64(torch.get_num_threads()))
    return result
