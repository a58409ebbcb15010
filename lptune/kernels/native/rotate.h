// The rotation by Hadamard blocks. The contract, bit for bit, is lptune/numerics/rotation.py.

#pragma once

#include <cmath>
#include <cstdint>

namespace {

// As many floats as a register has. Vector extensions of GCC and Clang, since neither makes shuffles of loops
// over neighbours: 0.17 ns per element of a row where plain loops take 0.35.
#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Indices __attribute__((vector_size(4 * LANES)));

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

inline float rotation_factor(int64_t block) { return float(1 / std::sqrt(double(block))); }

// (a + b, a - b) of the lanes a and b that are Half apart.
template <int Half>
inline void within(Lanes& x) {
    Indices other;
    Lanes sign;
    for (int i = 0; i < LANES; ++i) {
        other[i] = i ^ Half;
        sign[i] = i & Half ? -1.0f : 1.0f;
    }
#ifdef __clang__
    Lanes swapped;
    for (int i = 0; i < LANES; ++i) swapped[i] = x[other[i]];
#else
    const Lanes swapped = __builtin_shuffle(x, other);
#endif
    x = swapped + sign * x;
}

template <int Half, int Count>
inline void between(Lanes* x) {
    for (int j = 0; j < Count; j += 2 * Half)
        for (int i = j; i < j + Half; ++i) {
            const Lanes a = x[i], b = x[i + Half];
            x[i] = a + b;
            x[i + Half] = a - b;
        }
    if constexpr (2 * Half < Count) between<2 * Half, Count>(x);
}

inline void rotate_128(float* x) {
    constexpr int COUNT = 128 / LANES;
    Lanes v[COUNT];
    for (int j = 0; j < COUNT; ++j) {
        v[j] = reinterpret_cast<Lanes*>(x)[j];
        within<1>(v[j]);
        within<2>(v[j]);
        within<4>(v[j]);
        if constexpr (LANES > 8) within<8>(v[j]);
    }
    between<1, COUNT>(v);
    for (int j = 0; j < COUNT; ++j) reinterpret_cast<Lanes*>(x)[j] = v[j] * rotation_factor(128);
}

// A row of k elements, in place.
inline void rotate_row(float* x, int64_t k) {
    rotation_runs(k, [&](int64_t start, int64_t block, int64_t count) {
        for (float *each = x + start, *end = each + count * block; each < end; each += block) {
            if (block == 128) {
                rotate_128(each);
                continue;
            }
            for (int64_t half = 1; half < block; half *= 2)
                for (int64_t i = 0; i < block; ++i)
                    if (!(i & half)) {
                        const float a = each[i], b = each[i + half];
                        each[i] = a + b;
                        each[i + half] = a - b;
                    }
            for (int64_t i = 0; i < block; ++i) each[i] *= rotation_factor(block);
        }
    });
}

}  // namespace
