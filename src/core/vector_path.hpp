// Compiles a loop twice, once for any CPU and once for AVX2 + FMA, and picks at run time, so that
// one wheel is fast everywhere. The loops say `fused_multiply_add` where torch's kernels contract,
// and are compiled with -ffp-contract=off elsewhere: both copies give the same bits.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__)
#define HOPSHARD_HAS_AVX2_PATH 1
#define HOPSHARD_AVX2 [[gnu::target("avx2,fma")]]
#else
#define HOPSHARD_HAS_AVX2_PATH 0
#endif

// A loop body takes on the instruction set of the function that it is inlined into.
#define HOPSHARD_LOOP [[gnu::always_inline]] inline

namespace hopshard::detail {

inline bool has_avx2() {
#if HOPSHARD_HAS_AVX2_PATH
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has;
#else
  return false;
#endif
}

// The builtins rather than std:: functions, which are calls of the baseline instruction set when
// the optimiser is off. Without hardware FMA they are slow library calls of the same result.
HOPSHARD_LOOP float fused_multiply_add(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
HOPSHARD_LOOP double fused_multiply_add(double a, double b, double c) {
  return __builtin_fma(a, b, c);
}
HOPSHARD_LOOP float square_root(float x) { return __builtin_sqrtf(x); }
HOPSHARD_LOOP double square_root(double x) { return __builtin_sqrt(x); }

/// The upper half of `x` + `units_of_the_last_place`, less than 2^16 of them; a NaN stays one.
HOPSHARD_LOOP std::uint16_t cut_to_bf16(float x, std::uint32_t units_of_the_last_place) {
  const auto bits = __builtin_bit_cast(std::uint32_t, x);
  return static_cast<std::uint16_t>(x != x ? 0x7fc0U : (bits + units_of_the_last_place) >> 16U);
}

/// Rounded to nearest even; a NaN stays one. As c10::BFloat16 does it.
HOPSHARD_LOOP std::uint16_t to_bf16(float x) {
  const auto bits = __builtin_bit_cast(std::uint32_t, x);
  return cut_to_bf16(x, 0x7fffU + ((bits >> 16U) & 1U));
}

HOPSHARD_LOOP float from_bf16(std::uint16_t x) {
  return __builtin_bit_cast(float, std::uint32_t{x} << 16U);
}

}  // namespace hopshard::detail
