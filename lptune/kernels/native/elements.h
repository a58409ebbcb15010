// What the quantizers share: types of elements, scales, rounding to the 8-bit formats, and a row in INT8. The contract,
// bit for bit, is lptune/numerics.
//
// Compiled with -ffp-contract=off: x * inverse must be rounded before it is rounded to a format.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

inline float as_float(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline uint32_t as_bits(float f) { uint32_t bits; std::memcpy(&bits, &f, 4); return bits; }

// Element types. The magnitude of a float orders like its bits without the sign, NaN above inf above all: an
// integer maximum is therefore an amax that keeps NaN, and vectorizes where a floating-point one does not.
struct BFloat16 {
    using Storage = uint16_t;
    using Magnitude = uint16_t;
    static float load(Storage v) { return as_float(uint32_t(v) << 16); }
    static Magnitude magnitude(Storage v) { return v & 0x7fff; }
    static float amax(Magnitude m) { return as_float(uint32_t(m) << 16); }
};

struct Float32 {
    using Storage = float;
    using Magnitude = uint32_t;
    static float load(Storage v) { return v; }
    static Magnitude magnitude(Storage v) { return as_bits(v) & 0x7fffffff; }
    static float amax(Magnitude m) { return as_float(m); }
};

// float32 that is rounded to bfloat16, ties to even, when it is read. Rounding keeps the order, so the amax is
// rounded once and not element by element.
struct RoundedToBFloat16 {
    using Storage = float;
    using Magnitude = uint32_t;
    static float load(Storage v) {
        const uint32_t bits = as_bits(v);
        const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
        // The carry would make a number of a NaN with many payload bits.
        return as_float((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc00000 : rounded);
    }
    static Magnitude magnitude(Storage v) { return as_bits(v) & 0x7fffffff; }
    static float amax(Magnitude m) { return load(as_float(m)); }
};

struct Scale { float scale, inverse; };

// max: the largest number of the format. power_of_two: the next power of two, so that nothing saturates.
Scale scale_from_amax(float amax, float max = 127.0f, bool power_of_two = false) {
    const float smallest = as_float(0x00800000);  // 2**-126
    if (!(amax < as_float(0x7f800000))) return {as_float(0x7fc00000), 0.0f};
    if (amax == 0.0f) return {0.0f, 0.0f};
    const float scale = amax / max;
    if (scale < smallest) return {smallest, 1.0f / smallest};
    if (power_of_two) {
        const float power = as_float((as_bits(scale) + 0x7fffff) & 0x7f800000);
        return {power, 1.0f / power};
    }
    return {scale, max / amax};
}

// Round to nearest even, |v| <= 127: adding 1.5 * 2**23 leaves the integer in the low bits of the sum.
inline int8_t round_to_int8(float v) { return int8_t(as_bits(v + 12582912.0f)); }

inline float clamp(float v, float max) {
    v = v > max ? max : v;
    return v < -max ? -max : v;
}

// Formats. `nearest` rounds ties to even, saturates beyond the largest number, and in float8 keeps NaN.
struct Int8 {
    static constexpr float max = 127.0f;
    static constexpr bool has_nan = false;
    static int8_t nearest(float v) { return round_to_int8(clamp(v, max)); }
};

template <int Mantissa, int Bias, int Max>
struct Float8 {
    static constexpr float max = float(Max);
    static constexpr bool has_nan = true;
    static int8_t nearest(float v) {
        constexpr int dropped = 23 - Mantissa;
        const uint32_t bits = as_bits(clamp(v, max)), magnitude = bits & 0x7fffffff;
        // Normal numbers: adding half a step (minus one if the last kept bit is even) carries exactly when due.
        const uint32_t sum = magnitude + ((1u << (dropped - 1)) - 1) + ((magnitude >> dropped) & 1);
        const uint32_t normal = (sum >> dropped) - (uint32_t(127 - Bias) << Mantissa);
        // Subnormal numbers: adding a float whose last bit is worth one step makes the hardware round.
        constexpr uint32_t anchor = uint32_t(127 + 24 - Bias - Mantissa) << 23;
        const uint32_t subnormal = as_bits(as_float(magnitude) + as_float(anchor)) - anchor;
        uint32_t code = magnitude < (uint32_t(127 + 1 - Bias) << 23) ? subnormal : normal;
        code = magnitude > 0x7f800000 ? 0x7f : code;
        return int8_t(code | ((bits >> 24) & 0x80));
    }
};
using E4M3 = Float8<3, 7, 448>;
using E5M2 = Float8<2, 15, 57344>;

// A row of x * multiplier (null: of x) in INT8, and its scale.
template <typename T>
void quantize_row(const typename T::Storage* x, const float* multiplier, int64_t k, int8_t* q, float* scale) {
    Scale s;
    if (multiplier) {
        uint32_t largest = 0;
        #pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < k; ++i) {
            const uint32_t m = as_bits(T::load(x[i]) * multiplier[i]) & 0x7fffffff;
            largest = m > largest ? m : largest;
        }
        s = scale_from_amax(as_float(largest));
        #pragma omp simd
        for (int64_t i = 0; i < k; ++i) q[i] = round_to_int8((T::load(x[i]) * multiplier[i]) * s.inverse);
    } else {
        typename T::Magnitude largest = 0;
        #pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < k; ++i) {
            const auto m = T::magnitude(x[i]);
            largest = m > largest ? m : largest;
        }
        s = scale_from_amax(T::amax(largest));
        #pragma omp simd
        for (int64_t i = 0; i < k; ++i) q[i] = round_to_int8(T::load(x[i]) * s.inverse);
    }
    *scale = s.scale;
}

}  // namespace
