// How a kernel reads and writes moments: in the master's type, or in bf16 and rounded at random.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/vector_path.hpp"
#include "hopshard/optim/stochastic_rounding.hpp"

namespace hopshard::detail {

/// 32 random bits per element; the halves round two moments.
struct RandomBits {
  std::uint32_t first_element = 0;
  std::uint32_t key = 0;
  std::uint32_t second_key = 0;

  /// "lowbias32" of Wellons' hash-prospector, keyed twice: 32-bit operations that AVX2 has.
  HOPSHARD_LOOP std::uint32_t of(std::uint32_t i) const {
    std::uint32_t x = (first_element + i) ^ key;
    x = (x ^ (x >> 16U)) * 0x7feb352dU;
    x = ((x ^ (x >> 15U)) + second_key) * 0x846ca68bU;
    return x ^ (x >> 16U);
  }
};

inline RandomBits random_bits(const StochasticRounding& rounding, std::int64_t step) {
  std::uint64_t x = 0;
  for (const std::uint64_t part :
       {rounding.seed, rounding.stream, static_cast<std::uint64_t>(step)}) {
    x = (x ^ part) + 0x9e3779b97f4a7c15ULL;  // One round of splitmix64.
    x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27U)) * 0x94d049bb133111ebULL;
    x ^= x >> 31U;
  }
  return {.first_element = static_cast<std::uint32_t>(rounding.first_element),
          .key = static_cast<std::uint32_t>(x),
          .second_key = static_cast<std::uint32_t>(x >> 32U)};
}

template <typename T, typename Moment>
HOPSHARD_LOOP T from_moment(Moment moment) {
  if constexpr (std::is_same_v<Moment, T>) {
    return moment;
  } else {
    return from_bf16(moment);
  }
}

/// @param random  16 bits, for bf16.
template <typename Moment, typename T>
HOPSHARD_LOOP Moment to_moment(T value, std::uint32_t random) {
  if constexpr (std::is_same_v<Moment, T>) {
    return value;
  } else {
    return cut_to_bf16(value, random);
  }
}

}  // namespace hopshard::detail
