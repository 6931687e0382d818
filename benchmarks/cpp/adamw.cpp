// AdamW on one thread, beside torch's fused kernel and beside what memory can do; and a whole
// step's tail: norm, clipping, AdamW and the bf16 copy that gathers send.
//
//   bench_adamw [MiB of parameters, 64] [rounds, 15]
#include "hopshard/optim/adamw.hpp"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <cstring>
#include <span>

#include "hopshard/optim/grad_norm.hpp"
#include "turns.hpp"

namespace hopshard::benchmarks {
namespace {

constexpr AdamSettings kSettings{.lr = 1e-4, .weight_decay = 0.1};
constexpr double kMaxNorm = 1.0;

/// What one arm updates; all begin alike.
struct State {
  explicit State(const at::Tensor& values)
      : master(values.clone()),
        exp_avg(at::zeros_like(values)),
        exp_avg_sq(at::zeros_like(values)),
        shard(values.to(at::kBFloat16)) {}

  at::Tensor master;
  at::Tensor exp_avg;
  at::Tensor exp_avg_sq;
  at::Tensor shard;
  std::int64_t step = 0;
};

std::span<float> span_of(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr<float>(), static_cast<std::size_t>(tensor.numel())};
}

std::span<const float> const_span_of(const at::Tensor& tensor) { return span_of(tensor); }

std::span<std::uint16_t> bits_of(const at::Tensor& tensor) {
  return {static_cast<std::uint16_t*>(tensor.mutable_data_ptr()),
          static_cast<std::size_t>(tensor.numel())};
}

double clipping_factor(double norm) { return std::min(1.0, kMaxNorm / (norm + 1e-6)); }

void torch_adamw(State& state, const at::Tensor& grad) {
  const at::Tensor step = at::full({}, static_cast<double>(++state.step), at::kFloat);
  at::_fused_adamw_({state.master}, {grad}, {state.exp_avg}, {state.exp_avg_sq}, {}, {step},
                    kSettings.lr, kSettings.beta1, kSettings.beta2, kSettings.weight_decay,
                    kSettings.eps, /*amsgrad=*/false, /*maximize=*/false);
}

void run(long mib, int num_rounds) {
  at::set_num_threads(1);
  const std::int64_t numel = (std::int64_t{mib} << 20) / 4;
  const double gigabytes = static_cast<double>(numel) * 1e-9;
  const at::Tensor values = at::randn({numel});
  const at::Tensor grad = at::randn({numel}).mul_(1e-2);
  const at::Tensor torch_grad = grad.clone();  // Clipping writes it.
  State ours(values);
  State torchs(values);
  State our_tail(values);
  State torch_tail(values);
  // As large as all that a step touches, so that no cache holds it.
  const std::size_t copied_bytes = static_cast<std::size_t>(numel) * 16;
  const at::Tensor from = at::full({static_cast<std::int64_t>(copied_bytes)}, 1, at::kByte);
  const at::Tensor to = at::zeros_like(from);

  const auto same = [](const State& a, const State& b) {
    return a.step != b.step || at::allclose(a.master, b.master, 1e-5, 1e-7);
  };
  std::vector<Case> cases = {
      {"copy (memcpy)", static_cast<double>(copied_bytes) * 2e-9,
       [&] { std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), copied_bytes); }},
      {"AdamW, hopshard", 28 * gigabytes,
       [&] {
         adam_step(span_of(ours.master), const_span_of(grad), span_of(ours.exp_avg),
                   span_of(ours.exp_avg_sq), kSettings, ++ours.step);
       }},
      {"AdamW, torch fused", 28 * gigabytes, [&] { torch_adamw(torchs, grad); },
       [&] { return same(ours, torchs); }},
      {"norm + clip + AdamW + bf16 shard, hopshard", 34 * gigabytes,
       [&] {
         const double norm = std::sqrt(sum_of_squares(const_span_of(grad)));
         adam_step(span_of(our_tail.master), const_span_of(grad), span_of(our_tail.exp_avg),
                   span_of(our_tail.exp_avg_sq), kSettings, ++our_tail.step, clipping_factor(norm),
                   bits_of(our_tail.shard));
       }},
      {"norm + clip + AdamW + bf16 shard, torch", 34 * gigabytes,
       [&] {
         const at::Tensor norm = at::linalg_vector_norm(torch_grad);
         torch_grad.mul_(norm.add(1e-6).reciprocal().mul(kMaxNorm).clamp_max(1.0));
         torch_adamw(torch_tail, torch_grad);
         torch_tail.shard.copy_(torch_tail.master);
       },
       [&] {
         return same(our_tail, torch_tail) &&
                at::allclose(our_tail.shard.to(at::kFloat), torch_tail.shard.to(at::kFloat), 1e-2);
       }},
  };
  take_turns(cases, num_rounds);

  std::printf("AdamW over %ld MiB of fp32 parameters\n", mib);
  print_cases(cases);
  const double copy_rate = cases[0].gigabytes / seconds_of(cases[0]);
  print_figure("AdamW: share of the copy's memory bandwidth (28 B per element)",
               cases[1].gigabytes / seconds_of(cases[1]) / copy_rate, 0.90);
  print_figure("the same of torch's fused AdamW",
               cases[2].gigabytes / seconds_of(cases[2]) / copy_rate);
  print_figure("AdamW: times as fast as torch's fused", seconds_of(cases[2]) / seconds_of(cases[1]),
               0.97);
  print_figure("norm + clip + AdamW + bf16 shard: times as fast as torch",
               seconds_of(cases[4]) / seconds_of(cases[3]), 1.30);
}

}  // namespace
}  // namespace hopshard::benchmarks

int main(int argc, char** argv) {
  using namespace hopshard::benchmarks;
  return run_benchmark(argc, argv, "parameters", run);
}
