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
    library = load()
    assert library is not None
    x, element = _rounded(x_MK, rounded_to)
    multiplier = None if multiplier_1K is None else multiplier_1K.contiguous()
    q, scale = out or _outputs(x, (x.shape[0], 1))
    assert multiplier is None or not rotated
    multipliers = () if rotated else (ctypes.c_void_p(None if multiplier is None else multiplier.data_ptr()),)
    run = library.lptune_quantize_rotated_rows if rotated else library.lptune_quantize_rows
    run(
        ctypes.c_void_p(x.data_ptr()),
        element,
        ctypes.c_int64(x.shape[0]),
        ctypes.c_int64(x.shape[1]),
        *multipliers,
        ctypes.c_void_p(q.data_ptr()),
        ctypes.c_int64(q.stride(0)),
        ctypes.c_void_p(scale.data_ptr()),
        ctypes.c_int64(scale.stride(0)),
        ctypes.c_int64(scale.shape[1]),
        torch.get_num_threads(),
    )
    return q, scale


def quantize_columns(x_MK: Tensor, multiplier_M1: Tensor | None) -> _Result:
    """INT8 columns of `x * multiplier`: q (M, K) row by row, scale (1, K)."""
    x = _prepare(x_MK)
    q, scale = _outputs(x, (1, x.shape[1]))
    _call(x, None, None, multiplier_M1, (q, scale))
    return q, scale


