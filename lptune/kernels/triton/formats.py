"""Device functions shared by the quantizers: from an amax to a scale, from a value to 8 bits, random bits.

They give bitwise the results of `lptune.numerics`. On a GPU this needs:

- integer amaxes. The bits of |x|, read as int32, have the order of the numbers, with NaN above inf above all
  finite numbers. So one integer maximum finds the amax *and* NaN; since Ampere a warp reduces it in one
  instruction, and atomics give the same result in any order. Floating-point `max.NaN` is avoided: next to a
  transposed one-byte store Triton miscompiles it (triton issue 11111).
- `tl.div_rn`, the IEEE quotient. A plain `/` may be off by an ulp.
- rounding to an integer by adding 1.5 * 2**23. The last bit of the sum is worth 1, so the hardware rounds to
  nearest even, and the low byte of the sum is the int8. The product before must not be contracted into a
  fused multiply-add, which would skip a rounding: every launch has `enable_fp_fusion=False`.
- rounding of float32 to bfloat16 by the conversion of the hardware since sm_80, and by integer arithmetic in
  Triton's interpreter, whose conversion truncates.
- rounding of float8 by the conversion of the hardware since sm_89, and by integer arithmetic elsewhere: on
  Ampere, and in Triton's interpreter, whose conversion rounds ties up and loses subnormals.
- random bits that are a hash of a key and of an element's index, by a few integer operations in registers.
  Plain torch keeps each step of the hash in memory, as int64: 660 bytes for each element where one pass over
  x moves 3.
"""

import triton
import triton.language as tl

INFINITY_BITS = tl.constexpr(0x7F800000)
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23


@triton.jit
def magnitude_bits(x32):
    """|x| as int32, ordered like the numbers, NaN last. x32: float32."""
    return x32.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def round_input(x32, ROUNDED_TO: tl.constexpr):
    """float32 values, rounded to another dtype and back. ROUNDED_TO: of `launch.rounding_of_input`."""
    if ROUNDED_TO == "bfloat16":
        return x32.to(tl.bfloat16).to(tl.float32)
    elif ROUNDED_TO == "bfloat16 by integers":  # noqa: RET505
        return _round_bfloat16(x32)
    elif ROUNDED_TO == "float16":
        return x32.to(tl.float16).to(tl.float32)
    else:
        tl.static_assert(ROUNDED_TO == "", "round_input knows no rounding to this dtype")
        return x32


