// One step of Adam or AdamW over plain memory: gradient, both moments and master are read and
// written once. Not an optimizer: no parameter groups, no step counter. Next: shard_update.hpp.
#pragma once

#include <cstdint>
#include <span>

#include "hopshard/optim/stochastic_rounding.hpp"

namespace hopshard {

/// Hyper-parameters in the words, and with the defaults, of torch.optim.AdamW.
struct AdamSettings {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool decoupled_weight_decay = true;  ///< true: AdamW; false: Adam, decay joins the gradient.
  bool maximize = false;
  bool operator==(const AdamSettings&) const = default;
};

/// Updates `master`, `exp_avg` and `exp_avg_sq` in place from `grad * grad_scale`.
///
/// @param step        1 for the first update; the bias corrections depend on it.
/// @param grad_scale  finite; the clipping coefficient, 1 for none.
/// @param bf16_shard  empty, or bits of bfloat16: the new master, rounded to nearest even.
/// All other spans have the same length and do not overlap.
/// Result: torch 2.11's Adam and AdamW with foreach=False, fused=False on a CPU with AVX2 or
/// AVX-512, after `grad.mul_(grad_scale)`: both moments are bit-equal, and so would be the master
/// if torch's square root, MKL's, were correctly rounded like ours. As it is off by one unit in the
/// last place for a fifth of all fp32 values, masters of size 1 are within 2 eps after 20 steps of
/// 1e-2 (with coupled decay the moments follow the master). Bits do not depend on this CPU's vector
/// width nor on how a range is cut into calls.
/// @throws InvalidArgument  lengths differ, or step < 1.
void adam_step(std::span<float> master, std::span<const float> grad, std::span<float> exp_avg,
               std::span<float> exp_avg_sq, const AdamSettings& settings, std::int64_t step,
               double grad_scale = 1.0, std::span<std::uint16_t> bf16_shard = {});
void adam_step(std::span<double> master, std::span<const double> grad, std::span<double> exp_avg,
               std::span<double> exp_avg_sq, const AdamSettings& settings, std::int64_t step,
               double grad_scale = 1.0);

/// With moments in bf16, rounded as they are written: this step's master follows them unrounded.
void adam_step(std::span<float> master, std::span<const float> grad,
               std::span<std::uint16_t> exp_avg, std::span<std::uint16_t> exp_avg_sq,
               const AdamSettings& settings, std::int64_t step, const StochasticRounding& rounding,
               double grad_scale = 1.0, std::span<std::uint16_t> bf16_shard = {});

}  // namespace hopshard
