// INT8 GEMM with the scales applied in its epilogue: out = (a @ b) * scale_a * scale_b. gemm.h has the idea.
//
// The library is compiled for this processor, so the best instruction set is known here; only AMX has to be granted.

#ifdef __AVX2__

#include "amx.h"
#include "avx.h"

#endif

#include <cstdint>

namespace {

#ifdef LPTUNE_HAS_AMX
const bool has_amx = amx_is_granted();
#else
constexpr bool has_amx = false;
#endif

}  // namespace

// The instruction set of `lptune_int8_mm`; an empty string if there is none.
extern "C" const char* lptune_instruction_set() {
    if (has_amx) return "amx";
#if defined(__AVX512VNNI__)
    return "avx512_vnni";
#elif defined(__AVXVNNI__)
    return "avx_vnni";
#elif defined(__AVX2__)
    return "avx2";
#else
    return "";
#endif
}

#ifdef __AVX2__

// a: (m, k), b: (k, n). contiguous: along k; otherwise a is contiguous along m, b along n. by_row, by_column: whether
// there is a scale for each row of a, for each column of b; otherwise there is one scale.
// Returns 0, or 1 if memory could not be allocated.
extern "C" int lptune_int8_mm(const int8_t* a, int64_t stride_a, int64_t contiguous_a, const int8_t* b,
                              int64_t stride_b, int64_t contiguous_b, int64_t m, int64_t k, int64_t n,
                              const float* scale_a, int64_t by_row, const float* scale_b, int64_t by_column,
                              void* data, int64_t is_bfloat16, int64_t num_threads) {
    const Vectors rows{a, m, k, stride_a, contiguous_a != 0}, columns{b, n, k, stride_b, contiguous_b != 0};
    const Scales row_scales{scale_a, by_row}, column_scales{scale_b, by_column};
    const Output out{data, m, n, false};
    if (m <= FEW_ROWS && rows.contiguous && columns.contiguous) {
        auto* multiply = is_bfloat16 ? multiply_few<uint16_t> : multiply_few<float>;
        multiply(rows, columns, row_scales, column_scales, out, num_threads);
        return 0;
    }
    auto* multiply = is_bfloat16 ? multiply_all<Avx, uint16_t> : multiply_all<Avx, float>;
#ifdef LPTUNE_HAS_AMX
    if (has_amx) multiply = is_bfloat16 ? multiply_all<Amx, uint16_t> : multiply_all<Amx, float>;
#endif
    return multiply(rows, columns, row_scales, column_scales, out, num_threads);
}

#endif
