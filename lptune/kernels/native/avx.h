// Engines of the INT8 GEMM for AVX512-VNNI, AVX-VNNI and AVX2: vectors of 32-bit words of sums.
//
// A word of an operand holds GROUP numbers that are neighbours along the contraction. One step adds, for each of six
// rows of a and each column of b, the product of two such words to a sum:
//
// - VNNI: 4 numbers of 8 bits. `vpdpbusd` wants one operand without a sign, so b is packed as b + 128, and the sums
//   begin at -128 times the sum of the row of a. (Sums may wrap on their way; the last one is right.)
// - AVX2: 2 numbers, widened to 16 bits when they are packed. `vpmaddwd` sums two products in 32 bits, exactly. It is
//   one instruction more than a float32 FMA, for twice as many products. `vpmaddubsw` would have twice as many
//   again, but its 16-bit sums need a sign moved from a to b and a second multiplication: no gain.
//
// The sums stay in registers: 12 of 16 (AVX512: 24 of 32), beside the words of b and one of a. From intrinsics, gcc 12
// computes all products of a step first and spills the sums, at less than half the speed. So a product and its addition
// are one piece of assembly.

#pragma once

#include "gemm.h"

#ifdef __AVX2__

namespace {

struct Avx {
#ifdef __AVX512VNNI__
    using Sums = __m512i;
#else
    using Sums = __m256i;
#endif
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    static constexpr int64_t GROUP = 4;
#else
    static constexpr int64_t GROUP = 2;
#endif
    static constexpr int64_t WORD = 4;                            // bytes
    static constexpr int64_t WORDS = sizeof(Sums) / WORD;         // of a register
    static constexpr int64_t REGISTERS = WORDS == 16 ? 4 : 2;     // of columns
    static constexpr int64_t ROWS = 6, COLUMNS = WORDS * REGISTERS, DEPTH = GROUP;
    static constexpr int64_t A_STEP_BYTES = ROWS * WORD, B_STEP_BYTES = COLUMNS * WORD;
    static constexpr int64_t SLAB = (int64_t(1) << 14) / B_STEP_BYTES;
    static constexpr int64_t BLOCK_BYTES = int64_t(6) << 16, FEWEST_PANELS = 16;
    static constexpr int64_t PIECE = (int64_t(1) << 13) / WORD;  // 8 KiB of each vector
    // Panels that are packed together: if vectors are not contiguous, they share lines of the cache.
    static constexpr int64_t A_TOGETHER = 16, B_TOGETHER = LINE / COLUMNS;

    // A panel of a begins with the number at which the sums of each row begin (pieces of a contraction add theirs).
    static constexpr int64_t HEADER = LINE;
    static_assert(HEADER >= 8 * int64_t(sizeof(int32_t)));

    // Packing stores eight words at a time, so the last step of a panel of six rows ends with two words of slack.
    static int64_t a_panel_bytes(int64_t steps) {
        return HEADER + divide_up((steps + 8) * A_STEP_BYTES, LINE) * LINE;
    }
    static int64_t b_panel_bytes(int64_t steps) { return divide_up(steps, 8) * 8 * B_STEP_BYTES; }

    static void begin() {}
    static void end() {}

    static void pack_a(const Vectors& x, int64_t panel, int64_t num_panels, int8_t* to, int64_t panel_bytes);
    static void pack_b(const Vectors& x, int64_t panel, int64_t num_panels, int8_t* to, int64_t panel_bytes);
    static void multiply(const int8_t* a, int64_t step, const int8_t* b, int64_t depth, bool first_piece, int32_t* sums,
                         int64_t, int64_t);
};

// `count` bytes at `from`, then zeros.
template <typename T>
inline T load_bytes(const int8_t* from, int64_t count) {
    T loaded{};
    if (count >= int64_t(sizeof(T))) std::memcpy(&loaded, from, sizeof(T));
    else if (count > 0) std::memcpy(&loaded, from, count);
    return loaded;
}

// Words [k, k + 8 * GROUP) along the contraction of the eight vectors from `first` on: row i holds the i-th word of
// each. Zeros take the place of numbers that are not there.
struct Words { __m256i row[8]; };

inline Words load_words(const Vectors& x, int64_t first, int64_t k) {
    constexpr bool WIDE = Avx::GROUP == 2;
    Words w;
    const int64_t count = x.count - first, length = x.length - k;
    if (!x.contiguous) {
        for (int64_t i = 0; i < 8; ++i) {
            __m128i place[4];
            for (int64_t j = 0; j < Avx::GROUP; ++j) {
                const int64_t at = Avx::GROUP * i + j;
                place[j] = _mm_cvtsi64_si128(
                    at < length ? load_bytes<int64_t>(x.data + (k + at) * x.stride + first, count) : 0);
            }
            const __m128i a = _mm_unpacklo_epi8(place[0], place[1]);
            if (WIDE) {
                w.row[i] = _mm256_cvtepi8_epi16(a);
            } else {
                const __m128i b = _mm_unpacklo_epi8(place[2], place[3]);
                w.row[i] = _mm256_set_m128i(_mm_unpackhi_epi16(a, b), _mm_unpacklo_epi16(a, b));
            }
        }
        return w;
    }
    Words v;
    for (int64_t i = 0; i < 8; ++i) {
        const int8_t* from = x.data + (first + i) * x.stride + k;
        if (WIDE) v.row[i] = _mm256_cvtepi8_epi16(load_bytes<__m128i>(from, i < count ? length : 0));
        else v.row[i] = load_bytes<__m256i>(from, i < count ? length : 0);
    }
    // Transposes 8 x 8 words.
    for (int i = 0; i < 8; i += 4) {
        const __m256i a = _mm256_unpacklo_epi32(v.row[i], v.row[i + 1]);
        const __m256i b = _mm256_unpackhi_epi32(v.row[i], v.row[i + 1]);
        const __m256i c = _mm256_unpacklo_epi32(v.row[i + 2], v.row[i + 3]);
        const __m256i d = _mm256_unpackhi_epi32(v.row[i + 2], v.row[i + 3]);
        w.row[i] = _mm256_unpacklo_epi64(a, c);
        w.row[i + 1] = _mm256_unpackhi_epi64(a, c);
        w.row[i + 2] = _mm256_unpacklo_epi64(b, d);
        w.row[i + 3] = _mm256_unpackhi_epi64(b, d);
    }
    for (int i = 0; i < 4; ++i) {
        v.row[i] = _mm256_permute2x128_si256(w.row[i], w.row[i + 4], 0x20);
        v.row[i + 4] = _mm256_permute2x128_si256(w.row[i], w.row[i + 4], 0x31);
    }
    return v;
}

void Avx::pack_a(const Vectors& x, int64_t panel, int64_t num_panels, int8_t* to, int64_t panel_bytes) {
    for (int64_t p = 0; p < num_panels; ++p) std::memset(to + p * panel_bytes, 0, HEADER);
    for (int64_t k = 0; k < x.length; k += 8 * GROUP) {
        for (int64_t p = 0; p < num_panels; ++p) {
            int8_t* const header = to + p * panel_bytes;
            int8_t* place = header + HEADER + k / GROUP * A_STEP_BYTES;
            const Words w = load_words(x, (panel + p) * ROWS, k);
            for (int64_t i = 0; i < 8; ++i, place += A_STEP_BYTES)
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(place), w.row[i]);
            if (GROUP == 2) continue;
            __m256i* const starts = reinterpret_cast<__m256i*>(header);
            __m256i total = _mm256_setzero_si256();
            for (int64_t i = 0; i < 8; ++i) {
                const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), w.row[i]);
                total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(-128)));
            }
            _mm256_store_si256(starts, _mm256_add_epi32(_mm256_load_si256(starts), total));
        }
    }
}

