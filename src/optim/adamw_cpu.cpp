// [Note: same bits as torch] The order of operations is that of _single_tensor_adam in
// torch/optim/adam.py (2.11), each line below being one ATen call there. Scalars are computed in
// double and rounded to T when they meet a tensor, as TensorIterator does. ATen's add(alpha),
// lerp and addcmul contract their last multiply-add on AVX2 and AVX-512; mul, div, addcdiv do not.
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "core/vector_path.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/optim/adamw.hpp"
#include "optim/moment.hpp"

namespace hopshard {
namespace {

using detail::from_moment;
using detail::fused_multiply_add;
using detail::RandomBits;
using detail::square_root;
using detail::to_moment;

/// The scalars of one step, in the precision in which the tensors meet them.
template <typename T>
struct StepScalars {
  T grad_scale;
  T decay_factor;  // Decoupled: master *= 1 - lr * weight_decay.
  T weight_decay;  // Coupled: grad += weight_decay * master.
  T lerp_weight;
  bool lerp_from_end;
  T beta2;
  T one_minus_beta2;
  T bias_correction2_sqrt;
  T eps;
  T minus_step_size;
};

template <typename T>
StepScalars<T> make_step_scalars(const AdamSettings& s, std::int64_t step, double grad_scale) {
  const double age = static_cast<double>(step);
  const double bias_correction1 = 1.0 - std::pow(s.beta1, age);
  const double bias_correction2 = 1.0 - std::pow(s.beta2, age);
  const T lerp_weight = static_cast<T>(1.0 - s.beta1);
  // Python's `x ** 0.5` is pow, which may differ from sqrt in the last bit.
  return {.grad_scale = static_cast<T>(s.maximize ? -grad_scale : grad_scale),
          .decay_factor = static_cast<T>(
              s.decoupled_weight_decay && s.weight_decay != 0 ? 1.0 - s.lr * s.weight_decay : 1.0),
          .weight_decay = static_cast<T>(s.weight_decay),
          .lerp_weight = lerp_weight,
          .lerp_from_end = !(std::abs(lerp_weight) < T{0.5}),
          .beta2 = static_cast<T>(s.beta2),
          .one_minus_beta2 = static_cast<T>(1.0 - s.beta2),
          .bias_correction2_sqrt = static_cast<T>(std::pow(bias_correction2, 0.5)),
          .eps = static_cast<T>(s.eps),
          .minus_step_size = static_cast<T>(-(s.lr / bias_correction1))};
}

/// The memory of one step; what a loop needs, and nothing that keeps it from being vectorised.
template <typename T, typename Moment>
struct StepMemory {
  T* master;
  const T* grad;
  Moment* exp_avg;
  Moment* exp_avg_sq;
  std::uint16_t* bf16_shard;
  std::size_t numel;
  RandomBits random;  // For moments in bf16.
};

template <bool kCoupledDecay, bool kLerpFromEnd, bool kWritesShard, typename T, typename Moment>
HOPSHARD_LOOP void adam_loop(T* __restrict master, const T* __restrict grad,
                             Moment* __restrict exp_avg, Moment* __restrict exp_avg_sq,
                             std::uint16_t* __restrict bf16_shard, std::size_t numel,
                             const RandomBits random, const StepScalars<T> s) {
  const T lerp_weight = kLerpFromEnd ? s.lerp_weight - T{1} : s.lerp_weight;
  for (std::size_t i = 0; i < numel; ++i) {
    T g = grad[i] * s.grad_scale;
    T w = master[i];
    if constexpr (kCoupledDecay) {
      g = fused_multiply_add(s.weight_decay, w, g);
    } else {
      w *= s.decay_factor;
    }
    const T m_old = from_moment<T>(exp_avg[i]);
    // at::lerp starts from the nearer end, so that weights 0 and 1 are exact.
    const T m = fused_multiply_add(lerp_weight, g - m_old, kLerpFromEnd ? g : m_old);
    const T v =
        fused_multiply_add(s.one_minus_beta2 * g, g, from_moment<T>(exp_avg_sq[i]) * s.beta2);
    const T denominator = square_root(v) / s.bias_correction2_sqrt + s.eps;
    const std::uint32_t bits = random.of(static_cast<std::uint32_t>(i));
    exp_avg[i] = to_moment<Moment>(m, bits & 0xffffU);
    exp_avg_sq[i] = to_moment<Moment>(v, bits >> 16U);
    w += s.minus_step_size * m / denominator;
    master[i] = w;
    if constexpr (kWritesShard) {
      bf16_shard[i] = detail::to_bf16(w);
    }
  }
}

/// Flags leave the loop: each combination is a loop of its own, without branches.
template <bool kCoupledDecay, bool kLerpFromEnd, typename T, typename Moment>
HOPSHARD_LOOP void adam_loop_of(const StepMemory<T, Moment>& memory, const StepScalars<T>& s) {
  const auto& [master, grad, exp_avg, exp_avg_sq, bf16_shard, numel, random] = memory;
  if constexpr (sizeof(T) == sizeof(float)) {
    if (bf16_shard != nullptr) {
      adam_loop<kCoupledDecay, kLerpFromEnd, true>(master, grad, exp_avg, exp_avg_sq, bf16_shard,
                                                   numel, random, s);
      return;
    }
  }
  adam_loop<kCoupledDecay, kLerpFromEnd, false>(master, grad, exp_avg, exp_avg_sq, bf16_shard,
                                                numel, random, s);
}

template <typename T, typename Moment>
HOPSHARD_LOOP void adam_loops(const StepMemory<T, Moment>& memory, const StepScalars<T>& s,
                              bool coupled_decay) {
  if (coupled_decay) {
    if (s.lerp_from_end) {
      adam_loop_of<true, true>(memory, s);
    } else {
      adam_loop_of<true, false>(memory, s);
    }
  } else if (s.lerp_from_end) {
    adam_loop_of<false, true>(memory, s);
  } else {
    adam_loop_of<false, false>(memory, s);
  }
}

#if HOPSHARD_HAS_AVX2_PATH
template <typename T, typename Moment>
HOPSHARD_AVX2 void adam_avx2(const StepMemory<T, Moment>& memory, const StepScalars<T>& s,
                             bool coupled_decay) {
  adam_loops(memory, s, coupled_decay);
}
#endif

template <typename T, typename Moment>
void adam_any_cpu(const StepMemory<T, Moment>& memory, const StepScalars<T>& s,
                  bool coupled_decay) {
  adam_loops(memory, s, coupled_decay);
}

template <typename T, typename Moment>
void checked_adam_step(std::span<T> master, std::span<const T> grad, std::span<Moment> exp_avg,
                       std::span<Moment> exp_avg_sq, const AdamSettings& settings,
                       std::int64_t step, double grad_scale, std::span<std::uint16_t> bf16_shard,
                       const RandomBits& random = {}) {
  HOPSHARD_CHECK(grad.size() == master.size() && exp_avg.size() == master.size() &&
                     exp_avg_sq.size() == master.size(),
                 InvalidArgument, "adam_step: master has ", master.size(), " elements, grad ",
                 grad.size(), ", exp_avg ", exp_avg.size(), ", exp_avg_sq ", exp_avg_sq.size());
  HOPSHARD_CHECK(bf16_shard.empty() || bf16_shard.size() == master.size(), InvalidArgument,
                 "adam_step: master has ", master.size(), " elements, bf16_shard ",
                 bf16_shard.size());
  HOPSHARD_CHECK(step >= 1, InvalidArgument, "adam_step: the first step is 1, got ", step);
  const StepScalars<T> scalars = make_step_scalars<T>(settings, step, grad_scale);
  // torch leaves the gradient alone when there is no decay; 0 * master would turn inf into NaN.
  const bool coupled_decay = !settings.decoupled_weight_decay && settings.weight_decay != 0;
  const StepMemory<T, Moment> memory{.master = master.data(),
                                     .grad = grad.data(),
                                     .exp_avg = exp_avg.data(),
                                     .exp_avg_sq = exp_avg_sq.data(),
                                     .bf16_shard = bf16_shard.empty() ? nullptr : bf16_shard.data(),
                                     .numel = master.size(),
                                     .random = random};
#if HOPSHARD_HAS_AVX2_PATH
  if (detail::has_avx2()) {
    adam_avx2(memory, scalars, coupled_decay);
    return;
  }
#endif
  adam_any_cpu(memory, scalars, coupled_decay);
}

}  // namespace

void adam_step(std::span<float> master, std::span<const float> grad, std::span<float> exp_avg,
               std::span<float> exp_avg_sq, const AdamSettings& settings, std::int64_t step,
               double grad_scale, std::span<std::uint16_t> bf16_shard) {
  checked_adam_step(master, grad, exp_avg, exp_avg_sq, settings, step, grad_scale, bf16_shard);
}

void adam_step(std::span<double> master, std::span<const double> grad, std::span<double> exp_avg,
               std::span<double> exp_avg_sq, const AdamSettings& settings, std::int64_t step,
               double grad_scale) {
  checked_adam_step(master, grad, exp_avg, exp_avg_sq, settings, step, grad_scale, {});
}

void adam_step(std::span<float> master, std::span<const float> grad,
               std::span<std::uint16_t> exp_avg, std::span<std::uint16_t> exp_avg_sq,
               const AdamSettings& settings, std::int64_t step, const StochasticRounding& rounding,
               double grad_scale, std::span<std::uint16_t> bf16_shard) {
  checked_adam_step(master, grad, exp_avg, exp_avg_sq, settings, step, grad_scale, bf16_shard,
                    detail::random_bits(rounding, step));
}

}  // namespace hopshard
