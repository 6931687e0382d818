// Four ranks, as threads of this process, keep a weight and a bias: cut in two, and that twice.
// Shows what find_package(hopshard) brings; a training loop is in ../cpp/train_gpt2.cpp.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>

#include <cstdio>
#include <future>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hopshard/comm/local.hpp"
#include "hopshard/comm/process_groups.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/core/version.hpp"
#include "hopshard/runtime/shard_engine.hpp"
#include "hopshard/topology/group_layout.hpp"

namespace {

constexpr int kWorldSize = 4;
constexpr int kDegree = 2;

/// What one rank keeps, in words. Collective: all ranks.
std::string partition(hopshard::LocalHub& hub, int rank) {
  const hopshard::GroupLayout layout(kWorldSize, /*ranks_per_node=*/2, kDegree);
  hopshard::ProcessGroups groups = hopshard::make_process_groups(
      layout, rank, [&](const hopshard::Group& group) { return hub.communicator(group); });

  const at::Tensor weight = at::arange(6000, at::kFloat).view({60, 100}).set_requires_grad(true);
  const at::Tensor bias = at::ones({60}).set_requires_grad(true);
  hopshard::ShardEngine engine(
      {{.name = "root", .parameter_names = {"weight", "bias"}, .parameters = {weight, bias}}},
      std::move(groups), {});

  std::string text = "rank " + std::to_string(rank) + " keeps";
  for (const hopshard::ParameterPlace& place : engine.store().parameters()) {
    text += hopshard::detail::concatenate(" ", place.piece_numel, " of ", place.parameter.numel(),
                                          " elements of ", place.name, ",");
  }
  engine.pin(0);  // Gathers: both are whole until unpin.
  text += hopshard::detail::concatenate(" and can gather all: their sums are ",
                                        weight.sum().item<double>(), " and ",
                                        bias.sum().item<double>());
  engine.unpin(0, /*write_back=*/false);
  return text;
}

}  // namespace

int main() {
  const std::string_view version = hopshard::version();
  std::printf("hopshard %.*s\n", static_cast<int>(version.size()), version.data());
  hopshard::LocalHub hub(kWorldSize);
  std::vector<std::future<std::string>> ranks;
  ranks.reserve(kWorldSize);
  for (int rank = 0; rank < kWorldSize; ++rank) {
    ranks.push_back(std::async(std::launch::async, [&hub, rank] { return partition(hub, rank); }));
  }
  for (std::future<std::string>& rank : ranks) {
    std::printf("%s\n", rank.get().c_str());
  }
}
