// INT8 GEMM for CPUs with AMX, with the scales applied in its epilogue: out = (a @ b) * scale_a * scale_b.
//
// AMX has eight tile registers of 16 rows of 64 bytes, and an instruction that adds the product of two tiles of
// int8 to a tile of 16 x 16 int32: 16,384 products in 16 cycles, twice as many as of bfloat16. So the work is to
// bring the operands to it:
//
// - Operands are packed into panels of 32 vectors (rows of a, columns of b) in the order in which the kernel reads
//   them, cut along the contraction into steps of 64. A tile of a has 16 vectors of 64 consecutive numbers. A tile
//   of b has 16 rows of 4 consecutive numbers of each of 16 vectors: the transpose of such a tile, in words of 4
//   bytes. Packing pads with zeros, which change no sum, so the kernel knows no edges.
// - A thread packs a block of rows of a that its second-level cache holds, and multiplies it by one panel of b after
//   another. SLAB steps of the panel stay in the first-level cache while all rows pass by; meanwhile the next slab
//   is fetched from further away. The sums wait in the second-level cache between slabs.
// - When the sums of a panel are complete, they are scaled, rounded and stored while they are in the cache. oneDNN
//   stores int32, four bytes each, and the scales need another pass over memory that no cache holds. A large output
//   is streamed to memory.
//
// int32 sums are exact in any order (up to 133,144 products), so the result has the bits of the reference.

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#if defined(__AMX_INT8__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__linux__)

#include <immintrin.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int64_t TILE = 16;                // rows of a tile, and words in a row
constexpr int64_t STEP = 64;                // int8 numbers in a row of a tile
constexpr int64_t TILE_BYTES = TILE * STEP;
constexpr int64_t PANEL = 2 * TILE;         // vectors of a panel
constexpr int64_t STEP_BYTES = 2 * TILE_BYTES;
constexpr int64_t SUMS = PANEL * PANEL;     // int32 sums of a panel of a and a panel of b

constexpr int64_t SLAB = 8;                           // steps: 16 KiB of a panel of b
constexpr int64_t BLOCK_BYTES = int64_t(1) << 19;     // of a, usually
// Long contractions: with fewer panels in a block of a, b would have to stream in too fast. So a block has at least
// FEWEST_PANELS, unless they take more than LARGEST_BLOCK bytes.
constexpr int64_t FEWEST_PANELS = 8;
constexpr int64_t LARGEST_BLOCK = 3 * BLOCK_BYTES;
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
void pack(const Vectors& x, int64_t panel, int64_t num_panels, bool in_words, int8_t* to, int64_t panel_bytes) {
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
inline void multiply(const int8_t* a, const int8_t* b, int64_t steps, bool starts, int32_t* sums, const int8_t* next,
                     int64_t lines) {
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

// Ties to even. The carry would make a number of a NaN with many payload bits, which a scale may bring.
inline __m256i to_bfloat16(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(
        _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc00000)), 16));
}

// stride: 1 for a vector of scales, 0 for a single one.
struct Scales { const float* data; int64_t stride; };

struct Output {
    uint8_t* data;
    int64_t rows, columns;
    bool bfloat16;
    bool streams;  // past the caches: whole lines need not be read before they are written

    int64_t size() const { return bfloat16 ? 2 : 4; }
};

// float(sums) * scale_a * scale_b, in this order, of 16 columns.
inline __m512 scaled(const int32_t* sums, __m512 by_row, __m512 by_column) {
    return _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums)), by_row), by_column);
}

// Scales the sums of a panel of a and a panel of b, and rounds them once to the output's type.
void finish(const int32_t* sums, int64_t row, int64_t column, Scales a, Scales b, const Output& out) {
    const int64_t rows = std::min(PANEL, out.rows - row), columns = std::min(PANEL, out.columns - column);
    const __mmask32 mask = columns == PANEL ? ~__mmask32(0) : (__mmask32(1) << columns) - 1;
    const __mmask16 left = __mmask16(mask), right = __mmask16(mask >> TILE);
    const float* by_column = b.data + column * b.stride;
    const __m512 by_left = b.stride ? _mm512_maskz_loadu_ps(left, by_column) : _mm512_set1_ps(*b.data);
    const __m512 by_right = b.stride ? _mm512_maskz_loadu_ps(right, by_column + TILE) : _mm512_set1_ps(*b.data);
    for (int64_t i = 0; i < rows; ++i, sums += PANEL) {
        const __m512 by_row = _mm512_set1_ps(a.data[(row + i) * a.stride]);
        const __m512 x = scaled(sums, by_row, by_left), y = scaled(sums + TILE, by_row, by_right);
        uint8_t* to = out.data + ((row + i) * out.columns + column) * out.size();
        if (out.bfloat16) {
            const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(to_bfloat16(x)), to_bfloat16(y), 1);
            if (out.streams) _mm512_stream_si512(reinterpret_cast<__m512i*>(to), both);
            else _mm512_mask_storeu_epi16(to, mask, both);
        } else if (out.streams) {
            _mm512_stream_ps(reinterpret_cast<float*>(to), x);
            _mm512_stream_ps(reinterpret_cast<float*>(to) + TILE, y);
        } else {
            _mm512_mask_storeu_ps(to, left, x);
            _mm512_mask_storeu_ps(reinterpret_cast<float*>(to) + TILE, right, y);
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
            data = static_cast<int8_t*>(std::aligned_alloc(64, bytes));
            size = data ? bytes : 0;
        }
        return data;
    }
};
thread_local Scratch scratch;

}  // namespace

