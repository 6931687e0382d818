#include "hopshard/topology/link_cost.hpp"

#include <algorithm>

#include "hopshard/core/error.hpp"

namespace hopshard {
namespace {

constexpr double kBytesPerUsOfOneGbPerS = 1e3;

double step_us(const LinkCost& link, double bytes) {
  return link.alpha_us + bytes / (link.gb_per_s * kBytesPerUsOfOneGbPerS);
}

void check_link(const LinkCost& link, std::string_view name) {
  // Written so that NaN is refused too.
  HOPSHARD_CHECK(link.alpha_us >= 0 && link.gb_per_s > 0, InvalidArgument, "the cost of the ", name,
                 " link, ", link.alpha_us, " us and ", link.gb_per_s,
                 " GB/s, makes no sense: a latency of at least 0 and a bandwidth above 0 are "
                 "needed; measure them again");
}

/// A step of a ring over all ranks ends when its slowest hop does; it has one hop out of each node.
double flat_step_us(const NodeShape& shape, double bytes, const NodeLinkCosts& costs) {
  double slowest = 0;
  if (shape.ranks_per_node > 1) {
    slowest = step_us(costs.intra_node, bytes);
  }
  if (shape.num_nodes > 1) {
    slowest = std::max(slowest, step_us(costs.inter_node, bytes));
  }
  return slowest;
}

double flat_us(CollectiveOp op, const NodeShape& shape, double bytes, const NodeLinkCosts& costs) {
  const double p = static_cast<double>(shape.num_nodes) * shape.ranks_per_node;
  const double round_us = (p - 1) * flat_step_us(shape, bytes / p, costs);
  switch (op) {
    case CollectiveOp::kAllGather:
    case CollectiveOp::kReduceScatter:
      return round_us;
    case CollectiveOp::kAllReduce:
      return 2 * round_us;
    case CollectiveOp::kBroadcast:
      // The pieces follow each other through the ring: p - 1 latencies, but the bytes only once.
      return p > 1 ? (p - 2) * flat_step_us(shape, 0, costs) + flat_step_us(shape, bytes, costs)
                   : 0;
    case CollectiveOp::kBarrier:
      return (p - 1) * flat_step_us(shape, 0, costs);
  }
  return 0;
}

double hierarchical_us(CollectiveOp op, const NodeShape& shape, double bytes,
                       const NodeLinkCosts& costs) {
  const double num_nodes = shape.num_nodes;
  const double ranks_per_node = shape.ranks_per_node;
  // k rails take their step at once over their node's one link, each with 1/p of the bytes.
  const double inter_node_us = (num_nodes - 1) * step_us(costs.inter_node, bytes / num_nodes);
  const double intra_node_us =
      (ranks_per_node - 1) * step_us(costs.intra_node, bytes / ranks_per_node);
  switch (op) {
    case CollectiveOp::kAllGather:
    case CollectiveOp::kReduceScatter:
      return inter_node_us + intra_node_us;
    case CollectiveOp::kAllReduce:
      return 2 * (inter_node_us + intra_node_us);
    case CollectiveOp::kBroadcast:
      return flat_us(op, {.num_nodes = shape.num_nodes, .ranks_per_node = 1}, bytes, costs) +
             flat_us(op, {.num_nodes = 1, .ranks_per_node = shape.ranks_per_node}, bytes, costs);
    case CollectiveOp::kBarrier:
      return (num_nodes - 1) * costs.inter_node.alpha_us +
             (ranks_per_node - 1) * costs.intra_node.alpha_us;
  }
  return 0;
}

}  // namespace

std::string_view to_string(CollectiveOp op) {
  switch (op) {
    case CollectiveOp::kAllGather:
      return "all_gather";
    case CollectiveOp::kReduceScatter:
      return "reduce_scatter";
    case CollectiveOp::kAllReduce:
      return "all_reduce";
    case CollectiveOp::kBroadcast:
      return "broadcast";
    case CollectiveOp::kBarrier:
      return "barrier";
  }
  return "";
}

std::string_view to_string(Algorithm algorithm) {
  return algorithm == Algorithm::kFlat ? "flat" : "hierarchical";
}

double predict_us(CollectiveOp op, Algorithm algorithm, const NodeShape& shape, std::int64_t bytes,
                  const NodeLinkCosts& costs) {
  HOPSHARD_CHECK(shape.num_nodes >= 1 && shape.ranks_per_node >= 1, InvalidArgument,
                 "a group has at least one node and one rank on each, not ", shape.num_nodes,
                 " nodes with ", shape.ranks_per_node, " ranks");
  HOPSHARD_CHECK(bytes >= 0, InvalidArgument, to_string(op), " of ", bytes, " bytes");
  check_link(costs.intra_node, "intra-node");
  check_link(costs.inter_node, "inter-node");
  const auto size = static_cast<double>(bytes);
  return algorithm == Algorithm::kFlat ? flat_us(op, shape, size, costs)
                                       : hierarchical_us(op, shape, size, costs);
}

Algorithm choose_algorithm(CollectiveOp op, const NodeShape& shape, std::int64_t bytes,
                           const NodeLinkCosts& costs) {
  const double flat = predict_us(op, Algorithm::kFlat, shape, bytes, costs);
  const double hierarchical = predict_us(op, Algorithm::kHierarchical, shape, bytes, costs);
  const bool has_two_levels = shape.num_nodes > 1 && shape.ranks_per_node > 1;
  return has_two_levels && hierarchical < flat ? Algorithm::kHierarchical : Algorithm::kFlat;
}

}  // namespace hopshard
