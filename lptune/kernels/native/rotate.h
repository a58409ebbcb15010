// The rotation by Hadamard blocks. The contract, bit for bit, is lptune/numerics/rotation.py.

#pragma once

#include <cmath>
#include <cstdint>

namespace {

// Cuts `size` into runs of equal blocks, the largest first, and calls run(first element, block, number of blocks).
template <typename F>
void rotation_runs(int64_t size, const F& run) {
    int64_t start = 0;
    for (int64_t block = 128; start < size; block /= 2)
        if (const int64_t count = (size - start) / block) {
            run(start, block, count);
            start += count * block;
        }
}

template <int Half, int Block>
inline void butterflies(float* x) {
    for (int j = 0; j < Block; j += 2 * Half) {
        #pragma omp simd
        for (int i = j; i < j + Half; ++i) {
            const float a = x[i], b = x[i + Half];
            x[i] = a + b;
            x[i + Half] = a - b;
        }
    }
    if constexpr (2 * Half < Block) butterflies<2 * Half, Block>(x);
}

template <int Block>
inline void rotate_block(float* x) {
    if constexpr (Block > 1) butterflies<1, Block>(x);
    const float factor = float(1 / std::sqrt(double(Block)));
    #pragma omp simd
    for (int i = 0; i < Block; ++i) x[i] *= factor;
}

// A row of k elements, in place.
inline void rotate_row(float* x, int64_t k) {
    rotation_runs(k, [&](int64_t start, int64_t block, int64_t count) {
        for (float *each = x + start, *end = each + count * block; each < end; each += block) switch (block) {
            case 128: rotate_block<128>(each); break;
            case 64: rotate_block<64>(each); break;
            case 32: rotate_block<32>(each); break;
            case 16: rotate_block<16>(each); break;
            case 8: rotate_block<8>(each); break;
            case 4: rotate_block<4>(each); break;
            case 2: rotate_block<2>(each); break;
        }
    });
}

// The columns of a tile of `block` rows, in place; a row has `width` elements.
inline void rotate_tile(float* x, int64_t block, int64_t width) {
    for (int64_t half = 1; half < block; half *= 2)
        for (int64_t j = 0; j < block; j += 2 * half)
            for (int64_t i = j; i < j + half; ++i) {
                float *upper = x + i * width, *lower = x + (i + half) * width;
                #pragma omp simd
                for (int64_t c = 0; c < width; ++c) {
                    const float a = upper[c], b = lower[c];
                    upper[c] = a + b;
                    lower[c] = a - b;
                }
            }
    const float factor = float(1 / std::sqrt(double(block)));
    #pragma omp simd
    for (int64_t i = 0; i < block * width; ++i) x[i] *= factor;
}

}  // namespace
