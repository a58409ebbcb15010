// Quantizers that rotate first, and the rotation alone, for CPUs. The contract, bit for bit, is
// lptune/numerics/rotation.py and quantize.py.
//
// A row is rotated in a float32 copy that stays in the cache, so memory is read and written no more often than without
// a rotation.

#include <omp.h>

#include "elements.h"
#include "rotate.h"

namespace {

// Calls each(row, its rotated values) for all rows of x.
template <typename T, typename F>
void for_rotated_rows(const void* data, int64_t m, int64_t k, int num_threads, const F& each) {
    const auto* x = static_cast<const typename T::Storage*>(data);
    #pragma omp parallel num_threads(num_threads)
    {
        std::vector<float> rotated(k);
        #pragma omp for schedule(static)
        for (int64_t row = 0; row < m; ++row) {
            #pragma omp simd
            for (int64_t i = 0; i < k; ++i) rotated[i] = T::load(x[row * k + i]);
            rotate_row(rotated.data(), k);
            each(row, rotated.data());
        }
    }
}

// Strides and widths as in quantize.cpp.
template <typename T>
void quantize_rows(const void* data, int64_t m, int64_t k, int8_t* q, int64_t q_stride, float* scale,
                   int64_t scale_stride, int64_t scale_width, int num_threads) {
    for_rotated_rows<T>(data, m, k, num_threads, [=](int64_t row, const float* rotated) {
        float* header = scale + row * scale_stride;
        std::fill(header, header + scale_width, 0.0f);
        quantize_row<Float32>(rotated, nullptr, k, q + row * q_stride, header);
    });
}

template <typename T>
void rotate_rows(const void* data, int64_t m, int64_t k, void* out, int to_bfloat16, int num_threads) {
    for_rotated_rows<T>(data, m, k, num_threads, [=](int64_t row, const float* rotated) {
        if (to_bfloat16) {
            uint16_t* to = static_cast<uint16_t*>(out) + row * k;
            #pragma omp simd
            for (int64_t i = 0; i < k; ++i) to[i] = as_bits(RoundedToBFloat16::load(rotated[i])) >> 16;
        } else {
            std::copy(rotated, rotated + k, static_cast<float*>(out) + row * k);
        }
    });
}

}  // namespace

extern "C" {

// element: as for lptune_quantize_rows.
void lptune_quantize_rotated_rows(const void* x, int64_t element, int64_t m, int64_t k, int8_t* q, int64_t q_stride,
                                  float* scale, int64_t scale_stride, int64_t scale_width, int64_t num_threads) {
    const auto run = element == 0   ? quantize_rows<Float32>
                     : element == 1 ? quantize_rows<BFloat16>
                                    : quantize_rows<RoundedToBFloat16>;
    run(x, m, k, q, q_stride, scale, scale_stride, scale_width, num_threads);
}

void lptune_rotate_rows(const void* x, int64_t is_bfloat16, int64_t m, int64_t k, void* out, int64_t to_bfloat16,
                        int64_t num_threads) {
    (is_bfloat16 ? rotate_rows<BFloat16> : rotate_rows<Float32>)(x, m, k, out, to_bfloat16, num_threads);
}
}
