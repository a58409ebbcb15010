// Quantizers and the INT8 GEMM's epilogue for CPUs. The contract, bit for bit, is lptune/numerics/quantize.py.
//
// Why not leave this to torch: eagerly, a quantizer is six passes over memory that does not fit the cache, and
// costs as much as the GEMM it serves; compiled by Inductor it is two, but the column-wise one is not vectorized
// well. Here a row is read once from memory and a second time from the first-level cache, and the pass that
// quantizes rows collects the amax of the columns on its way.

#include <omp.h>

#include "elements.h"

namespace {

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

// One scale, from the amax `past` if it is not 0, otherwise from the amax of x itself, which takes a pass of
// its own. The amax of x is measured in either case; a scale is NaN if it is not finite.
template <typename T, typename F>
void quantize_tensor(const void* data, int64_t size, float past, bool power_of_two, int8_t* q, float* scale,
                     float* amax, int num_threads) {
    const auto* x = static_cast<const typename T::Storage*>(data);
    typename T::Magnitude largest = 0;
    if (!(past > 0.0f)) {
        #pragma omp parallel for simd schedule(static) num_threads(num_threads) reduction(max : largest)
        for (int64_t i = 0; i < size; ++i) {
            const auto m = T::magnitude(x[i]);
            largest = m > largest ? m : largest;
        }
        *amax = T::amax(largest);
        const Scale s = scale_from_amax(*amax, F::max, power_of_two);
        *scale = s.scale;
        #pragma omp parallel for simd schedule(static) num_threads(num_threads)
        for (int64_t i = 0; i < size; ++i) q[i] = F::nearest(T::load(x[i]) * s.inverse);
        return;
    }
    const Scale s = scale_from_amax(past, F::max, power_of_two);
    #pragma omp parallel for simd schedule(static) num_threads(num_threads) reduction(max : largest)
    for (int64_t i = 0; i < size; ++i) {
        const auto m = T::magnitude(x[i]);
        largest = m > largest ? m : largest;
        q[i] = F::nearest(T::load(x[i]) * s.inverse);
    }
    *amax = T::amax(largest);
    *scale = *amax < as_float(0x7f800000) ? s.scale : as_float(0x7fc00000);
}

// Rows of a larger matrix by the amaxes of its blocks of `block` rows and columns, `columns` blocks in a row; the
// first row here is row `first_row` there. An inf becomes NaN where the format has one: an amax of the past does
// not show it.
template <typename T, typename F>
void quantize_by_amax(const void* data, int64_t m, int64_t k, const float* amax, int64_t num_amaxes,
                      int64_t columns, int64_t block, int64_t first_row, bool power_of_two, int8_t* q,
                      float* scale, int num_threads) {
    const auto* x = static_cast<const typename T::Storage*>(data);
    std::vector<float> inverse(num_amaxes);
    for (int64_t i = 0; i < num_amaxes; ++i) {
        const Scale s = scale_from_amax(amax[i], F::max, power_of_two);
        scale[i] = s.scale;
        inverse[i] = s.inverse;
    }
    #pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < m; ++row) {
        const auto* from = x + row * k;
        int8_t* to = q + row * k;
        const float* by = inverse.data() + (first_row + row) / block * columns;
        for (int64_t start = 0; start < k; start += block, ++by) {
            const int64_t end = std::min(start + block, k);
            const float factor = *by;
            #pragma omp simd
            for (int64_t i = start; i < end; ++i) {
                const float v = T::load(from[i]);
                const bool is_inf = F::has_nan && (as_bits(v) & 0x7fffffff) == 0x7f800000;
                to[i] = F::nearest(is_inf ? as_float(0x7fc00000) : v * factor);
            }
        }
    }
}

// The amaxes of blocks of `block` rows and columns, row by row; `above` rows of the first ones lie above x.
template <typename T>
void block_amaxes(const void* data, int64_t m, int64_t k, int64_t block, int64_t above, float* amax,
                  int num_threads) {
    const auto* x = static_cast<const typename T::Storage*>(data);
    const int64_t rows = (above + m + block - 1) / block, columns = (k + block - 1) / block;
    #pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t i = 0; i < rows; ++i) {
        std::vector<typename T::Magnitude> largest(columns);
        for (int64_t row = std::max(i * block - above, int64_t(0)); row < std::min((i + 1) * block - above, m); ++row) {
            for (int64_t j = 0; j < columns; ++j) {
                const auto* from = x + row * k;
                const int64_t end = std::min((j + 1) * block, k);
                typename T::Magnitude found = largest[j];
                #pragma omp simd reduction(max : found)
                for (int64_t c = j * block; c < end; ++c) {
                    const auto v = T::magnitude(from[c]);
                    found = v > found ? v : found;
                }
                largest[j] = found;
            }
        }
        for (int64_t j = 0; j < columns; ++j) amax[i * columns + j] = T::amax(largest[j]);
    }
}