void Avx::pack_b(const Vectors& x, int64_t panel, int64_t num_panels, int8_t* to, int64_t panel_bytes) {
    const __m256i offset = _mm256_set1_epi8(GROUP == 2 ? 0 : -128);
    for (int64_t k = 0; k < x.length; k += 8 * GROUP) {
        for (int64_t j = 0; j < num_panels * COLUMNS; j += 8) {
            const Words w = load_words(x, panel * COLUMNS + j, k);
            int8_t* place = to + j / COLUMNS * panel_bytes + k / GROUP * B_STEP_BYTES + j % COLUMNS * WORD;
            for (int64_t i = 0; i < 8; ++i, place += B_STEP_BYTES)
                _mm256_store_si256(reinterpret_cast<__m256i*>(place), _mm256_xor_si256(w.row[i], offset));
        }
    }
}

inline Avx::Sums everywhere(int32_t word) {
#ifdef __AVX512VNNI__
    return _mm512_set1_epi32(word);
#else
    return _mm256_set1_epi32(word);
#endif
}

inline Avx::Sums plus(Avx::Sums a, Avx::Sums b) {
#ifdef __AVX512VNNI__
    return _mm512_add_epi32(a, b);
#else
    return _mm256_add_epi32(a, b);
#endif
}

// sum + the products of the words of b and a.
inline Avx::Sums plus_products(Avx::Sums sum, Avx::Sums b, Avx::Sums a) {
#if defined(__AVX512VNNI__)
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(b), "v"(a));
#elif defined(__AVXVNNI__)
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(b), "x"(a));
#else
    __m256i products;
    __asm__("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(b), "x"(a));
#endif
    return sum;
}

// A function of its own: inside the loops of gemm.h other values would compete for the registers.
__attribute__((noinline)) void Avx::multiply(const int8_t* a, int64_t step, const int8_t* b, int64_t depth,
                                             bool first_piece, int32_t* sums, int64_t, int64_t) {
    const int32_t* starts = reinterpret_cast<const int32_t*>(a);
    const Sums* b_words = reinterpret_cast<const Sums*>(b);
    Sums* const kept = reinterpret_cast<Sums*>(sums);
    Sums sum[ROWS][REGISTERS];
    #pragma GCC unroll 6
    for (int64_t i = 0; i < ROWS; ++i) {
        #pragma GCC unroll 4
        for (int64_t j = 0; j < REGISTERS; ++j) {
            const Sums start = everywhere(step ? 0 : starts[i]);
            sum[i][j] = step || !first_piece ? plus(kept[i * REGISTERS + j], start) : start;
        }
    }
    a += HEADER + step * A_STEP_BYTES;
    for (int64_t k = 0; k < depth; ++k, a += A_STEP_BYTES, b_words += REGISTERS) {
        Sums columns[REGISTERS];
        #pragma GCC unroll 4
        for (int64_t j = 0; j < REGISTERS; ++j) columns[j] = b_words[j];
        #pragma GCC unroll 6
        for (int64_t i = 0; i < ROWS; ++i) {
            int32_t word;
            std::memcpy(&word, a + i * WORD, WORD);
            const Sums row = everywhere(word);
            #pragma GCC unroll 4
            for (int64_t j = 0; j < REGISTERS; ++j) sum[i][j] = plus_products(sum[i][j], columns[j], row);
        }
    }
    #pragma GCC unroll 6
    for (int64_t i = 0; i < ROWS; ++i) {
        #pragma GCC unroll 4
        for (int64_t j = 0; j < REGISTERS; ++j) kept[i * REGISTERS + j] = sum[i][j];
    }
}

}  // namespace

#endif
