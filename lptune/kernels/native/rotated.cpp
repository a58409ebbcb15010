// Quantizers that rotate first, and the rotation alone, for CPUs. The contract, bit for bit, is
// lptune/numerics/rotation.py and quantize.py.
//
// A row, or a tile of columns, is rotated in a float32 copy that stays in the first-level cache, so memory is
// read and written as often as without a rotation. Columns are rotated twice, for their amaxes and for their
// values: seven additions cost less than writing float32 and reading it again.

#include <omp.h>

#include "elements.h"
#include "rotate.h"

namespace {

constexpr int64_t WIDTH = 64;  // columns of a tile: 128 rows of it are 32 KiB

void quantize_row(const float* x, int64_t k, int8_t* q, float* scale) {
    uint32_t largest = 0;
    #pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < k; ++i) {
        const uint32_t m = Float32::magnitude(x[i]);
        largest = m > largest ? m : largest;
    }
    const Scale s = scale_from_amax(as_float(largest));
    #pragma omp simd
    for (int64_t i = 0; i < k; ++i) q[i] = round_to_int8(x[i] * s.inverse);
    *scale = s.scale;
}

// Strides and widths as in quantize.cpp.
template <typename T>
void quantize_rows(const void* data, int64_t m, int64_t k, int8_t* q, int64_t q_stride, float* scale,
                   int64_t scale_stride, int64_t scale_width, int num_threads) {
    const auto* x = static_cast<const typename T::Storage*>(data);
    #pragma omp parallel num_threads(num_threads)
    {
        std::vector<float> rotated(k);
        #pragma omp for schedule(static)
        for (int64_t row = 0; row < m; ++row) {
            #pragma omp simd
            for (int64_t i = 0; i < k; ++i) rotated[i] = T::load(x[row * k + i]);
            rotate_row(rotated.data(), k);
            float* header = scale + row * scale_stride;
            std::fill(header, header + scale_width, 0.0f);
            quantize_row(rotated.data(), k, q + row * q_stride, header);
        }
    }
}

// Calls use(first row, first column, rows, columns, values) for each rotated tile that this thread has; within a
// parallel region. The tiles of a thread are those of the same columns in each call, so `use` needs no lock.
template <typename T, typename F>
void for_each_tile(const typename T::Storage* x, int64_t m, int64_t k, const F& use) {
    std::vector<float> tile(128 * WIDTH);
    #pragma omp for schedule(static)
    for (int64_t column = 0; column < k; column += WIDTH) {
        const int64_t width = std::min(WIDTH, k - column);
        rotation_runs(m, [&](int64_t start, int64_t block, int64_t count) {
            for (int64_t row = start; row < start + count * block; row += block) {
                for (int64_t i = 0; i < block; ++i) {
                    #pragma omp simd
                    for (int64_t c = 0; c < width; ++c)
                        tile[i * width + c] = T::load(x[(row + i) * k + column + c]);
                }
                rotate_tile(tile.data(), block, width);
                use(row, column, block, width, tile.data());
            }
        });
    }
}

template <typename T>
void quantize_columns(const void* data, int64_t m, int64_t k, int8_t* q, float* scale, int num_threads) {
    const auto* x = static_cast<const typename T::Storage*>(data);
    std::vector<uint32_t> amax(k, 0);
    std::vector<float> inverse(k);
    #pragma omp parallel num_threads(num_threads)
    {
        for_each_tile<T>(x, m, k, [&](int64_t, int64_t column, int64_t rows, int64_t width, const float* tile) {
            uint32_t* to = amax.data() + column;
            for (int64_t i = 0; i < rows; ++i) {
                #pragma omp simd
                for (int64_t c = 0; c < width; ++c) {
                    const uint32_t v = Float32::magnitude(tile[i * width + c]);
                    to[c] = v > to[c] ? v : to[c];
                }
            }
        });
        #pragma omp for schedule(static)
        for (int64_t i = 0; i < k; ++i) {
            const Scale s = scale_from_amax(as_float(amax[i]));
            scale[i] = s.scale;
            inverse[i] = s.inverse;
        }
        for_each_tile<T>(x, m, k, [&](int64_t row, int64_t column, int64_t rows, int64_t width, const float* tile) {
            const float* by = inverse.data() + column;
            for (int64_t i = 0; i < rows; ++i) {
                int8_t* to = q + (row + i) * k + column;
                #pragma omp simd
                for (int64_t c = 0; c < width; ++c) to[c] = round_to_int8(tile[i * width + c] * by[c]);
            }
        });
    }
}

template <typename T>
void rotate_rows(const void* data, int64_t m, int64_t k, void* out, int to_bfloat16, int num_threads) {
    const auto* x = static_cast<const typename T::Storage*>(data);
    #pragma omp parallel num_threads(num_threads)
    {
        std::vector<float> rotated(k);
        #pragma omp for schedule(static)
        for (int64_t row = 0; row < m; ++row) {
            #pragma omp simd
            for (int64_t i = 0; i < k; ++i) rotated[i] = T::load(x[row * k + i]);
            rotate_row(rotated.data(), k);
            if (to_bfloat16) {
                uint16_t* to = static_cast<uint16_t*>(out) + row * k;
                #pragma omp simd
                for (int64_t i = 0; i < k; ++i) to[i] = as_bits(RoundedToBFloat16::load(rotated[i])) >> 16;
            } else {
                std::copy(rotated.begin(), rotated.end(), static_cast<float*>(out) + row * k);
            }
        }
    }
}

}  // namespace

extern "C" {

// element: as for lptune_quantize_rows.
void lptune_quantize_rotated_rows(const void* x, int element, int64_t m, int64_t k, int8_t* q, int64_t q_stride,
                                  float* scale, int64_t scale_stride, int64_t scale_width, int num_threads) {
    const auto run = element == 0   ? quantize_rows<Float32>
                     : element == 1 ? quantize_rows<BFloat16>
                                    : quantize_rows<RoundedToBFloat16>;
    run(x, m, k, q, q_stride, scale, scale_stride, scale_width, num_threads);
}

void lptune_quantize_rotated_columns(const void* x, int is_bfloat16, int64_t m, int64_t k, int8_t* q, float* scale,
                                     int num_threads) {
    (is_bfloat16 ? quantize_columns<BFloat16> : quantize_columns<Float32>)(x, m, k, q, scale, num_threads);
}

void lptune_rotate_rows(const void* x, int is_bfloat16, int64_t m, int64_t k, void* out, int to_bfloat16,
                        int num_threads) {
    (is_bfloat16 ? rotate_rows<BFloat16> : rotate_rows<Float32>)(x, m, k, out, to_bfloat16, num_threads);
}
}
