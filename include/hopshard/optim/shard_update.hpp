// Applies a kernel to the segments of one contiguous arena that need it. An arena holds the same
// elements in the same order for master, gradient and moments: this rank's slices, one after the
// other. Knows segments, not parameters.
//
//   arena     0          40    64     67    96        126  128      (group, step)
//             |  w (A,7)  |....|b (A,7)|....|  v (B,7)  |..|
//   passes    |------------- A --------|    |---- B ----|           2 kernel calls, not 3
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "hopshard/optim/adamw.hpp"
#include "hopshard/optim/sgd.hpp"
#include "hopshard/optim/stochastic_rounding.hpp"

namespace hopshard {

/// Elements [begin, end) of an arena that share hyper-parameters and age.
struct Segment {
  static constexpr int kSkipped = -1;

  std::int64_t begin = 0;
  std::int64_t end = 0;
  int group = 0;          ///< Index into the settings, or kSkipped: not updated this time.
  std::int64_t step = 1;  ///< The update that is about to be made, 1 for the first.
  bool operator==(const Segment&) const = default;
};

/// What may be done with the elements between two segments. They are padding, zero in every
/// buffer, and stay zero under an update; only 0 / (sqrt(0) + eps) with eps = 0 would make NaN.
enum class Padding { kKeepOut, kSwallow };

/// Joins neighbours of equal group and step and drops skipped and empty segments.
///
/// A skipped segment is no padding: it keeps its neighbours apart. So all parameters of the arena
/// must be listed, also those without an update.
/// @param segments  ascending, disjoint.
/// @throws InvalidArgument  out of order, overlapping, begin > end, group < kSkipped, or step < 1
///                          in a segment that is not skipped.
[[nodiscard]] std::vector<Segment> merge_segments(std::span<const Segment> segments,
                                                  Padding padding = Padding::kSwallow);

/// The kernel calls of one step, merged once and applied to as many arenas of that shape, and in as
/// many steps in a row, as asked.
class ShardUpdate {
 public:
  /// @param arena_numel  elements of every buffer that is passed later.
  /// @throws InvalidArgument  as merge_segments, or a segment outside the arena.
  ShardUpdate(std::int64_t arena_numel, std::span<const Segment> segments);

  [[nodiscard]] std::int64_t arena_numel() const noexcept { return arena_numel_; }
  /// One kernel call each; a steady step has one per run of equal groups.
  [[nodiscard]] const std::vector<Segment>& passes() const noexcept { return passes_; }

  /// The next step of the same segments: all of them are one update older.
  void advance() noexcept;

  /// adam_step on every pass, with `settings[pass.group]`.
  /// @param master, grad, exp_avg, exp_avg_sq  whole arenas; padding must hold zeros.
  /// @param bf16_shard  a whole arena; empty: not written.
  /// @throws InvalidArgument  a buffer is not an arena long, or a group has no settings; nothing
  ///                          was written then.
  void adam(std::span<float> master, std::span<const float> grad, std::span<float> exp_avg,
            std::span<float> exp_avg_sq, std::span<const AdamSettings> settings,
            double grad_scale = 1.0, std::span<std::uint16_t> bf16_shard = {}) const;
  void adam(std::span<double> master, std::span<const double> grad, std::span<double> exp_avg,
            std::span<double> exp_avg_sq, std::span<const AdamSettings> settings,
            double grad_scale = 1.0) const;
  /// @param rounding  of the whole arena: `first_element` is that of its first one.
  void adam(std::span<float> master, std::span<const float> grad, std::span<std::uint16_t> exp_avg,
            std::span<std::uint16_t> exp_avg_sq, std::span<const AdamSettings> settings,
            const StochasticRounding& rounding, double grad_scale = 1.0,
            std::span<std::uint16_t> bf16_shard = {}) const;

  /// sgd_step on every pass; a segment of step 1 starts its momentum.
  /// @param momentum_buffer  a whole arena; may be empty if no group has momentum.
  void sgd(std::span<float> master, std::span<const float> grad, std::span<float> momentum_buffer,
           std::span<const SgdSettings> settings, double grad_scale = 1.0) const;
  void sgd(std::span<double> master, std::span<const double> grad,
           std::span<double> momentum_buffer, std::span<const SgdSettings> settings,
           double grad_scale = 1.0) const;
  void sgd(std::span<float> master, std::span<const float> grad,
           std::span<std::uint16_t> momentum_buffer, std::span<const SgdSettings> settings,
           const StochasticRounding& rounding, double grad_scale = 1.0) const;

 private:
  [[nodiscard]] const std::vector<Segment>& passes_of(std::span<const AdamSettings> settings) const;

  std::int64_t arena_numel_;
  std::vector<Segment> exact_passes_;  // Padding kept out, for groups with eps = 0.
  std::vector<Segment> passes_;
};

}  // namespace hopshard