def rotate_rows(x_MK: Tensor, dtype: torch.dtype) -> Tensor:
    """`numerics.rotate(x)`, rounded once to `dtype`."""
    library, x = load(), _prepare(x_MK)
    assert library is not None
    out = torch.empty(x.shape, dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    library.lptune_rotate_rows(
        ctypes.c_void_p(x.data_ptr()),
        int(x.dtype == torch.bfloat16),
        ctypes.c_int64(x.shape[0]),
        ctypes.c_int64(x.shape[1]),
        ctypes.c_void_p(out.data_ptr()),
        int(out.dtype == torch.bfloat16),
        torch.get_num_threads(),
    )
    return out.to(dtype)


def quantize_rows_and_columns(
    x_MK: Tensor, multiplier_1K: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """INT8 rows of `x * multiplier`, and INT8 columns of `x`."""
    x = _prepare(x_MK)
    rows, columns = _outputs(x, (x.shape[0], 1)), _outputs(x, (1, x.shape[1]))
    _call(x, multiplier_1K, rows, None, columns)
    return *rows, *columns


def quantize_tensor(
    x_MK: Tensor, fmt: str = "int8", power_of_two: bool = False, past: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, scale, amax) of `x` by one scale: that of the amax `past`, float32 with one element, if it is
    positive; else that of its own amax.

    scale, (1, 1), is NaN if x is not finite. amax, (), is that of x; with `past`, q comes from the same pass.
    """
    library, x = load(), _prepare(x_MK)
    assert library is not None
    (q, scale), amax = _outputs(x, (1, 1), fmt), torch.empty(())
    library.lptune_quantize_tensor(
        ctypes.c_void_p(x.data_ptr()),
        int(x.dtype == torch.bfloat16),
        _FORMATS[fmt],
        ctypes.c_int64(x.numel()),
        ctypes.c_void_p(None if past is None else past.data_ptr()),
        int(power_of_two),
        ctypes.c_void_p(q.data_ptr()),
        ctypes.c_void_p(scale.data_ptr()),
        ctypes.c_void_p(amax.data_ptr()),
        torch.get_num_threads(),
    )
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
    library, (x, element), amax = load(), _rounded(x_MK, rounded_to), amax.contiguous()
    assert library is not None
    q = torch.empty(x.shape, dtype=FORMATS[fmt].dtype)
    scale = torch.empty(amax.shape, dtype=torch.float32)
    if block is None:  # one block that holds all of x
        block, first_row = max(*x.shape, 1), 0
    library.lptune_quantize_by_amax(
        ctypes.c_void_p(x.data_ptr()),
        element,
        _FORMATS[fmt],
        ctypes.c_int64(x.shape[0]),
        ctypes.c_int64(x.shape[1]),
        ctypes.c_void_p(amax.data_ptr()),
        ctypes.c_int64(amax.numel()),
        ctypes.c_int64(amax.shape[1]),
        ctypes.c_int64(block),
        ctypes.c_int64(first_row),
        int(power_of_two),
        ctypes.c_void_p(q.data_ptr()),
        ctypes.c_void_p(scale.data_ptr()),
        torch.get_num_threads(),
    )
    return q, scale


def block_amaxes(x_MK: Tensor, block: int, above: int) -> Tensor:
    """The amaxes of blocks as `kernels.block_amaxes`: reads x once."""
    library, x = load(), _prepare(x_MK)
    assert library is not None
    amax = torch.empty(-(-(above + x.shape[0]) // block), -(-x.shape[1] // block))
    library.lptune_block_amaxes(
        ctypes.c_void_p(x.data_ptr()),
        int(x.dtype == torch.bfloat16),
        ctypes.c_int64(x.shape[0]),
        ctypes.c_int64(x.shape[1]),
        ctypes.c_int64(block),
        ctypes.c_int64(above),
        ctypes.c_void_p(amax.data_ptr()),
        torch.get_num_threads(),
    )
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
    library, x = load(), _prepare(x_MK)
    assert library is not None
    multiplier = None if multiplier_1K is None else multiplier_1K.contiguous()
    q, scale = _outputs(x, (x.shape[0], 1))
    # The contiguous copies live until the call is over.
    kept = [each.contiguous() for each in before] if before is not None and found_inf is not None else None
    library.lptune_quantize_rows_stochastic(
        ctypes.c_void_p(x.data_ptr()),
        int(x.dtype == torch.bfloat16),
        ctypes.c_int64(x.shape[0]),
        ctypes.c_int64(x.shape[1]),
        ctypes.c_void_p(None if multiplier is None else multiplier.data_ptr()),
        ctypes.c_uint64(key),
        ctypes.c_int64(first),
        ctypes.c_void_p(None if kept is None or found_inf is None else found_inf.data_ptr()),
        *(ctypes.c_void_p(None if kept is None else kept[i].data_ptr()) for i in range(2)),
        ctypes.c_void_p(q.data_ptr()),
        ctypes.c_void_p(scale.data_ptr()),
        torch.get_num_threads(),
    )
    return q, scale


def round_stochastically(x_MK: Tensor, inverse: Tensor, key: int, first: int) -> Tensor:
    """`numerics.stochastic_round_to(x * inverse)` to INT8, (M, K), by the bits of `key` for the elements with
    index `first` and higher. inverse: float32, (M, 1), (1, K) or (1, 1).
    """
    library, x, inverse = load(), _prepare(x_MK), inverse.contiguous()
    assert library is not None
    q = torch.empty(x.shape, dtype=torch.int8)
    by_column = inverse.shape[1] > 1
    library.lptune_round_stochastically(
        ctypes.c_void_p(x.data_ptr()),
        int(x.dtype == torch.bfloat16),
        ctypes.c_int64(x.shape[0]),
        ctypes.c_int64(x.shape[1]),
        ctypes.c_void_p(inverse.data_ptr()),
        int(inverse.shape[0] > 1),
        ctypes.c_void_p(inverse.data_ptr() if by_column else None),
        ctypes.c_uint64(key),
        ctypes.c_int64(first),
        ctypes.c_void_p(q.data_ptr()),
        torch.get_num_threads(),
    )
    return q


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
    library = load()
    assert library is not None
    (m, k), n = a_MK.shape, b_KN.shape[1]
    direct = out_dtype in (torch.bfloat16, torch.float32)
    out = torch.empty(m, n, dtype=out_dtype if direct else torch.float32)
    if not k:
        return apply_scales(torch.zeros(m, n, dtype=torch.int32), scale_a_M1, scale_b_1N, out_dtype)
    if m and n:
        a, b = (x if 1 in x.stride() else x.contiguous() for x in (a_MK, b_KN))
        scales = _scales(scale_a_M1, scale_b_1N)
        failed = library.lptune_int8_mm(
            *_operand(a, along=1),
            *_operand(b, along=0),
            *(ctypes.c_int64(size) for size in (m, k, n)),
            *(argument for s in scales for argument in (ctypes.c_void_p(s.data_ptr()), int(s.numel() > 1))),
            ctypes.c_void_p(out.data_ptr()),
            int(out.dtype == torch.bfloat16),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"no memory to pack the operands of an INT8 GEMM of {m} x {k} x {n}")
    return out.to(out_dtype)


def _operand(x: Tensor, along: int) -> tuple[ctypes.c_void_p, ctypes.c_int64, int]:
    """Pointer, stride, and whether x is contiguous along dimension `along`, and not along the other one."""
    contiguous = x.stride(along) == 1
    stride = x.stride(1 - along if contiguous else along)
    return ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(stride), contiguous


def _scales(scale_a: Tensor | None, scale_b: Tensor | None) -> list[Tensor]:
    return [torch.ones(1) if s is None else s.contiguous() for s in (scale_a, scale_b)]


def apply_scales(
    acc_MN: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """`(acc.float() * scale_a * scale_b).to(out_dtype)`. acc: int32; scales: float32."""
    library = load()
    assert library is not None
    acc, (m, n) = acc_MN.contiguous(), acc_MN.shape
    a, b = _scales(scale_a, scale_b)
    direct = out_dtype in (torch.bfloat16, torch.float32)
    out = torch.empty(m, n, dtype=out_dtype if direct else torch.float32)
    library.lptune_apply_scales(
        ctypes.c_void_p(acc.data_ptr()),
        ctypes.c_int64(m),
        ctypes.c_int64(n),
        ctypes.c_void_p(a.data_ptr()),
        int(a.numel() > 1),
        ctypes.c_void_p(b.data_ptr()),
        int(b.numel() > 1),
        ctypes.c_void_p(out.data_ptr()),
        int(out.dtype == torch.bfloat16),
        torch.get_num_threads(),
    )
    return out.to(out_dtype)


def _prepare(x: Tensor) -> Tensor:
    x = x if x.dtype in (torch.bfloat16, torch.float32) else x.to(torch.float32)
    return x.contiguous()


def _rounded(x: Tensor, rounded_to: torch.dtype | None) -> tuple[Tensor, int]:
    """x for a function that rounds it, and its element type there."""
    # Of the conversions that round, C++ has that of masters to the usual compute dtype.
    rounds = (x.dtype, rounded_to) == (torch.float32, torch.bfloat16)
    x = _prepare(x if rounds or rounded_to is None else x.to(rounded_to))
    return x, _ROUNDED_TO_BFLOAT16 if rounds else int(x.dtype == torch.bfloat16)


def _outputs(x: Tensor, scale_shape: tuple[int, int], fmt: str = "int8") -> _Result:
    return torch.empty(x.shape, dtype=FORMATS[fmt].dtype), torch.empty(scale_shape, dtype=torch.float32)


def _call(
    x: Tensor,
    row_multiplier: Tensor | None,
    rows: _Result | None,
    column_multiplier: Tensor | None,
    columns: _Result | None,
) -> None:
    library = load()
    assert library is not None

    # The contiguous copies live until the call is over.
    multipliers = [m if m is None else m.contiguous() for m in (row_multiplier, column_multiplier)]
    pointers = [m if m is None else m.data_ptr() for m in multipliers]
    q_rows, scale_rows = (t.data_ptr() for t in rows) if rows else (None, None)
    q_columns, scale_columns = (t.data_ptr() for t in columns) if columns else (None, None)
    library.lptune_quantize(
        ctypes.c_void_p(x.data_ptr()),
        int(x.dtype == torch.bfloat16),
        ctypes.c_int64(x.shape[0]),
        ctypes.c_int64(x.shape[1]),
        *(
            ctypes.c_void_p(p)
            for p in (pointers[0], q_rows, scale_rows, pointers[1], q_columns, scale_columns)
        ),
        torch.get_num_threads(),
    )
