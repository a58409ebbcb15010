// INT8 quantizers and the GEMM's epilogue for CPUs. The contract, bit for bit, is lptune/numerics/quantize.py.
//
// Why not leave this to torch: eagerly, a quantizer is six passes over memory that does not fit the cache, and
// costs as much as the GEMM it serves; compiled by Inductor it is two, but the column-wise one is not vectorized
// well. Here a row is read once from memory and a second time from the first-level cache, and the pass that
// quantizes rows collects the amax of the columns on its way.
//
// Compiled with -ffp-contract=off: x * inverse must be rounded before it is rounded to an integer.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <omp.h>
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

Scale scale_from_amax(float amax) {
    const float smallest = as_float(0x00800000);  // 2**-126
    if (!(amax < as_float(0x7f800000))) return {as_float(0x7fc00000), 0.0f};
    if (amax == 0.0f) return {0.0f, 0.0f};
    const float scale = amax / 127.0f;
    if (scale < smallest) return {smallest, 1.0f / smallest};
    return {scale, 127.0f / amax};
}

// Round to nearest even, |v| <= 127: adding 1.5 * 2**23 leaves the integer in the low bits of the sum.
inline int8_t round_to_int8(float v) { return int8_t(as_bits(v + 12582912.0f)); }

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

// Rows of x * multiplier (a vector over columns, or null) into q, whose rows begin q_stride bytes apart. Scales
// are scale_stride floats apart, and each is the first of scale_width floats; the others become zero.
template <typename T>
void quantize_rows(const void* data, int64_t m, int64_t k, const float* multiplier, int8_t* q, int64_t q_stride,
                   float* scale, int64_t scale_stride, int64_t scale_width, int num_threads) {
    const auto* x = static_cast<const typename T::Storage*>(data);
    #pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < m; ++row) {
        float* header = scale + row * scale_stride;
        std::fill(header, header + scale_width, 0.0f);
        quantize_row<T>(x + row * k, multiplier, k, q + row * q_stride, header);
    }
}

// Rows of x * row_multiplier (a vector over columns) into q_rows, columns of x * column_multiplier (a vector
// over rows) into q_columns; either may be absent, which its scale tells (the values may be empty).
template <typename T>
void quantize(const void* data, int64_t m, int64_t k, const float* row_multiplier, int8_t* q_rows,
              float* scale_rows, const float* column_multiplier, int8_t* q_columns, float* scale_columns,
              int num_threads) {
    const auto* x = static_cast<const typename T::Storage*>(data);
    std::vector<std::vector<uint32_t>> column_amax(num_threads);
    std::vector<float> inverse(scale_columns ? k : 0);

    #pragma omp parallel num_threads(num_threads)
    {
        // A team may be smaller than asked for; what is shared out is counted by the team there is.
        const int thread = omp_get_thread_num();
        std::vector<typename T::Magnitude> plain;   // amax of x, in the type it is stored in
        std::vector<uint32_t>& folded = column_amax[thread];  // amax of x * multiplier, as float bits
        if (scale_columns) {
            folded.assign(k, 0);
            if (!column_multiplier) plain.assign(k, 0);
        }
        #pragma omp for schedule(static)
        for (int64_t row = 0; row < m; ++row) {
            const auto* from = x + row * k;
            if (scale_rows) quantize_row<T>(from, row_multiplier, k, q_rows + row * k, scale_rows + row);
            if (!scale_columns) continue;
            if (column_multiplier) {
                const float by = column_multiplier[row];
                uint32_t* to = folded.data();
                #pragma omp simd
                for (int64_t i = 0; i < k; ++i) {
                    const uint32_t v = as_bits(T::load(from[i]) * by) & 0x7fffffff;
                    to[i] = v > to[i] ? v : to[i];
                }
            } else {
                auto* to = plain.data();
                #pragma omp simd
                for (int64_t i = 0; i < k; ++i) {
                    const auto v = T::magnitude(from[i]);
                    to[i] = v > to[i] ? v : to[i];
                }
            }
        }
        if (scale_columns) {
            if (!column_multiplier)
                for (int64_t i = 0; i < k; ++i) folded[i] = as_bits(T::amax(plain[i]));
            #pragma omp barrier
            #pragma omp for schedule(static)
            for (int64_t i = 0; i < k; ++i) {
                uint32_t largest = 0;
                for (const auto& amax : column_amax)
                    if (!amax.empty() && amax[i] > largest) largest = amax[i];
                const Scale s = scale_from_amax(as_float(largest));
                scale_columns[i] = s.scale;
                inverse[i] = s.inverse;
            }
            #pragma omp for schedule(static)
            for (int64_t row = 0; row < m; ++row) {
                const auto* from = x + row * k;
                int8_t* to = q_columns + row * k;
                const float* by = inverse.data();
                if (column_multiplier) {
                    const float fold = column_multiplier[row];
                    #pragma omp simd
                    for (int64_t i = 0; i < k; ++i) to[i] = round_to_int8((T::load(from[i]) * fold) * by[i]);
                } else {
                    #pragma omp simd
                    for (int64_t i = 0; i < k; ++i) to[i] = round_to_int8(T::load(from[i]) * by[i]);
                }
            }
        }
    }
}