// Whether this process may use AMX: Linux grants the registers, 8 KiB for each thread, on request only.
extern "C" int lptune_has_int8_mm() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

// a: (m, k), b: (k, n). contiguous: along k; otherwise a is contiguous along m, b along n. by_row, by_column: whether
// there is a scale for each row of a, for each column of b; otherwise there is one scale.
// Returns 0, or 1 if memory could not be allocated.
extern "C" int lptune_int8_mm(const int8_t* a, int64_t stride_a, int contiguous_a, const int8_t* b, int64_t stride_b,
                              int contiguous_b, int64_t m, int64_t k, int64_t n, const float* scale_a, int by_row,
                              const float* scale_b, int by_column, void* data, int is_bfloat16, int num_threads) {
    const Vectors rows{a, m, k, stride_a, contiguous_a != 0}, columns{b, n, k, stride_b, contiguous_b != 0};
    const Scales row_scales{scale_a, by_row}, column_scales{scale_b, by_column};
    Output out{static_cast<uint8_t*>(data), m, n, is_bfloat16 != 0, false};
    const bool whole_lines = n % PANEL == 0 && reinterpret_cast<uintptr_t>(data) % 64 == 0;
    out.streams = whole_lines && m * n * out.size() > STREAMED_BYTES;

    const int64_t steps = divide_up(k, STEP), panel_bytes = steps * STEP_BYTES;
    const int64_t a_panels = divide_up(m, PANEL), b_panels = divide_up(n, PANEL);
    const int64_t wide = std::clamp<int64_t>(PACKED_B_BYTES / panel_bytes, 1, b_panels);  // panels of b at a time
    const int64_t fewest = std::min(FEWEST_PANELS, LARGEST_BLOCK / panel_bytes);
    const int64_t tall = std::clamp<int64_t>(std::max(BLOCK_BYTES / panel_bytes, fewest), 1, a_panels);

    // A thread's tasks are blocks of a; where these are too few to keep all threads busy, parts of b as well.
    const int64_t blocks = divide_up(a_panels, tall);
    const int64_t parts = std::min(divide_up(2 * num_threads, blocks), wide);

    const int64_t block_bytes = tall * panel_bytes, thread_bytes = block_bytes + tall * SUMS * int64_t(sizeof(int32_t));
    int8_t* const packed_b = scratch.get(wide * panel_bytes + num_threads * thread_bytes);
    if (!packed_b) return 1;

    for (int64_t first = 0; first < b_panels; first += wide) {
        const int64_t width = std::min(wide, b_panels - first);
        #pragma omp parallel num_threads(num_threads)
        {
            #pragma omp for schedule(static)
            for (int64_t p = 0; p < width; p += 2)
                pack(columns, first + p, std::min<int64_t>(2, width - p), true, packed_b + p * panel_bytes, panel_bytes);

            int8_t* const packed_a = packed_b + wide * panel_bytes + omp_get_thread_num() * thread_bytes;
            int32_t* const sums = reinterpret_cast<int32_t*>(packed_a + block_bytes);
            configure_tiles();
            #pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < blocks * parts; ++task) {
                const int64_t top = task / parts * tall, height = std::min(tall, a_panels - top), part = task % parts;
                for (int64_t i = 0; i < height; i += 2)
                    pack(rows, top + i, std::min<int64_t>(2, height - i), false, packed_a + i * panel_bytes, panel_bytes);
                for (int64_t p = part * width / parts; p < (part + 1) * width / parts; ++p) {
                    for (int64_t step = 0; step < steps; step += SLAB) {
                        const int64_t depth = std::min(SLAB, steps - step), lines = STEP_BYTES / 64 / height;
                        const int8_t* slab = packed_b + p * panel_bytes + step * STEP_BYTES;
                        for (int64_t i = 0; i < height; ++i)
                            multiply(packed_a + i * panel_bytes + step * STEP_BYTES, slab, depth, step == 0,
                                     sums + i * SUMS, slab + depth * STEP_BYTES + i * depth * lines * 64, lines);
                    }
                    for (int64_t i = 0; i < height; ++i)
                        finish(sums + i * SUMS, (top + i) * PANEL, (first + p) * PANEL, row_scales, column_scales, out);
                }
            }
            _tile_release();
            _mm_sfence();  // streamed stores come before the end of the region
        }
    }
    return 0;
}

#else

extern "C" int lptune_has_int8_mm() { return 0; }

#endif
