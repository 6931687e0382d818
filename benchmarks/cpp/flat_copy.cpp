// A gradient's way into the flat buffer, on one thread: ours, torch's operators in sequence,
// FSDP2's copy-in, and what memory can do.
//
//   bench_flat_copy [MiB of fp32 gradients, 64] [rounds, 15]
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_chunk_cat.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <cstring>

#include "runtime/scaled_copy.hpp"
#include "turns.hpp"

namespace hopshard::benchmarks {
namespace {

constexpr double kScale = 0.25;
constexpr int kNumParameters = 12;  // Of one unit.
constexpr int kNumRanks = 4;

void run(long mib, int num_rounds) {
  at::set_num_threads(1);
  const std::int64_t numel = (std::int64_t{mib} << 20) / 4 / kNumParameters / 64 * 64;
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> narrow;
  for (int i = 0; i < kNumParameters; ++i) {
    gradients.push_back(at::randn({kNumRanks, numel / kNumRanks}));
    narrow.push_back(gradients.back().to(at::kBFloat16));
  }
  const std::int64_t total = numel * kNumParameters;
  const double elements = static_cast<double>(total) * 1e-9;
  at::Tensor flat = at::zeros({total});
  const at::Tensor source = at::randn({total});
  at::Tensor chunks = at::empty({kNumRanks, total / kNumRanks});
  const auto view = [&](int i) {
    return flat.narrow(0, i * numel, numel).view({kNumRanks, numel / kNumRanks});
  };
  const auto each = [&](const std::vector<at::Tensor>& from, const auto& copy) {
    for (int i = 0; i < kNumParameters; ++i) {
      at::Tensor to = view(i);
      copy(to, from[static_cast<std::size_t>(i)]);
    }
  };
  const auto is_scaled = [&](const std::vector<at::Tensor>& from) {
    bool is_right = true;
    each(from, [&](const at::Tensor& to, const at::Tensor& gradient) {
      is_right = is_right && at::allclose(to, gradient.to(at::kFloat).mul(kScale));
    });
    return is_right;
  };
  const auto ours = [](const at::Tensor& to, const at::Tensor& from) {
    copy_scaled(to, from, kScale);
  };
  const auto torchs = [](at::Tensor& to, const at::Tensor& from) { to.copy_(from).mul_(kScale); };

  std::vector<Case> cases = {
      {"copy of as many fp32 (memcpy)", 8 * elements,
       [&] {
         std::memcpy(flat.mutable_data_ptr(), source.const_data_ptr(),
                     static_cast<std::size_t>(total) * 4);
       }},
      {"fp32 gradients, hopshard: scaled copy", 8 * elements, [&] { each(gradients, ours); },
       [&] { return is_scaled(gradients); }},
      {"fp32 gradients, torch: copy_, mul_", 8 * elements, [&] { each(gradients, torchs); },
       [&] { return is_scaled(gradients); }},
      {"fp32 gradients, FSDP2's copy-in: _chunk_cat, div_", 8 * elements,
       [&] {
         at::_chunk_cat_out(chunks, gradients, 0, kNumRanks);
         chunks.mul_(kScale);
       }},
      {"bf16 gradients, hopshard: cast and scaled", 6 * elements, [&] { each(narrow, ours); },
       [&] { return is_scaled(narrow); }},
      {"bf16 gradients, torch: copy_, mul_", 6 * elements, [&] { each(narrow, torchs); },
       [&] { return is_scaled(narrow); }},
  };
  take_turns(cases, num_rounds);
  std::printf("%d gradients, %ld MiB in fp32\n", kNumParameters, mib);
  print_cases(cases);
  print_figure("fp32: share of a plain copy", seconds_of(cases[0]) / seconds_of(cases[1]));
  print_figure("fp32: times as fast as FSDP2's copy-in",
               seconds_of(cases[3]) / seconds_of(cases[1]));
  print_figure("bf16: times as fast as torch's two passes",
               seconds_of(cases[5]) / seconds_of(cases[4]));
}

}  // namespace
}  // namespace hopshard::benchmarks

int main(int argc, char** argv) {
  using namespace hopshard::benchmarks;
  return run_benchmark(argc, argv, "gradients", run);
}
