"""Device functions shared by the quantizers: from an amax to a scale, from a value to 8 bits.

They give the very bits of `lptune.numerics`. What that takes on a GPU:

- amaxes are integers. The bits of |x|, read as int32, are ordered like the numbers, with NaN above inf above
  everything finite. One integer maximum therefore finds the amax *and* the NaN, warps reduce it in one
  instruction since Ampere, and it can be done by atomics in any order with the same result. Floating-point
  `max.NaN` is avoided on purpose: beside a transposed one-byte store Triton miscompiles it (triton issue
  11111).
- `tl.div_rn` is the IEEE quotient. A plain `/` may be off by an ulp.
- rounding to an integer adds 1.5 * 2**23: the sum's last bit is 1, hence the hardware's own round to nearest
  even does it, and the low byte of the sum is the int8. The product before it must not be contracted into a
  fused multiply-add, which would skip a rounding: every launch says `enable_fp_fusion=False`.
- float8 is rounded by the hardware's conversion from sm_89 on, and by integer arithmetic elsewhere: on
  Ampere, and in Triton's interpreter, whose own conversion rounds ties up and loses subnormals.
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
def scale_from_amax(amax_bits, MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """(scale, inverse) as `numerics.scale_from_amax`. amax_bits: `magnitude_bits`, any shape."""
    finite = amax_bits < INFINITY_BITS
    usable = finite & (amax_bits > 0)
    # What has no scale is replaced at the end; 1 keeps the arithmetic quiet until then.
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
        # An amax that small would overflow the quotient, which is not used.
        inverse = tl.div_rn(largest, tl.where(tiny, largest, amax))
        inverse = tl.where(tiny, 8.507059173023462e37, inverse)  # 2**126
    scale = tl.where(usable, scale, tl.where(finite, 0.0, float("nan")))
    return scale, tl.where(usable, inverse, 0.0)


@triton.jit
def round_to(scaled, FORMAT: tl.constexpr, MAX: tl.constexpr, HARDWARE_FLOAT8: tl.constexpr):
    """float32 values times their inverse scale -> the nearest numbers of FORMAT, as int8 bits.

    Ties to even, what exceeds MAX saturates. NaN gives anything in INT8 and NaN in float8.
    """
    scaled = tl.where(scaled > MAX, MAX, scaled)
    scaled = tl.where(scaled < -MAX, -MAX, scaled)
    # Triton does not stop at a return: one chain of branches, of which it compiles one.
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
    """float32 within the format's range -> its float8 bits, in integer arithmetic."""
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    DROPPED: tl.constexpr = 23 - MANTISSA
    # Normal numbers: half a step, less one unless the last kept bit is odd, carries exactly when it should.
    normal = magnitude + ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)
    normal = (normal >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # Subnormal numbers: a float whose last bit is worth one step rounds the sum for us.
    ANCHOR_BITS: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    anchor = tl.full(magnitude.shape, ANCHOR_BITS, tl.int32).to(tl.float32, bitcast=True)
    total = magnitude.to(tl.float32, bitcast=True) + anchor
    subnormal = total.to(tl.int32, bitcast=True) - ANCHOR_BITS
    FIRST_NORMAL: tl.constexpr = (127 + 1 - BIAS) << 23
    code = tl.where(magnitude < FIRST_NORMAL, subnormal, normal)
    code = tl.where(magnitude > INFINITY_BITS, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.int8)
