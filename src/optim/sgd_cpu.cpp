// The order of operations of _single_tensor_sgd in torch/optim/sgd.py (2.11); see
// [Note: same bits as torch] in adamw_cpu.cpp.
#include <cstddef>
#include <cstdint>

#include "core/vector_path.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/optim/sgd.hpp"
#include "optim/moment.hpp"

namespace hopshard {
namespace {

using detail::from_moment;
using detail::fused_multiply_add;
using detail::RandomBits;
using detail::to_moment;

enum class Momentum { kNone, kFirst, kPlain, kFirstNesterov, kNesterov };

/// The memory of one step.
template <typename T, typename Moment>
struct StepMemory {
  T* master;
  const T* grad;
  Moment* momentum_buffer;
  std::size_t numel;
  RandomBits random;  // For a buffer in bf16.
};

template <typename T>
struct StepScalars {
  T grad_scale;
  T weight_decay;
  T momentum;
  T one_minus_dampening;
  T minus_lr;
};

template <Momentum kMomentum, bool kDecay, typename T, typename Moment>
HOPSHARD_LOOP void sgd_loop(T* __restrict master, const T* __restrict grad,
                            Moment* __restrict momentum_buffer, std::size_t numel,
                            const RandomBits random, const StepScalars<T> s) {
  constexpr bool kFirst = kMomentum == Momentum::kFirst || kMomentum == Momentum::kFirstNesterov;
  constexpr bool kNesterov =
      kMomentum == Momentum::kNesterov || kMomentum == Momentum::kFirstNesterov;
  for (std::size_t i = 0; i < numel; ++i) {
    T g = grad[i] * s.grad_scale;
    if constexpr (kDecay) g = fused_multiply_add(s.weight_decay, master[i], g);
    if constexpr (kMomentum != Momentum::kNone) {
      T buffer = g;
      if constexpr (!kFirst) {
        buffer = fused_multiply_add(s.one_minus_dampening, g,
                                    from_moment<T>(momentum_buffer[i]) * s.momentum);
      }
      momentum_buffer[i] =
          to_moment<Moment>(buffer, random.of(static_cast<std::uint32_t>(i)) & 0xffffU);
      g = kNesterov ? fused_multiply_add(s.momentum, buffer, g) : buffer;
    }
    master[i] = fused_multiply_add(s.minus_lr, g, master[i]);
  }
}

template <Momentum kMomentum, typename T, typename Moment>
HOPSHARD_LOOP void sgd_loops(const StepMemory<T, Moment>& memory, const StepScalars<T>& s) {
  const auto& [master, grad, momentum_buffer, numel, random] = memory;
  if (s.weight_decay != 0) {
    sgd_loop<kMomentum, true>(master, grad, momentum_buffer, numel, random, s);
  } else {
    sgd_loop<kMomentum, false>(master, grad, momentum_buffer, numel, random, s);
  }
}

template <typename T, typename Moment>
HOPSHARD_LOOP void sgd_loops(const StepMemory<T, Moment>& memory, const StepScalars<T>& s,
                             Momentum momentum) {
  switch (momentum) {
    case Momentum::kNone:
      return sgd_loops<Momentum::kNone>(memory, s);
    case Momentum::kFirst:
      return sgd_loops<Momentum::kFirst>(memory, s);
    case Momentum::kPlain:
      return sgd_loops<Momentum::kPlain>(memory, s);
    case Momentum::kFirstNesterov:
      return sgd_loops<Momentum::kFirstNesterov>(memory, s);
    case Momentum::kNesterov:
      return sgd_loops<Momentum::kNesterov>(memory, s);
  }
}

#if HOPSHARD_HAS_AVX2_PATH
template <typename T, typename Moment>
HOPSHARD_AVX2 void sgd_avx2(const StepMemory<T, Moment>& memory, const StepScalars<T>& s,
                            Momentum momentum) {
  sgd_loops(memory, s, momentum);
}
#endif

template <typename T, typename Moment>
void sgd_any_cpu(const StepMemory<T, Moment>& memory, const StepScalars<T>& s, Momentum momentum) {
  sgd_loops(memory, s, momentum);
}

Momentum momentum_of(const SgdSettings& settings, bool first_step) {
  if (settings.momentum == 0) return Momentum::kNone;
  if (settings.nesterov) return first_step ? Momentum::kFirstNesterov : Momentum::kNesterov;
  return first_step ? Momentum::kFirst : Momentum::kPlain;
}

template <typename T, typename Moment>
void checked_sgd_step(std::span<T> master, std::span<const T> grad,
                      std::span<Moment> momentum_buffer, const SgdSettings& settings,
                      bool first_step, double grad_scale, const RandomBits& random = {}) {
  const bool needs_buffer = settings.momentum != 0;
  HOPSHARD_CHECK(grad.size() == master.size() && (momentum_buffer.size() == master.size() ||
                                                  (momentum_buffer.empty() && !needs_buffer)),
                 InvalidArgument, "sgd_step: master has ", master.size(), " elements, grad ",
                 grad.size(), ", momentum_buffer ", momentum_buffer.size());
  HOPSHARD_CHECK(!settings.nesterov || (settings.momentum > 0 && settings.dampening == 0),
                 InvalidArgument, "sgd_step: nesterov needs a momentum above 0 and no dampening, ",
                 "got momentum ", settings.momentum, ", dampening ", settings.dampening);
  const StepScalars<T> scalars{
      .grad_scale = static_cast<T>(settings.maximize ? -grad_scale : grad_scale),
      .weight_decay = static_cast<T>(settings.weight_decay),
      .momentum = static_cast<T>(settings.momentum),
      .one_minus_dampening = static_cast<T>(1.0 - settings.dampening),
      .minus_lr = static_cast<T>(-settings.lr)};
  const StepMemory<T, Moment> memory{.master = master.data(),
                                     .grad = grad.data(),
                                     .momentum_buffer = momentum_buffer.data(),
                                     .numel = master.size(),
                                     .random = random};
  const Momentum momentum = momentum_of(settings, first_step);
#if HOPSHARD_HAS_AVX2_PATH
  if (detail::has_avx2()) {
    sgd_avx2(memory, scalars, momentum);
    return;
  }
#endif
  sgd_any_cpu(memory, scalars, momentum);
}

}  // namespace

void sgd_step(std::span<float> master, std::span<const float> grad,
              std::span<float> momentum_buffer, const SgdSettings& settings, bool first_step,
              double grad_scale) {
  checked_sgd_step(master, grad, momentum_buffer, settings, first_step, grad_scale);
}

void sgd_step(std::span<double> master, std::span<const double> grad,
              std::span<double> momentum_buffer, const SgdSettings& settings, bool first_step,
              double grad_scale) {
  checked_sgd_step(master, grad, momentum_buffer, settings, first_step, grad_scale);
}

void sgd_step(std::span<float> master, std::span<const float> grad,
              std::span<std::uint16_t> momentum_buffer, const SgdSettings& settings,
              std::int64_t step, const StochasticRounding& rounding, double grad_scale) {
  checked_sgd_step(master, grad, momentum_buffer, settings, /*first_step=*/step == 1, grad_scale,
                   detail::random_bits(rounding, step));
}

}  // namespace hopshard