@triton.jit
def _round_bfloat16(x32):
    """float32 values, rounded to bfloat16 and back by integer arithmetic."""
    bits = x32.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Ties to even: half a step, minus one if the last kept bit is even, carries exactly when due.
    rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) & 0x7FFF0000
    rounded = tl.where(magnitude > INFINITY_BITS, magnitude, rounded)
    return (rounded | (bits & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def scale_from_amax(amax_bits, MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """(scale, inverse) as `numerics.scale_from_amax`. amax_bits: `magnitude_bits`, any shape."""
    finite = amax_bits < INFINITY_BITS
    usable = finite & (amax_bits > 0)
    # An amax without a scale gets its result at the end; 1 avoids infinities until then.
    amax = tl.where(usable, amax_bits, 0x3F800000).to(tl.float32, bitcast=True)
    largest = tl.full(amax.shape, MAX, tl.float32)
    scale = tl.div_rn(amax, largest)
    tiny = scale < 1.1754943508222875e-38  # 2**-126, numerics.SMALLEST_SCALE
    if POWER_OF_TWO:
        # The next power of two, and its reciprocal, on the bits of the exponent.
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & INFINITY_BITS
        bits = tl.where(tiny, 0x00800000, bits)
        scale = bits.to(tl.float32, bitcast=True)
        inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    else:
        scale = tl.where(tiny, 1.1754943508222875e-38, scale)
        # For so small an amax the quotient overflows; it is not used then.
        inverse = tl.div_rn(largest, tl.where(tiny, largest, amax))
        inverse = tl.where(tiny, 8.507059173023462e37, inverse)  # 2**126
    scale = tl.where(usable, scale, tl.where(finite, 0.0, float("nan")))
    return scale, tl.where(usable, inverse, 0.0)


@triton.jit
def round_to(scaled, FORMAT: tl.constexpr, MAX: tl.constexpr, HARDWARE_FLOAT8: tl.constexpr):
    """float32 values times their inverse scale -> the nearest numbers of FORMAT, as int8 bits.

    FORMAT: of `launch.rounding`: "int8" stands for the integers up to MAX. Does not compile for another one.
    Ties to even; values above MAX saturate. NaN is unspecified in INT8 and NaN in float8.
    """
    # An `or` of Triton takes two.
    KNOWN: tl.constexpr = FORMAT == "int8" or (FORMAT == "e4m3" or FORMAT == "e5m2")
    tl.static_assert(KNOWN, "round_to knows no rounding to this format")
    scaled = tl.where(scaled > MAX, MAX, scaled)
    scaled = tl.where(scaled < -MAX, -MAX, scaled)
    # One chain of branches, of which Triton compiles one: it does not stop at a return.
    if FORMAT == "int8":
        return (scaled + MAGIC).to(tl.int32, bitcast=True).to(tl.int8)
    elif FORMAT == "e4m3" and HARDWARE_FLOAT8:  # noqa: RET505
        return scaled.to(tl.float8e4nv).to(tl.int8, bitcast=True)
    elif FORMAT == "e5m2" and HARDWARE_FLOAT8:
        return scaled.to(tl.float8e5).to(tl.int8, bitcast=True)
    elif FORMAT == "e4m3":
        return _round_float8(scaled, 3, 7)
    else:
        return _round_float8(scaled, 2, 15)


@triton.jit
def _round_float8(scaled, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """float32 within the range of the format -> float8 bits, by integer arithmetic."""
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    DROPPED: tl.constexpr = 23 - MANTISSA
    # Normal numbers: adding half a step (minus one if the last kept bit is even) carries exactly when due.
    normal = magnitude + ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)
    normal = (normal >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # Subnormal numbers: adding a float whose last bit is worth one step makes the hardware round.
    ANCHOR_BITS: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    anchor = tl.full(magnitude.shape, ANCHOR_BITS, tl.int32).to(tl.float32, bitcast=True)
    total = magnitude.to(tl.float32, bitcast=True) + anchor
    subnormal = total.to(tl.int32, bitcast=True) - ANCHOR_BITS
    FIRST_NORMAL: tl.constexpr = (127 + 1 - BIAS) << 23
    code = tl.where(magnitude < FIRST_NORMAL, subnormal, normal)
    code = tl.where(magnitude > INFINITY_BITS, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def _mix(h):
    """A bijection of uint32, as in `numerics.rounding`."""
    h = h ^ (h >> 16)
    h = h * 0x7FEB352D
    h = h ^ (h >> 15)
    h = h * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def uniform(key, index):
    """`numerics.uniform` in float32. key, index: int64."""
    low = _mix(key.to(tl.uint32) ^ index.to(tl.uint32))
    high = _mix(low ^ (key >> 32).to(tl.uint32) ^ (index >> 32).to(tl.uint32))
    return (high >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-8  # 2**-24


@triton.jit
def _floor(x32):
    """The floor of numbers that fit an int32. Triton's own takes subnormal numbers for zeros."""
    truncated = x32.to(tl.int32).to(tl.float32)
    return tl.where(truncated > x32, truncated - 1.0, truncated)


@triton.jit
def stochastic_round_to(
    scaled, random, FORMAT: tl.constexpr, MAX: tl.constexpr, HARDWARE_FLOAT8: tl.constexpr
):
    """`numerics.stochastic_round_to` of finite values, as int8 bits. FORMAT, MAX: as for `round_to`."""
    if FORMAT == "int8":
        below = _floor(scaled)
        rounded = below + tl.where(random < scaled - below, 1.0, 0.0)
    else:
        # The step of the format at `scaled` is a power of two: exact to divide by, and to multiply with.
        MANTISSA: tl.constexpr = 3 if FORMAT == "e4m3" else 2
        SMALLEST: tl.constexpr = 127 - (6 if FORMAT == "e4m3" else 14)
        exponent = (scaled.to(tl.int32, bitcast=True) >> 23) & 0xFF
        exponent = tl.where(exponent < SMALLEST, SMALLEST, exponent) - MANTISSA
        step = (exponent << 23).to(tl.float32, bitcast=True)
        steps = scaled * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        below = _floor(steps)
        rounded = (below + tl.where(random < steps - below, 1.0, 0.0)) * step
    return round_to(rounded, FORMAT, MAX, HARDWARE_FLOAT8)
