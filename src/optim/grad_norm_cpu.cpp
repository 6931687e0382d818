// Sixteen running results per block let the compiler use vectors without being allowed to reorder
// sums; blocks are then joined pairwise, so the error grows with the logarithm of their number.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/vector_path.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/optim/grad_norm.hpp"

namespace hopshard {
namespace {

constexpr std::size_t kLanes = 16;
constexpr std::size_t kBlockNumel = 1024;
static_assert(kBlockNumel % kLanes == 0);

struct Square {
  template <typename T>
  HOPSHARD_LOOP double operator()(T x) const {
    const double wide = static_cast<double>(x);  // Exact: the square of an fp32 fits a double.
    return wide * wide;
  }
};

struct Absolute {
  template <typename T>
  HOPSHARD_LOOP double operator()(T x) const {
    return std::abs(static_cast<double>(x));
  }
};

struct NotZero {
  template <typename T>
  HOPSHARD_LOOP double operator()(T x) const {
    return x != T{0} ? 1.0 : 0.0;
  }
};

struct Power {
  double p;
  template <typename T>
  HOPSHARD_LOOP double operator()(T x) const {
    return std::pow(std::abs(static_cast<double>(x)), p);
  }
};

template <typename T, typename Term>
HOPSHARD_LOOP double sum_block(const T* values, std::size_t numel, const Term term) {
  std::array<double, kLanes> lanes{};
  const std::size_t whole = numel - numel % kLanes;
  for (std::size_t i = 0; i < whole; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(values[i + lane]);
  }
  for (std::size_t i = whole; i < numel; ++i) lanes[i - whole] += term(values[i]);
  for (std::size_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

#if HOPSHARD_HAS_AVX2_PATH
template <typename T, typename Term>
HOPSHARD_AVX2 double sum_block_avx2(const T* values, std::size_t numel, const Term& term) {
  return sum_block(values, numel, term);
}
#endif

/// Pairwise sum of the blocks, by the binary counter of their number: no recursion, no buffer.
template <typename T, typename Term>
double pairwise_sum(std::span<const T> values, const Term& term) {
  std::array<double, 64>
      partial{};  // partial[level] holds 2^level blocks while bit `level` is set.
  std::uint64_t num_blocks = 0;
  for (std::size_t begin = 0; begin < values.size(); begin += kBlockNumel, ++num_blocks) {
    const std::size_t numel = std::min(kBlockNumel, values.size() - begin);
#if HOPSHARD_HAS_AVX2_PATH
    double sum = detail::has_avx2() ? sum_block_avx2(values.data() + begin, numel, term)
                                    : sum_block(values.data() + begin, numel, term);
#else
    double sum = sum_block(values.data() + begin, numel, term);
#endif
    const auto carries = static_cast<std::size_t>(std::countr_one(num_blocks));
    for (std::size_t level = 0; level < carries; ++level) sum += partial[level];
    partial[carries] = sum;
  }
  double total = 0.0;
  for (std::size_t level = 0; level < partial.size(); ++level) {
    if ((num_blocks >> level & 1U) != 0) total += partial[level];
  }
  return total;
}

template <typename T>
double checked_power_sum(std::span<const T> values, double p) {
  HOPSHARD_CHECK(p >= 0 && std::isfinite(p), InvalidArgument,
                 "power_sum: p must be finite and not negative, got ", p);
  if (p == 0) return pairwise_sum(values, NotZero{});
  if (p == 1) return pairwise_sum(values, Absolute{});
  if (p == 2) return pairwise_sum(values, Square{});
  return pairwise_sum(values, Power{p});
}

template <typename T>
HOPSHARD_LOOP T abs_max_loop(const T* values, std::size_t numel) {
  std::array<T, kLanes> lanes{};
  const std::size_t whole = numel - numel % kLanes;
  // Once a lane is NaN no comparison is true any more, so NaN stays.
  const auto larger = [](T x, T best) { return x > best || x != x ? x : best; };
  for (std::size_t i = 0; i < whole; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = larger(std::abs(values[i + lane]), lanes[lane]);
    }
  }
  for (std::size_t i = whole; i < numel; ++i) {
    lanes[i - whole] = larger(std::abs(values[i]), lanes[i - whole]);
  }
  T best = lanes[0];
  for (std::size_t lane = 1; lane < kLanes; ++lane) best = larger(lanes[lane], best);
  return best;
}

/// Looks at exponent bits: independent of the compiler's floating-point flags.
template <typename T>
HOPSHARD_LOOP bool all_finite_loop(const T* values, std::size_t numel) {
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  constexpr Bits kExponent =
      sizeof(T) == 4 ? static_cast<Bits>(0x7f800000U) : static_cast<Bits>(0x7ff0000000000000U);
  Bits found = 0;
  for (std::size_t i = 0; i < numel; ++i) {
    const Bits exponent = std::bit_cast<Bits>(values[i]) & kExponent;
    found |= static_cast<Bits>(exponent == kExponent ? 1 : 0);
  }
  return found == 0;
}

#if HOPSHARD_HAS_AVX2_PATH
template <typename T>
HOPSHARD_AVX2 T abs_max_avx2(const T* values, std::size_t numel) {
  return abs_max_loop(values, numel);
}

template <typename T>
HOPSHARD_AVX2 bool all_finite_avx2(const T* values, std::size_t numel) {
  return all_finite_loop(values, numel);
}
#endif

template <typename T>
double abs_max_of(std::span<const T> values) {
#if HOPSHARD_HAS_AVX2_PATH
  if (detail::has_avx2()) {
    return static_cast<double>(abs_max_avx2(values.data(), values.size()));
  }
#endif
  return static_cast<double>(abs_max_loop(values.data(), values.size()));
}

template <typename T>
bool all_finite_of(std::span<const T> values) {
#if HOPSHARD_HAS_AVX2_PATH
  if (detail::has_avx2()) return all_finite_avx2(values.data(), values.size());
#endif
  return all_finite_loop(values.data(), values.size());
}

}  // namespace

double sum_of_squares(std::span<const float> values) { return pairwise_sum(values, Square{}); }
double sum_of_squares(std::span<const double> values) { return pairwise_sum(values, Square{}); }

double power_sum(std::span<const float> values, double p) { return checked_power_sum(values, p); }
double power_sum(std::span<const double> values, double p) { return checked_power_sum(values, p); }

double abs_max(std::span<const float> values) { return abs_max_of(values); }
double abs_max(std::span<const double> values) { return abs_max_of(values); }

bool all_finite(std::span<const float> values) { return all_finite_of(values); }
bool all_finite(std::span<const double> values) { return all_finite_of(values); }

}  // namespace hopshard
