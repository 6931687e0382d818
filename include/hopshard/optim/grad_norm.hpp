// This rank's part of a gradient norm, as plain numbers that ranks then add (or maximise) and root.
// Knows nothing of ranks: combining is one all-reduce of the caller. Next: shard_update.hpp.
#pragma once

#include <span>

namespace hopshard {

// All sums are taken in double over blocks of fixed size, joined pairwise: the relative error
// stays below 1e-13 for a hundred million fp32 elements, and the bits depend only on the values,
// their order and their number, not on the CPU. Zeros (padding) change no result. An empty span
// yields 0, and `all_finite` holds.

[[nodiscard]] double sum_of_squares(std::span<const float> values);
[[nodiscard]] double sum_of_squares(std::span<const double> values);

/// Sum of |x|^p. p = 0 counts the elements that are not 0, as torch.linalg.vector_norm does.
/// @throws InvalidArgument  p is negative or not finite (for infinity there is abs_max).
[[nodiscard]] double power_sum(std::span<const float> values, double p);
[[nodiscard]] double power_sum(std::span<const double> values, double p);

/// Largest |x|; NaN if any element is NaN.
[[nodiscard]] double abs_max(std::span<const float> values);
[[nodiscard]] double abs_max(std::span<const double> values);

/// True if no element is infinite or NaN.
[[nodiscard]] bool all_finite(std::span<const float> values);
[[nodiscard]] bool all_finite(std::span<const double> values);

}  // namespace hopshard
