// How long a collective takes by the flat and by the two-level algorithm, from two numbers per kind
// of link, and which of both to take (docs/algorithms.md has the formulas and where they come
// from). Pure: tested for thousands of ranks. Next: collectives/select.hpp.
#pragma once

#include <cstdint>
#include <string_view>

namespace hopshard {

/// A message of b bytes takes alpha_us + b / gb_per_s.
struct LinkCost {
  double alpha_us = 0;  ///< Of a step, whatever its size.
  double gb_per_s = 1;  ///< 1e9 bytes per second.
};

struct NodeLinkCosts {
  LinkCost intra_node;  ///< As one rank sees it while all ranks of its node send.
  LinkCost inter_node;  ///< Of a whole node: its ranks share it.
};

/// N nodes with k ranks of the group each.
struct NodeShape {
  int num_nodes = 1;
  int ranks_per_node = 1;
};

enum class CollectiveOp : std::uint8_t {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kBarrier
};
enum class Algorithm { kFlat, kHierarchical };

[[nodiscard]] std::string_view to_string(CollectiveOp op);
[[nodiscard]] std::string_view to_string(Algorithm algorithm);

/// Microseconds that the model predicts.
/// @param bytes  of the whole buffer: p * n elements of all_gather and reduce_scatter, n of others.
/// @throws InvalidArgument  no nodes or ranks, negative sizes or latencies, no bandwidth.
[[nodiscard]] double predict_us(CollectiveOp op, Algorithm algorithm, const NodeShape& shape,
                                std::int64_t bytes, const NodeLinkCosts& costs);

/// The faster one; the flat one if they are equal, and always on one node or with one rank per
/// node. Depends on its arguments alone, so ranks that agree on them agree on the algorithm.
[[nodiscard]] Algorithm choose_algorithm(CollectiveOp op, const NodeShape& shape,
                                         std::int64_t bytes, const NodeLinkCosts& costs);

}  // namespace hopshard
