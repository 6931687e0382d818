// A communicator of whole nodes made of two others: one inside the node, one between the nodes.
// Fewer bytes and fewer steps over the slow links; docs/algorithms.md has the figures and a
// picture.
//
//   N = 2 nodes of k = 2 ranks, slots in slice order (D2); rank (node j, local place l)
//     all_gather       between nodes: (j,0) gather blocks 0 1, (j,1) gather blocks 2 3, in place;
//                      then inside: the halves 01 and 23, in place. No copy puts them in order.
//     reduce_scatter   the mirror: inside, then between nodes
//     all_reduce       inside: reduce_scatter; between: all_reduce of 1/k; inside: all_gather
//     broadcast        between the nodes on the root's rail; then inside
//
// A stage of a call runs beside the other stage of its neighbours, so both links work at once.
// Whether two levels pay is another question: select.hpp.
#pragma once

#include <chrono>

#include "hopshard/comm/communicator.hpp"
#include "hopshard/comm/store.hpp"

namespace hopshard {

struct HierarchicalOptions {
  std::chrono::milliseconds timeout{60'000};  ///< Of calls that name none; from their issue on.
  /// Where ranks that fail leave word for those that wait for somebody else, and ranks that differ
  /// find out. Without it they learn of it when the rank that they wait for arrives, or at their
  /// time limit. Fresh keys: prefix it if the same group is made again.
  StorePtr store;
};

/// True if the group's slots are those of D2 (slot l * N + j), which the two-level all_gather and
/// reduce_scatter need.
[[nodiscard]] bool has_slice_order(const Group& group, int num_nodes, int ranks_per_node);

/// A two-level communicator of a group of N nodes with k ranks each, node after node.
///
/// Slots: in slice order, or in the order of the ranks. With the latter, and N and k above 1,
/// all_gather and reduce_scatter throw InvalidArgument: they would need a copy; use a flat one.
/// Sums: within the node, then over the nodes; 16-bit types are rounded after each of both.
/// Grouping: group_begin() and group_end() do nothing; calls are launched at once.
/// Splitting: into parts that take the same places on some of the nodes; others throw
/// InvalidArgument.
/// Memory: from the intra-node communicator; registered with both.
/// Failures: after any, both inner communicators are aborted and this one stays unusable.
/// Threads: owns two, one per level (and one that watches `options.store`). Its destructor waits
/// for operations in flight, at most until their time limits.
///
/// @param intra_node  of the members on this rank's node, in the order of the group; `rank()` is l.
/// @param inter_node  of the members with this rank's l, one per node; `rank()` is j. Both belong
///                    to this communicator from here on: nobody else may call them.
/// @throws InvalidArgument  null, not these members, not these slots, or no positive timeout.
[[nodiscard]] CommunicatorPtr make_hierarchical_communicator(Group group,
                                                             CommunicatorPtr intra_node,
                                                             CommunicatorPtr inter_node,
                                                             HierarchicalOptions options = {});

}  // namespace hopshard
