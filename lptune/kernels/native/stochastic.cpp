// Stochastic rounding to INT8 and bfloat16 on CPUs. The contract, bit for bit, is lptune/numerics/rounding.py.
//
// The random bits of an element are a hash of a key and of its index: a few integer operations in registers. In
// torch each of them is a pass over int64 in memory.

#include "elements.h"

namespace {

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

// Rounds x * inverse up with the probability of its distance from below. base: index of the first element.
template <typename T>
void round_row(const typename T::Storage* from, const float* inverse, uint64_t key, uint64_t base, int8_t* to,
               int64_t k) {
    // 64-bit indices in 32-bit arithmetic; a row is shorter than 2**32 and carries at most once.
    const uint32_t base_low = uint32_t(base), base_high = uint32_t(base >> 32);
    #pragma omp simd
    for (int32_t i = 0; i < int32_t(k); ++i) {
        const uint32_t low = base_low + uint32_t(i), high = base_high + (low < base_low ? 1u : 0u);
        const float scaled = T::load(from[i]) * inverse[i];
        const float below = __builtin_floorf(scaled);
        // Both sides of the comparison are exact.
        const float rounded = below + (uniform(key, low, high) < scaled - below ? 1.0f : 0.0f);
        to[i] = round_to_int8(clamp(rounded, 127.0f));
    }
}

// One inverse per row, per column, or for all (column_inverse null and row_stride 0).
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
            round_row<T>(from, inverse, key, uint64_t(first) + uint64_t(row) * uint64_t(k), to, k);
        }
    }
}

// Rows of x * multiplier (a vector over columns, or null), each with its own scale, rounded stochastically.
template <typename T>
void quantize_rows_stochastic(const void* data, int64_t m, int64_t k, const float* multiplier, uint64_t key,
                              int64_t first, int8_t* q, float* scale, int num_threads) {
    const auto* x = static_cast<const typename T::Storage*>(data);
    #pragma omp parallel num_threads(num_threads)
    {
        std::vector<float> folded(k), inverse(k);
        #pragma omp for schedule(static)
        for (int64_t row = 0; row < m; ++row) {
            const auto* from = x + row * k;
            float* to = folded.data();
            uint32_t largest = 0;
            #pragma omp simd reduction(max : largest)
            for (int64_t i = 0; i < k; ++i) {
                to[i] = multiplier ? T::load(from[i]) * multiplier[i] : T::load(from[i]);
                const uint32_t v = as_bits(to[i]) & 0x7fffffff;
                largest = v > largest ? v : largest;
            }
            const Scale s = scale_from_amax(as_float(largest));
            scale[row] = s.scale;
            std::fill(inverse.begin(), inverse.end(), s.inverse);
            round_row<Float32>(to, inverse.data(), key, uint64_t(first) + uint64_t(row) * uint64_t(k),
                               q + row * k, k);
        }
    }
}

// The upper half of the bits is the neighbour towards zero, the lower one the distance from it, in steps.
void row_to_bfloat16(const float* from, uint64_t key, uint64_t base, uint16_t* to, int64_t k) {
    const uint32_t base_low = uint32_t(base), base_high = uint32_t(base >> 32);
    #pragma omp simd
    for (int32_t i = 0; i < int32_t(k); ++i) {
        const uint32_t low = base_low + uint32_t(i), high = base_high + (low < base_low ? 1u : 0u);
        const uint32_t bits = as_bits(from[i]);
        const float distance = float(int32_t(bits & 0xffff)) * 1.52587890625e-5f;  // 2**-16
        const uint32_t up = uniform(key, low, high) < distance ? 0x10000u : 0u;
        const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
        to[i] = uint16_t((is_nan ? bits | 0x400000u : bits + up) >> 16);
    }
}

}  // namespace

extern "C" {

void lptune_round_to_bfloat16(const float* x, int64_t m, int64_t k, int64_t key, int64_t first, uint16_t* out,
                              int64_t num_threads) {
    #pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < m; ++row) {
        row_to_bfloat16(x + row * k, uint64_t(key), uint64_t(first) + uint64_t(row) * uint64_t(k), out + row * k, k);
    }
}

// Where found_inf (or null) is 1, the results are q_before and scale_before.
void lptune_quantize_rows_stochastic(const void* x, int64_t is_bfloat16, int64_t m, int64_t k, const float* multiplier,
                                     int64_t key, int64_t first, const float* found_inf, const int8_t* q_before,
                                     const float* scale_before, int8_t* q, float* scale, int64_t num_threads) {
    if (found_inf && *found_inf == 1.0f) {
        std::copy(q_before, q_before + m * k, q);
        std::copy(scale_before, scale_before + m, scale);
        return;
    }
    (is_bfloat16 ? quantize_rows_stochastic<BFloat16> : quantize_rows_stochastic<Float32>)(
        x, m, k, multiplier, key, first, q, scale, num_threads);
}

void lptune_round_stochastically(const void* x, int64_t is_bfloat16, int64_t m, int64_t k, const float* row_inverse,
                                 int64_t row_stride, const float* column_inverse, int64_t key, int64_t first,
                                 int8_t* q, int64_t num_threads) {
    (is_bfloat16 ? round_stochastically<BFloat16> : round_stochastically<Float32>)(
        x, m, k, row_inverse, row_stride, column_inverse, key, first, q, num_threads);
}
}
