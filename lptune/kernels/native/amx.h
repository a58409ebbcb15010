// The engine of the INT8 GEMM for AMX.
//
// AMX has eight tile registers of 16 rows of 64 bytes, and an instruction that adds the product of two tiles of
// int8 to a tile of 16 x 16 int32: 16,384 products in 16 cycles, twice as many as of bfloat16. A panel is two tiles of
// 16 vectors. A tile of a has 16 vectors of 64 consecutive numbers. A tile of b has 16 rows of 4 consecutive numbers of
// each of 16 vectors: the transpose of such a tile, in words of 4 bytes. While a slab of b is used, the next one is
// fetched from further away.

#pragma once

#include "gemm.h"

#if defined(__AMX_INT8__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__linux__)

#define LPTUNE_HAS_AMX

#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int64_t TILE = 16;                // rows of a tile, and words in a row
constexpr int64_t STEP = 64;                // int8 numbers in a row of a tile
constexpr int64_t TILE_BYTES = TILE * STEP;
constexpr int64_t PANEL = 2 * TILE;         // vectors of a panel
constexpr int64_t STEP_BYTES = 2 * TILE_BYTES;

struct Tile { __m512i row[TILE]; };

// Transposes 16 x 16 words.
inline void transpose(Tile& t) {
    Tile u;
    for (int i = 0; i < 16; i += 4) {
        const __m512i a = _mm512_unpacklo_epi32(t.row[i], t.row[i + 1]);
        const __m512i b = _mm512_unpackhi_epi32(t.row[i], t.row[i + 1]);
        const __m512i c = _mm512_unpacklo_epi32(t.row[i + 2], t.row[i + 3]);
        const __m512i d = _mm512_unpackhi_epi32(t.row[i + 2], t.row[i + 3]);
        u.row[i] = _mm512_unpacklo_epi64(a, c);
        u.row[i + 1] = _mm512_unpackhi_epi64(a, c);
        u.row[i + 2] = _mm512_unpacklo_epi64(b, d);
        u.row[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    for (int i = 0; i < 4; ++i) {
        const __m512i a = _mm512_shuffle_i32x4(u.row[i], u.row[i + 4], 0x88);
        const __m512i b = _mm512_shuffle_i32x4(u.row[i], u.row[i + 4], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(u.row[i + 8], u.row[i + 12], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(u.row[i + 8], u.row[i + 12], 0xdd);
        t.row[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        t.row[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
        t.row[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
        t.row[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}

// 16 vectors of 64 numbers; zeros after the first `count` vectors and `length` numbers.
inline Tile load_vectors(const int8_t* from, int64_t stride, int64_t count, int64_t length) {
    Tile t;
    const __mmask64 mask = length >= STEP ? ~__mmask64(0) : (__mmask64(1) << length) - 1;
    for (int64_t i = 0; i < TILE; ++i)
        t.row[i] = i < count ? _mm512_maskz_loadu_epi8(mask, from + i * stride) : _mm512_setzero_si512();
    return t;
}

// The same 16 vectors of 64 numbers, transposed in words, of a matrix in which vectors are not contiguous.
inline Tile load_interleaved(const int8_t* from, int64_t stride, int64_t count, int64_t length) {
    Tile t;
    const __mmask16 mask = count >= TILE ? __mmask16(0xffff) : __mmask16((1 << count) - 1);
    for (int64_t i = 0; i < TILE; ++i) {
        __m128i place[4];
        for (int64_t j = 0; j < 4; ++j) {
            const int64_t k = 4 * i + j;
            place[j] = k < length ? _mm_maskz_loadu_epi8(mask, from + k * stride) : _mm_setzero_si128();
        }
        const __m128i a = _mm_unpacklo_epi8(place[0], place[1]), b = _mm_unpackhi_epi8(place[0], place[1]);
        const __m128i c = _mm_unpacklo_epi8(place[2], place[3]), d = _mm_unpackhi_epi8(place[2], place[3]);
        __m512i row = _mm512_castsi128_si512(_mm_unpacklo_epi16(a, c));
        row = _mm512_inserti32x4(row, _mm_unpackhi_epi16(a, c), 1);
        row = _mm512_inserti32x4(row, _mm_unpacklo_epi16(b, d), 2);
        t.row[i] = _mm512_inserti32x4(row, _mm_unpackhi_epi16(b, d), 3);
    }
    return t;
}

// Packs one panel or two neighbours, which share lines of the cache if vectors are not contiguous. in_words: for b.
void pack_tiles(const Vectors& x, int64_t panel, int64_t num_panels, bool in_words, int8_t* to, int64_t panel_bytes) {
    for (int64_t k = 0; k < x.length; k += STEP) {
        for (int64_t tile = 0; tile < 2 * num_panels; ++tile) {
            const int64_t first = panel * PANEL + tile * TILE, count = x.count - first, length = x.length - k;
            Tile t;
            if (count <= 0) {
                for (auto& row : t.row) row = _mm512_setzero_si512();
            } else if (x.contiguous) {
                t = load_vectors(x.data + first * x.stride + k, x.stride, count, length);
                if (in_words) transpose(t);
            } else {
                t = load_interleaved(x.data + k * x.stride + first, x.stride, count, length);
                if (!in_words) transpose(t);
            }
            int8_t* place = to + tile / 2 * panel_bytes + k / STEP * STEP_BYTES + tile % 2 * TILE_BYTES;
            for (int64_t i = 0; i < TILE; ++i) _mm512_store_si512(place + i * STEP, t.row[i]);
        }
    }
}

// A barrier for the compiler alone. gcc does not know that tile instructions read memory, and might move earlier
// stores to `memory` behind them.
inline void settle(const void* memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

// All eight tiles: 16 rows of 64 bytes.
void configure_tiles() {
    struct alignas(64) {
        uint8_t palette, first_row, reserved[14];
        uint16_t bytes_per_row[16];
        uint8_t rows[16];
    } config = {};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
        config.bytes_per_row[i] = STEP;
        config.rows[i] = TILE;
    }
    settle(&config);
    _tile_loadconfig(&config);
}

// Adds the products of `steps` steps of a panel of a and a panel of b to the sums; `starts`: the sums
// begin at zero. Each step prefetches `lines` cache lines from `next`.
inline void multiply_tiles(const int8_t* a, const int8_t* b, int64_t steps, bool starts, int32_t* sums,
                           const int8_t* next, int64_t lines) {
    constexpr int64_t ROW = PANEL * sizeof(int32_t), LOWER = TILE * PANEL;
    settle(a);
    if (starts) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, ROW);
        _tile_loadd(1, sums + TILE, ROW);
        _tile_loadd(2, sums + LOWER, ROW);
        _tile_loadd(3, sums + LOWER + TILE, ROW);
    }
    for (int64_t step = 0; step < steps; ++step, a += STEP_BYTES, b += STEP_BYTES) {
        for (int64_t line = 0; line < lines; ++line, next += 64) __builtin_prefetch(next);
        _tile_loadd(6, b, STEP);
        _tile_loadd(4, a, STEP);
        _tile_loadd(7, b + TILE_BYTES, STEP);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(5, a + TILE_BYTES, STEP);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, sums, ROW);
    _tile_stored(1, sums + TILE, ROW);
    _tile_stored(2, sums + LOWER, ROW);
    _tile_stored(3, sums + LOWER + TILE, ROW);
}

struct Amx {
    static constexpr int64_t ROWS = PANEL, COLUMNS = PANEL, DEPTH = STEP;
    static constexpr int64_t B_STEP_BYTES = STEP_BYTES, SLAB = 8;
    static constexpr int64_t BLOCK_BYTES = int64_t(1) << 19, FEWEST_PANELS = 8, PIECE = 192;
    static constexpr int64_t A_TOGETHER = 2, B_TOGETHER = 2;  // two panels have a line of the cache

    static int64_t a_panel_bytes(int64_t steps) { return steps * STEP_BYTES; }
    static int64_t b_panel_bytes(int64_t steps) { return steps * STEP_BYTES; }

    static void begin() { configure_tiles(); }
    static void end() { _tile_release(); }

    static void pack_a(const Vectors& x, int64_t panel, int64_t num_panels, int8_t* to, int64_t panel_bytes) {
        pack_tiles(x, panel, num_panels, false, to, panel_bytes);
    }
    static void pack_b(const Vectors& x, int64_t panel, int64_t num_panels, int8_t* to, int64_t panel_bytes) {
        pack_tiles(x, panel, num_panels, true, to, panel_bytes);
    }

    // The panels of a that pass by one slab of b share out the lines of the next slab, to fetch them.
    static void multiply(const int8_t* a, int64_t step, const int8_t* b, int64_t depth, bool first_piece, int32_t* sums,
                         int64_t panel, int64_t num_panels) {
        const int64_t lines = STEP_BYTES / LINE / num_panels;
        const int8_t* next = b + depth * STEP_BYTES + panel * depth * lines * LINE;
        multiply_tiles(a + step * STEP_BYTES, b, depth, first_piece && step == 0, sums, next, lines);
    }
};

// Whether this process may use AMX: Linux grants the registers, 8 KiB for each thread, on request only.
bool amx_is_granted() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

}  // namespace

#endif
