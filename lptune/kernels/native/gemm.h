// The part of the INT8 GEMM that all instruction sets share: blocks, threads, and the epilogue.
//
// An Engine is one instruction set. It packs ROWS rows of a (or COLUMNS columns of b) into a panel, in the order in
// which it reads them, cut along the contraction into steps of DEPTH numbers, and multiplies two panels:
//
// - A thread packs a block of rows of a that its second-level cache holds, and multiplies it by one panel of b after
//   another. SLAB steps of the panel stay in the first-level cache while all rows pass by. The sums wait in the
//   second-level cache between slabs.
// - When the sums of a panel are complete, they are scaled, rounded and stored while they are in the cache. oneDNN
//   stores int32, four bytes each, and the scales need another pass over memory that no cache holds. A large output
//   is streamed to memory.
//
// Packing pads with zeros, which change no sum, so the engine knows no edges. int32 sums are exact in any order (up
// to 133,144 products), so the result has the bits of the reference.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include <immintrin.h>
#include <omp.h>

#include "elements.h"

namespace {

constexpr int64_t LINE = 64;                          // bytes of a line of the caches
constexpr int64_t PACKED_B_BYTES = int64_t(1) << 24;  // of b at a time
constexpr int64_t STREAMED_BYTES = int64_t(1) << 21;  // an output above this is read from memory again anyway

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows of a, or columns of b.
struct Vectors {
    const int8_t* data;
    int64_t count, length;  // length: of the contraction
    int64_t stride;         // of the dimension that is not contiguous
    bool contiguous;        // each vector is; otherwise the numbers at one place of all vectors are
};

// stride: 1 for a vector of scales, 0 for a single one.
struct Scales { const float* data; int64_t stride; };

struct Output {
    void* data;
    int64_t rows, columns;
    bool streams;  // past the caches: whole lines need not be read before they are written
};

// The number that is stored: float32 as it is; bfloat16 with ties to even. The carry would make a number of a NaN with
// many payload bits, which a scale may bring.
template <typename T>
inline T stored(float x) {
    if constexpr (sizeof(T) == sizeof(float)) return x;
    const uint32_t bits = as_bits(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return T((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// float(sums) * scale_a * scale_b, in this order, of a panel of a and a panel of b, rounded once to the output's type.
template <class Engine, typename T>
void finish(const int32_t* sums, int64_t row, int64_t column, Scales a, Scales b, const Output& out) {
    constexpr int64_t WIDTH = Engine::COLUMNS;
    const int64_t rows = std::min(Engine::ROWS, out.rows - row), columns = std::min(WIDTH, out.columns - column);
    float by_column[WIDTH];
    for (int64_t j = 0; j < WIDTH; ++j) by_column[j] = j < columns ? b.data[(column + j) * b.stride] : 0.0f;
    for (int64_t i = 0; i < rows; ++i, sums += WIDTH) {
        const float by_row = a.data[(row + i) * a.stride];
        alignas(LINE) T line[WIDTH];
        #pragma omp simd
        for (int64_t j = 0; j < WIDTH; ++j) line[j] = stored<T>(float(sums[j]) * by_row * by_column[j]);
        T* const to = static_cast<T*>(out.data) + (row + i) * out.columns + column;
        if (out.streams) {
            for (int64_t k = 0; k < int64_t(sizeof line) / 32; ++k)
                _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + k, reinterpret_cast<const __m256i*>(line)[k]);
        } else if (columns == WIDTH) {
            std::memcpy(to, line, sizeof line);  // a size that the compiler knows
        } else {
            std::memcpy(to, line, columns * sizeof(T));
        }
    }
}

// Kept from call to call: new pages would cost as much as packing.
struct Scratch {
    int8_t* data = nullptr;
    int64_t size = 0;
    ~Scratch() { std::free(data); }
    int8_t* get(int64_t bytes) {
        if (bytes > size) {
            std::free(data);
            data = static_cast<int8_t*>(std::aligned_alloc(LINE, bytes));
            size = data ? bytes : 0;
        }
        return data;
    }
};
thread_local Scratch scratch;

// out = (a @ b) * scale_a * scale_b. T: float, or uint16_t for bfloat16. Returns 0, or 1 if memory could not be
// allocated.
template <class Engine, typename T>
int multiply_all(const Vectors& rows, const Vectors& columns, Scales row_scales, Scales column_scales, Output out,
                 int num_threads) {
    constexpr int64_t SUMS = Engine::ROWS * Engine::COLUMNS;
    const bool whole_lines = Engine::COLUMNS * sizeof(T) % LINE == 0 && columns.count % Engine::COLUMNS == 0 &&
                             reinterpret_cast<uintptr_t>(out.data) % LINE == 0;
    out.streams = whole_lines && out.rows * out.columns * int64_t(sizeof(T)) > STREAMED_BYTES;

    const int64_t steps = divide_up(rows.length, Engine::DEPTH);
    const int64_t a_bytes = Engine::a_panel_bytes(steps), b_bytes = Engine::b_panel_bytes(steps);
    const int64_t a_panels = divide_up(rows.count, Engine::ROWS), b_panels = divide_up(columns.count, Engine::COLUMNS);
    const int64_t wide = std::clamp<int64_t>(PACKED_B_BYTES / b_bytes, 1, b_panels);  // panels of b at a time
    // Long contractions: with fewer panels in a block of a, b would have to stream in too fast. So a block has at
    // least FEWEST_PANELS, unless they take more than three times the usual bytes.
    const int64_t fewest = std::min(Engine::FEWEST_PANELS, 3 * Engine::BLOCK_BYTES / a_bytes);
    const int64_t tall = std::clamp<int64_t>(std::max(Engine::BLOCK_BYTES / a_bytes, fewest), 1, a_panels);

    // A thread's tasks are blocks of a; where these are too few to keep all threads busy, parts of b as well.
    const int64_t blocks = divide_up(a_panels, tall);
    const int64_t parts = std::min(divide_up(2 * num_threads, blocks), wide);

    const int64_t block_bytes = tall * a_bytes;
    const int64_t thread_bytes = divide_up(block_bytes + tall * SUMS * int64_t(sizeof(int32_t)), LINE) * LINE;
    int8_t* const packed_b = scratch.get(wide * b_bytes + num_threads * thread_bytes);
    if (!packed_b) return 1;

    for (int64_t first = 0; first < b_panels; first += wide) {
        const int64_t width = std::min(wide, b_panels - first);
        #pragma omp parallel num_threads(num_threads)
        {
            constexpr int64_t SIDE = Engine::PANELS_SIDE_BY_SIDE;
            #pragma omp for schedule(static)
            for (int64_t p = 0; p < width; p += SIDE)
                Engine::pack_b(columns, first + p, std::min(SIDE, width - p), packed_b + p * b_bytes, b_bytes);

            int8_t* const packed_a = packed_b + wide * b_bytes + omp_get_thread_num() * thread_bytes;
            int32_t* const sums = reinterpret_cast<int32_t*>(packed_a + block_bytes);
            Engine::begin();
            #pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < blocks * parts; ++task) {
                const int64_t top = task / parts * tall, height = std::min(tall, a_panels - top), part = task % parts;
                for (int64_t i = 0; i < height; i += SIDE)
                    Engine::pack_a(rows, top + i, std::min(SIDE, height - i), packed_a + i * a_bytes, a_bytes);
                for (int64_t p = part * width / parts; p < (part + 1) * width / parts; ++p) {
                    for (int64_t step = 0; step < steps; step += Engine::SLAB) {
                        const int64_t depth = std::min(Engine::SLAB, steps - step);
                        const int8_t* slab = packed_b + p * b_bytes + step * Engine::B_STEP_BYTES;
                        for (int64_t i = 0; i < height; ++i)
                            Engine::multiply(packed_a + i * a_bytes, step, slab, depth, sums + i * SUMS, i, height);
                    }
                    for (int64_t i = 0; i < height; ++i)
                        finish<Engine, T>(sums + i * SUMS, (top + i) * Engine::ROWS, (first + p) * Engine::COLUMNS,
                                          row_scales, column_scales, out);
                }
            }
            Engine::end();
            _mm_sfence();  // streamed stores come before the end of the region
        }
    }
    return 0;
}

}  // namespace
