// AMX's tile instructions in plain C++, for processors with AVX512 that do not have them. The engine of
// lptune/kernels/native/amx.h is compiled against it: `g++ -include emulated_amx.h`.

#pragma once

#include <cstdint>
#include <cstring>

#include <immintrin.h>
#include <unistd.h>

#define __AMX_INT8__ 1
#define syscall(...) 0L  // Linux grants the registers

namespace emulated_amx {

struct Tile {
    alignas(64) int8_t row[16][64];
};
static thread_local Tile tiles[8];

inline void load(int tile, const void* from, int64_t stride) {
    for (int i = 0; i < 16; ++i) std::memcpy(tiles[tile].row[i], static_cast<const int8_t*>(from) + i * stride, 64);
}

inline void store(int tile, void* to, int64_t stride) {
    for (int i = 0; i < 16; ++i) std::memcpy(static_cast<int8_t*>(to) + i * stride, tiles[tile].row[i], 64);
}

// sum[m][n] += a[m][4 k + j] * b[k][4 n + j], over k and j.
inline void add_products(int sum, int a, int b) {
    for (int m = 0; m < 16; ++m) {
        int32_t line[16];
        std::memcpy(line, tiles[sum].row[m], 64);
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < 16; ++n)
                for (int j = 0; j < 4; ++j) line[n] += tiles[a].row[m][4 * k + j] * tiles[b].row[k][4 * n + j];
        std::memcpy(tiles[sum].row[m], line, 64);
    }
}

}  // namespace emulated_amx

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#define _tile_loadconfig(config) static_cast<void>(config)
#define _tile_release() static_cast<void>(0)
#define _tile_zero(tile) std::memset(&emulated_amx::tiles[tile], 0, sizeof(emulated_amx::Tile))
#define _tile_loadd(tile, from, stride) emulated_amx::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_amx::store(tile, to, stride)
#define _tile_dpbssd(sum, a, b) emulated_amx::add_products(sum, a, b)
