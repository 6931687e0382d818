// Two-level groups in a world of threads: N nodes with k ranks each, over `local`.
#pragma once

#include <functional>
#include <utility>

#include "hopshard/collectives/hierarchical_communicator.hpp"
#include "hopshard/comm/process_groups.hpp"
#include "hopshard/layout/slice_order.hpp"
#include "support/thread_world.hpp"

namespace hopshard::testing {

/// All ranks, slots in slice order.
inline Group sliced_world(int num_nodes, int ranks_per_node, int rank) {
  return world_of(num_nodes * ranks_per_node, rank, SliceOrder(num_nodes, ranks_per_node).slots());
}

/// The parts of a group that lies node after node; also for N or k of 1.
inline NodeParts parts_of(const Group& group, int num_nodes, int ranks_per_node) {
  NodeParts parts{.num_nodes = num_nodes,
                  .ranks_per_node = ranks_per_node,
                  .intra_node = {group.name + "_intra_node", {}, group.rank % ranks_per_node, {}},
                  .inter_node = {group.name + "_inter_node", {}, group.rank / ranks_per_node, {}}};
  for (int member = 0; member < group.size(); ++member) {
    const int global_rank = group.ranks[static_cast<std::size_t>(member)];
    if (member / ranks_per_node == parts.inter_node.rank) {
      parts.intra_node.ranks.push_back(global_rank);
    }
    if (member % ranks_per_node == parts.intra_node.rank) {
      parts.inter_node.ranks.push_back(global_rank);
    }
  }
  return parts;
}

/// Puts something around an inner communicator; `is_inter_node` tells which.
using Decorate = std::function<CommunicatorPtr(CommunicatorPtr inner, bool is_inter_node)>;

inline CommunicatorPtr make_two_level(LocalHub& hub, const Group& group, int num_nodes,
                                      int ranks_per_node, HierarchicalOptions options = {},
                                      const Decorate& decorate = nullptr) {
  const NodeParts parts = parts_of(group, num_nodes, ranks_per_node);
  CommunicatorPtr intra_node = hub.communicator(parts.intra_node);
  CommunicatorPtr inter_node = hub.communicator(parts.inter_node);
  if (decorate) {
    intra_node = decorate(std::move(intra_node), /*is_inter_node=*/false);
    inter_node = decorate(std::move(inter_node), /*is_inter_node=*/true);
  }
  return make_hierarchical_communicator(group, std::move(intra_node), std::move(inter_node),
                                        std::move(options));
}

}  // namespace hopshard::testing
