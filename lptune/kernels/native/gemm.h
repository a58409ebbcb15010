// The part of the INT8 GEMM that all instruction sets share: blocks, threads, and the epilogue.
//
// An Engine is one instruction set. It packs ROWS rows of a (or COLUMNS columns of b) into a panel, in the order in
// which it reads them, cut along the contraction into steps of DEPTH numbers, and multiplies two panels:
//
// - A thread packs a block of rows of a that its second-level cache holds, and multiplies it by one panel of b after
//   another. SLAB steps of the panel stay in the first-level cache while all rows pass by. The sums wait in the
//   second-level cache between slabs. Of a long contraction (the tokens in grad_weight) no block of enough rows would
//   fit, so it is cut into pieces of at most PIECE steps, and the sums wait in memory between pieces.
// - When the sums of a panel are complete, they are scaled, rounded and stored while they are in the cache. oneDNN
//   stores int32, four bytes each, and the scales need another pass over memory that no cache holds. A large output
//   is streamed to memory.
//
// Packing pads with zeros, which change no sum, so the engine knows no edges. int32 sums are exact in any order, up
// to 133,144 products of [-127, 127] (131,071 with -128), so the result has the bits of the reference.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include <immintrin.h>
#include <omp.h>

#include "elements.h"

namespace {

constexpr int64_t LINE = 64;                          // bytes of a line of the caches
constexpr int64_t FEW_ROWS = 2;                       // of a, as in decoding: packing b takes longer than they do
constexpr int64_t PACKED_B_BYTES = int64_t(1) << 24;  // of b at a time
constexpr int64_t STREAMED_BYTES = int64_t(1) << 21;  // an output above this is read from memory again anyway

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows of a, or columns of b.
struct Vectors {
    const int8_t* data;
    int64_t count, length;  // length: of the contraction
    int64_t stride;         // of the dimension that is not contiguous
    bool contiguous;        // each vector is; otherwise the numbers at one place of all vectors are