inline uint16_t to_bfloat16(float f) {
    const uint32_t bits = as_bits(f), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // ties to even
    // The carry would make a number of a NaN with many payload bits, which a scale may bring.
    return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

}  // namespace

extern "C" {

void lptune_quantize(const void* x, int64_t is_bfloat16, int64_t m, int64_t k, const float* row_multiplier,
                     int8_t* q_rows, float* scale_rows, const float* column_multiplier, int8_t* q_columns,
                     float* scale_columns, int64_t num_threads) {
    (is_bfloat16 ? quantize<BFloat16> : quantize<Float32>)(
        x, m, k, row_multiplier, q_rows, scale_rows, column_multiplier, q_columns, scale_columns, num_threads);
}

// element: 0 float32, 1 bfloat16, 2 float32 that is rounded to bfloat16.
void lptune_quantize_rows(const void* x, int64_t element, int64_t m, int64_t k, const float* multiplier, int8_t* q,
                          int64_t q_stride, float* scale, int64_t scale_stride, int64_t scale_width,
                          int64_t num_threads) {
    const auto run = element == 0   ? quantize_rows<Float32>
                     : element == 1 ? quantize_rows<BFloat16>
                                    : quantize_rows<RoundedToBFloat16>;
    run(x, m, k, multiplier, q, q_stride, scale, scale_stride, scale_width, num_threads);
}

// element: 0 float32, 1 bfloat16, 2 float32 that is rounded to bfloat16. format: 0 INT8, 1 e4m3, 2 e5m2. past: an
// amax, or null.
void lptune_quantize_tensor(const void* x, int64_t element, int64_t format, int64_t size, const float* past,
                            int64_t power_of_two, int8_t* q, float* scale, float* amax, int64_t num_threads) {
    constexpr decltype(&quantize_tensor<Float32, Int8>) run[2][3] = {
        {quantize_tensor<Float32, Int8>, quantize_tensor<Float32, E4M3>, quantize_tensor<Float32, E5M2>},
        {quantize_tensor<BFloat16, Int8>, quantize_tensor<BFloat16, E4M3>, quantize_tensor<BFloat16, E5M2>}};
    run[element][format](x, size, past ? *past : 0.0f, power_of_two, q, scale, amax, num_threads);
}

void lptune_quantize_by_amax(const void* x, int64_t element, int64_t format, int64_t m, int64_t k, const float* amax,
                             int64_t num_amaxes, int64_t columns, int64_t block, int64_t first_row,
                             int64_t power_of_two, int8_t* q, float* scale, int64_t num_threads) {
    constexpr decltype(&quantize_by_amax<Float32, Int8>) run[3][3] = {
        {quantize_by_amax<Float32, Int8>, quantize_by_amax<Float32, E4M3>, quantize_by_amax<Float32, E5M2>},
        {quantize_by_amax<BFloat16, Int8>, quantize_by_amax<BFloat16, E4M3>, quantize_by_amax<BFloat16, E5M2>},
        {quantize_by_amax<RoundedToBFloat16, Int8>, quantize_by_amax<RoundedToBFloat16, E4M3>,
         quantize_by_amax<RoundedToBFloat16, E5M2>}};
    run[element][format](x, m, k, amax, num_amaxes, columns, block, first_row, power_of_two, q, scale,
                         num_threads);
}

void lptune_block_amaxes(const void* x, int64_t is_bfloat16, int64_t m, int64_t k, int64_t block, int64_t above,
                         float* amax, int64_t num_threads) {
    (is_bfloat16 ? block_amaxes<BFloat16> : block_amaxes<Float32>)(x, m, k, block, above, amax, num_threads);
}

// out = float(acc) * scale_a[row] * scale_b[column], in this order, rounded once to the output's type.
// stride_a, stride_b: 1 for a vector of scales, 0 for a single one.
void lptune_apply_scales(const int32_t* acc, int64_t m, int64_t n, const float* scale_a, int64_t stride_a,
                         const float* scale_b, int64_t stride_b, void* out, int64_t is_bfloat16, int64_t num_threads) {
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