template <typename T>
void quantize_tensor(const void* data, int64_t size, int8_t* q, float* scale, int num_threads) {
    const auto* x = static_cast<const typename T::Storage*>(data);
    typename T::Magnitude largest = 0;
    #pragma omp parallel for simd schedule(static) num_threads(num_threads) reduction(max : largest)
    for (int64_t i = 0; i < size; ++i) {
        const auto m = T::magnitude(x[i]);
        largest = m > largest ? m : largest;
    }
    const Scale s = scale_from_amax(T::amax(largest));
    *scale = s.scale;
    #pragma omp parallel for simd schedule(static) num_threads(num_threads)
    for (int64_t i = 0; i < size; ++i) q[i] = round_to_int8(T::load(x[i]) * s.inverse);
}

// Uniform in [0, 1) from a key and an element's index: lptune/numerics/rounding.py.
inline uint32_t mix(uint32_t h) {
    h ^= h >> 16;
    h *= 0x7feb352du;
    h ^= h >> 15;
    h *= 0x846ca68bu;
    return h ^ (h >> 16);
}

inline float uniform(uint64_t key, uint32_t index_low, uint32_t index_high) {
    const uint32_t low = mix(uint32_t(key) ^ index_low);
    return float(int32_t(mix(low ^ uint32_t(key >> 32) ^ index_high) >> 8)) * 5.9604644775390625e-8f;  // 2**-24
}

// Rounds x * inverse up with the probability of its distance from below; one inverse per row, per column, or
// for all (column_inverse null and row_stride 0).
template <typename T>
void round_stochastically(const void* data, int64_t m, int64_t k, const float* row_inverse, int row_stride,
                          const float* column_inverse, uint64_t key, int64_t first, int8_t* q, int num_threads) {
    const auto* x = static_cast<const typename T::Storage*>(data);
    #pragma omp parallel num_threads(num_threads)
    {
        std::vector<float> repeated(column_inverse ? 0 : k);  // one inner loop for all cases, and a vectorized one
        #pragma omp for schedule(static)
        for (int64_t row = 0; row < m; ++row) {
            const auto* from = x + row * k;
            int8_t* to = q + row * k;
            const float* inverse = column_inverse;
            if (!column_inverse) {
                std::fill(repeated.begin(), repeated.end(), row_inverse[row * row_stride]);
                inverse = repeated.data();
            }
            // 64-bit indices in 32-bit arithmetic; a row is shorter than 2**32 and carries at most once.
            const uint64_t base = uint64_t(first) + uint64_t(row) * uint64_t(k);
            const uint32_t base_low = uint32_t(base), base_high = uint32_t(base >> 32);
            #pragma omp simd
            for (int32_t i = 0; i < int32_t(k); ++i) {
                const uint32_t low = base_low + uint32_t(i), high = base_high + (low < base_low ? 1u : 0u);
                const float scaled = T::load(from[i]) * inverse[i];
                const float below = __builtin_floorf(scaled);
                // Both sides of the comparison are exact.
                float rounded = below + (uniform(key, low, high) < scaled - below ? 1.0f : 0.0f);
                rounded = rounded > 127.0f ? 127.0f : rounded;
                rounded = rounded < -127.0f ? -127.0f : rounded;
                to[i] = round_to_int8(rounded);
            }
        }
    }
}