    // At most `most` numbers of each vector, from the one at `begin` on.
    Vectors from(int64_t begin, int64_t most) const {
        return {data + begin * (contiguous ? 1 : stride), count, std::min(most, length - begin), stride, contiguous};
    }
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

struct Free { void operator()(int8_t* data) const { std::free(data); } };
using Memory = std::unique_ptr<int8_t[], Free>;

// bytes: a multiple of LINE. Null if there is no memory.
inline int8_t* allocate(int64_t bytes) { return static_cast<int8_t*>(std::aligned_alloc(LINE, bytes)); }

// Kept from call to call: new pages would cost as much as packing.
struct Scratch {
    Memory data;
    int64_t size = 0;
    int8_t* get(int64_t bytes) {
        if (bytes > size) {
            data.reset();
            data.reset(allocate(bytes));
            size = data ? bytes : 0;
        }
        return data.get();
    }
};
thread_local Scratch scratch;

// out = (a @ b) * scale_a * scale_b. T: float, or uint16_t for bfloat16. Returns 0, or 1 if memory could not be
// allocated.
template <class Engine, typename T>
int multiply_all(const Vectors& rows, const Vectors& columns, Scales row_scales, Scales column_scales, Output out,
                 int num_threads) {
    constexpr int64_t SUM_BYTES = Engine::ROWS * Engine::COLUMNS * int64_t(sizeof(int32_t));
    static_assert(SUM_BYTES % LINE == 0);
    const bool whole_lines = Engine::COLUMNS * sizeof(T) % LINE == 0 && columns.count % Engine::COLUMNS == 0 &&
                             reinterpret_cast<uintptr_t>(out.data) % LINE == 0;
    out.streams = whole_lines && out.rows * out.columns * int64_t(sizeof(T)) > STREAMED_BYTES;

    const int64_t all_steps = divide_up(rows.length, Engine::DEPTH), pieces = divide_up(all_steps, Engine::PIECE);
    // Of a piece. Engines pack up to 8 steps at once.
    const int64_t steps = pieces > 1 ? divide_up(divide_up(all_steps, pieces), 8) * 8 : all_steps;
    const int64_t a_bytes = Engine::a_panel_bytes(steps), b_bytes = Engine::b_panel_bytes(steps);
    const int64_t a_panels = divide_up(rows.count, Engine::ROWS), b_panels = divide_up(columns.count, Engine::COLUMNS);
    const int64_t wide = std::clamp<int64_t>(PACKED_B_BYTES / b_bytes, 1, b_panels);  // panels of b at a time
    // With few panels in a block of a, b would have to stream in too fast. So a block has at least FEWEST_PANELS,
    // unless they take more than three times the usual bytes.
    const int64_t both_bytes = a_bytes + SUM_BYTES;
    const int64_t fewest = std::min(Engine::FEWEST_PANELS, 3 * Engine::BLOCK_BYTES / both_bytes);
    const int64_t tall = std::clamp<int64_t>(std::max(Engine::BLOCK_BYTES / both_bytes, fewest), 1, a_panels);

    // A thread's tasks are blocks of a; where these are too few to keep all threads busy, parts of b as well.
    const int64_t blocks = divide_up(a_panels, tall);
    const int64_t parts = std::min(divide_up(2 * num_threads, blocks), wide);

    const int64_t block_bytes = tall * a_bytes, thread_bytes = block_bytes + tall * SUM_BYTES;
    int8_t* const packed_b = scratch.get(wide * b_bytes + num_threads * thread_bytes);
    // Between pieces all sums are kept: those of panel i of a and panel p of b at i * wide + p.
    Memory kept(pieces > 1 ? allocate(a_panels * wide * SUM_BYTES) : nullptr);
    if (!packed_b || (pieces > 1 && !kept)) return 1;

    for (int64_t turn = 0; turn < divide_up(b_panels, wide) * pieces; ++turn) {
        const int64_t first = turn / pieces * wide, piece = turn % pieces;
        const int64_t width = std::min(wide, b_panels - first), begin = piece * steps * Engine::DEPTH;
        const int64_t depth = std::min(steps, all_steps - piece * steps);
        const Vectors a = rows.from(begin, depth * Engine::DEPTH), b = columns.from(begin, depth * Engine::DEPTH);
        #pragma omp parallel num_threads(num_threads)
        {
            #pragma omp for schedule(static)
            for (int64_t p = 0; p < width; p += Engine::B_TOGETHER)
                Engine::pack_b(b, first + p, std::min(Engine::B_TOGETHER, width - p), packed_b + p * b_bytes, b_bytes);

            int8_t* const packed_a = packed_b + wide * b_bytes + omp_get_thread_num() * thread_bytes;
            Engine::begin();
            #pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < blocks * parts; ++task) {
                const int64_t top = task / parts * tall, height = std::min(tall, a_panels - top), part = task % parts;
                for (int64_t i = 0; i < height; i += Engine::A_TOGETHER)
                    Engine::pack_a(a, top + i, std::min(Engine::A_TOGETHER, height - i), packed_a + i * a_bytes, a_bytes);
                for (int64_t p = part * width / parts; p < (part + 1) * width / parts; ++p) {
                    const auto sums = [&](int64_t i) {
                        int8_t* const data = kept ? kept.get() + ((top + i) * wide + p) * SUM_BYTES
                                                  : packed_a + block_bytes + i * SUM_BYTES;
                        return reinterpret_cast<int32_t*>(data);
                    };
                    for (int64_t step = 0; step < depth; step += Engine::SLAB) {
                        const int64_t slab_steps = std::min(Engine::SLAB, depth - step);
                        const int8_t* slab = packed_b + p * b_bytes + step * Engine::B_STEP_BYTES;
                        for (int64_t i = 0; i < height; ++i)
                            Engine::multiply(packed_a + i * a_bytes, step, slab, slab_steps, piece == 0, sums(i), i, height);
                    }
                    if (piece + 1 < pieces) continue;
                    for (int64_t i = 0; i < height; ++i)
                        finish<Engine, T>(sums(i), (top + i) * Engine::ROWS, (first + p) * Engine::COLUMNS, row_scales,
                                          column_scales, out);
                }
            }
            Engine::end();
            _mm_sfence();  // streamed stores come before the end of the region
        }
    }
    return 0;
}

// The same for a few rows, where all numbers lie along the contraction: each is read once, so packing would not pay.
template <typename T>
void multiply_few(const Vectors& rows, const Vectors& columns, Scales row_scales, Scales column_scales, Output out,
                  int num_threads) {
    T* const to = static_cast<T*>(out.data);
    #pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t j = 0; j < columns.count; ++j) {
        const int8_t* const b = columns.data + j * columns.stride;
        for (int64_t i = 0; i < rows.count; ++i) {
            const int8_t* const a = rows.data + i * rows.stride;
            int32_t sum = 0;
            #pragma omp simd reduction(+ : sum)
            for (int64_t k = 0; k < rows.length; ++k) sum += int32_t(a[k]) * int32_t(b[k]);
            const float scaled = float(sum) * row_scales.data[i * row_scales.stride];
            to[i * out.columns + j] = stored<T>(scaled * column_scales.data[j * column_scales.stride]);
        }
    }
}

}  // namespace
