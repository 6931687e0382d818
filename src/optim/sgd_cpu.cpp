// The order of operations of _single_tensor_sgd in torch/optim/sgd.py (2.11); see
// [Note: same bits as torch] in adamw_cpu.cpp.
#include <cstddef>

#include "core/vector_path.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/optim/sgd.hpp"

namespace hopshard {
namespace {

using detail::fused_multiply_add;

enum class Momentum { kNone, kFirst, kPlain, kFirstNesterov, kNesterov };

template <typename T>
struct StepScalars {
  T grad_scale;
  T weight_decay;
  T momentum;
  T one_minus_dampening;
  T minus_lr;
};

template <Momentum kMomentum, bool kDecay, typename T>
HOPSHARD_LOOP void sgd_loop(T* __restrict master, const T* __restrict grad,
                            T* __restrict momentum_buffer, std::size_t numel,
                            const StepScalars<T> s) {
  constexpr bool kFirst = kMomentum == Momentum::kFirst || kMomentum == Momentum::kFirstNesterov;
  constexpr bool kNesterov =
      kMomentum == Momentum::kNesterov || kMomentum == Momentum::kFirstNesterov;
  for (std::size_t i = 0; i < numel; ++i) {
    T g = grad[i] * s.grad_scale;
    if constexpr (kDecay) g = fused_multiply_add(s.weight_decay, master[i], g);
    if constexpr (kMomentum != Momentum::kNone) {
      T buffer = g;
      if constexpr (!kFirst) {
        buffer = fused_multiply_add(s.one_minus_dampening, g, momentum_buffer[i] * s.momentum);
      }
      momentum_buffer[i] = buffer;
      g = kNesterov ? fused_multiply_add(s.momentum, buffer, g) : buffer;
    }
    master[i] = fused_multiply_add(s.minus_lr, g, master[i]);
  }
}

template <Momentum kMomentum, typename T>
HOPSHARD_LOOP void sgd_loops(T* master, const T* grad, T* momentum_buffer, std::size_t numel,
                             const StepScalars<T>& s) {
  if (s.weight_decay != 0) {
    sgd_loop<kMomentum, true>(master, grad, momentum_buffer, numel, s);
  } else {
    sgd_loop<kMomentum, false>(master, grad, momentum_buffer, numel, s);
  }
}

template <typename T>
HOPSHARD_LOOP void sgd_loops(T* master, const T* grad, T* momentum_buffer, std::size_t numel,
                             const StepScalars<T>& s, Momentum momentum) {
  switch (momentum) {
    case Momentum::kNone:
      return sgd_loops<Momentum::kNone>(master, grad, momentum_buffer, numel, s);
    case Momentum::kFirst:
      return sgd_loops<Momentum::kFirst>(master, grad, momentum_buffer, numel, s);
    case Momentum::kPlain:
      return sgd_loops<Momentum::kPlain>(master, grad, momentum_buffer, numel, s);
    case Momentum::kFirstNesterov:
      return sgd_loops<Momentum::kFirstNesterov>(master, grad, momentum_buffer, numel, s);
    case Momentum::kNesterov:
      return sgd_loops<Momentum::kNesterov>(master, grad, momentum_buffer, numel, s);
  }
}

#if HOPSHARD_HAS_AVX2_PATH
template <typename T>
HOPSHARD_AVX2 void sgd_avx2(T* master, const T* grad, T* momentum_buffer, std::size_t numel,
                            const StepScalars<T>& s, Momentum momentum) {
  sgd_loops(master, grad, momentum_buffer, numel, s, momentum);
}
#endif

template <typename T>
void sgd_any_cpu(T* master, const T* grad, T* momentum_buffer, std::size_t numel,
                 const StepScalars<T>& s, Momentum momentum) {
  sgd_loops(master, grad, momentum_buffer, numel, s, momentum);
}

Momentum momentum_of(const SgdSettings& settings, bool first_step) {
  if (settings.momentum == 0) return Momentum::kNone;
  if (settings.nesterov) return first_step ? Momentum::kFirstNesterov : Momentum::kNesterov;
  return first_step ? Momentum::kFirst : Momentum::kPlain;
}

template <typename T>
void checked_sgd_step(std::span<T> master, std::span<const T> grad, std::span<T> momentum_buffer,
                      const SgdSettings& settings, bool first_step, double grad_scale) {
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
  const Momentum momentum = momentum_of(settings, first_step);
#if HOPSHARD_HAS_AVX2_PATH
  if (detail::has_avx2()) {
    sgd_avx2(master.data(), grad.data(), momentum_buffer.data(), master.size(), scalars, momentum);
    return;
  }
#endif
  sgd_any_cpu(master.data(), grad.data(), momentum_buffer.data(), master.size(), scalars, momentum);
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

}  // namespace hopshard
