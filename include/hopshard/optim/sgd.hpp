// One step of SGD, with or without momentum, over plain memory. Next: shard_update.hpp.
#pragma once

#include <cstdint>
#include <span>

#include "hopshard/optim/stochastic_rounding.hpp"

namespace hopshard {

/// Hyper-parameters in the words, and with the defaults, of torch.optim.SGD.
struct SgdSettings {
  double lr = 1e-3;
  double momentum = 0.0;
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
  bool maximize = false;
  bool operator==(const SgdSettings&) const = default;
};

/// Updates `master` and `momentum_buffer` in place from `grad * grad_scale`.
///
/// @param momentum_buffer  may be empty if momentum is 0, which leaves it untouched.
/// @param first_step       the buffer is overwritten with the gradient (undamped, as in torch)
///                         instead of read.
/// @param grad_scale       finite; the clipping coefficient, 1 for none.
/// All other spans have the same length; none overlap. Result: as for adam_step, bit-equal to
/// torch.optim.SGD with foreach=False, fused=False on a CPU with AVX2 or AVX-512.
/// @throws InvalidArgument  lengths differ, or nesterov without momentum or with dampening.
void sgd_step(std::span<float> master, std::span<const float> grad,
              std::span<float> momentum_buffer, const SgdSettings& settings, bool first_step,
              double grad_scale = 1.0);
void sgd_step(std::span<double> master, std::span<const double> grad,
              std::span<double> momentum_buffer, const SgdSettings& settings, bool first_step,
              double grad_scale = 1.0);

/// With a buffer in bf16, rounded as it is written: this step's master follows it unrounded.
/// @param step  1 for the first, which overwrites the buffer.
void sgd_step(std::span<float> master, std::span<const float> grad,
              std::span<std::uint16_t> momentum_buffer, const SgdSettings& settings,
              std::int64_t step, const StochasticRounding& rounding, double grad_scale = 1.0);

}  // namespace hopshard