inline uint16_t to_bfloat16(float f) {
    const uint32_t bits = as_bits(f);
    // Ties to even. The NaN that arithmetic makes has few payload bits and stays one.
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace

extern "C" {

void lptune_quantize(const void* x, int is_bfloat16, int64_t m, int64_t k, const float* row_multiplier,
                     int8_t* q_rows, float* scale_rows, const float* column_multiplier, int8_t* q_columns,
                     float* scale_columns, int num_threads) {
    (is_bfloat16 ? quantize<BFloat16> : quantize<Float32>)(
        x, m, k, row_multiplier, q_rows, scale_rows, column_multiplier, q_columns, scale_columns, num_threads);
}

// element: 0 float32, 1 bfloat16, 2 float32 that is rounded to bfloat16.
void lptune_quantize_rows(const void* x, int element, int64_t m, int64_t k, const float* multiplier, int8_t* q,
                          int64_t q_stride, float* scale, int64_t scale_stride, int64_t scale_width,
                          int num_threads) {
    const auto run = element == 0   ? quantize_rows<Float32>
                     : element == 1 ? quantize_rows<BFloat16>
                                    : quantize_rows<RoundedToBFloat16>;
    run(x, m, k, multiplier, q, q_stride, scale, scale_stride, scale_width, num_threads);
}

void lptune_quantize_tensor(const void* x, int is_bfloat16, int64_t size, int8_t* q, float* scale,
                            int num_threads) {
    (is_bfloat16 ? quantize_tensor<BFloat16> : quantize_tensor<Float32>)(x, size, q, scale, num_threads);
}

void lptune_round_stochastically(const void* x, int is_bfloat16, int64_t m, int64_t k, const float* row_inverse,
                                 int row_stride, const float* column_inverse, uint64_t key, int64_t first,
                                 int8_t* q, int num_threads) {
    (is_bfloat16 ? round_stochastically<BFloat16> : round_stochastically<Float32>)(
        x, m, k, row_inverse, row_stride, column_inverse, key, first, q, num_threads);
}

// out = float(acc) * scale_a[row] * scale_b[column], in this order, rounded once to the output's type.
// stride_a, stride_b: 1 for a vector of scales, 0 for a single one.
void lptune_apply_scales(const int32_t* acc, int64_t m, int64_t n, const float* scale_a, int stride_a,
                         const float* scale_b, int stride_b, void* out, int is_bfloat16, int num_threads) {
    #pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < m; ++row) {
        const float by = scale_a[row * stride_a];
        const int32_t* from = acc + row * n;
        uint16_t* to16 = static_cast<uint16_t*>(out) + row * n;
        float* to32 = static_cast<float*>(out) + row * n;
        if (is_bfloat16 && stride_b) {
            #pragma omp simd
            for (int64_t i = 0; i < n; ++i) to16[i] = to_bfloat16((float(from[i]) * by) * scale_b[i]);
        } else if (is_bfloat16) {
            #pragma omp simd
            for (int64_t i = 0; i < n; ++i) to16[i] = to_bfloat16((float(from[i]) * by) * scale_b[0]);
        } else {
            for (int64_t i = 0; i < n; ++i) to32[i] = (float(from[i]) * by) * scale_b[i * stride_b];
        }
    }
}
}
