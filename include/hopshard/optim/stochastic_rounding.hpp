// Where the random bits come from that round fp32 moments to bf16. Next: adamw.hpp.
#pragma once

#include <cstdint>

namespace hopshard {

/// A moment is rounded up with the probability with which that makes it right on average: an
/// average over a thousand steps moves by less than bf16 resolves, and would stand still if each
/// step were rounded to nearest.
///
/// The bits are a function of (seed, stream, step, element) and of which moment it is: ranks that
/// give the same round alike, however a range is cut into calls and whatever the CPU. What bf16
/// holds exactly, and infinity and NaN, do not change.
struct StochasticRounding {
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;        ///< Tells apart what should not share bits: slices of ranks.
  std::int64_t first_element = 0;  ///< Index of the first one of the call; counts modulo 2^32.
  bool operator==(const StochasticRounding&) const = default;
};

}  // namespace hopshard
