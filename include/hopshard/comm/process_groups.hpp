// The groups that one rank needs (D1), as plain Groups and as communicators. How a
// communicator is made is the caller's affair: see local.hpp, recording.hpp, c10d.hpp.
// Next: collectives/two_hop_sync.hpp.
#pragma once

#include <functional>
#include <optional>

#include "hopshard/comm/communicator.hpp"
#include "hopshard/topology/group_layout.hpp"

namespace hopshard {

/// All ranks; "world[0-7]".
[[nodiscard]] Group make_world_group(const GroupLayout& layout, int rank);
/// The ranks that share one copy of the state, slots in slice order (D2); "sharding[0-3]".
[[nodiscard]] Group make_sharding_group(const GroupLayout& layout, int rank);
/// The ranks that own the same slice, one per sharding group; "replication[0,4]".
[[nodiscard]] Group make_replication_group(const GroupLayout& layout, int rank);

/// The ranks that gather from secondary shards (see schedule.hpp): `degree` neighbours of one
/// sharding group, which it divides; "secondary[0-1]".
[[nodiscard]] Group make_secondary_group(const GroupLayout& layout, int rank, int degree);

/// How a group lies on nodes, if two levels apply to it.
struct NodeParts {
  int num_nodes = 0;       ///< N >= 2.
  int ranks_per_node = 0;  ///< k >= 2; members of the group on each node.
  Group intra_node;        ///< Those on the caller's node; "sharding_intra_node[0-1]".
  Group inter_node;        ///< Those with the caller's place, one per node; "..._inter_node[0,2]".
};

/// The parts of `group` that a two-level communicator is made of. Works for all three groups of a
/// layout: its members on a node need not be neighbours, as in a replication group.
/// @param ranks_per_node  of the world: rank r is on node r / ranks_per_node.
/// @returns nothing unless the group's ranks lie node after node, k >= 2 on each of N >= 2.
/// @throws InvalidArgument  a bad group, or ranks_per_node below 1.
[[nodiscard]] std::optional<NodeParts> plan_node_parts(const Group& group, int ranks_per_node);

/// Makes the communicator of one of the caller's own groups.
using CommunicatorFactory = std::function<CommunicatorPtr(const Group&)>;

struct ProcessGroups {
  CommunicatorPtr world;
  CommunicatorPtr sharding;
  CommunicatorPtr replication;
  CommunicatorPtr secondary;  ///< Null: there are no secondary shards.
};

/// Calls `factory` for the caller's world, sharding, replication and secondary group, in this
/// order, and checks what it returns.
/// @param secondary_degree  0: no secondary group.
/// @throws InvalidArgument  `rank` is not in the layout, or the factory returned a communicator
///                          of another group; ConfigError if it returned none.
[[nodiscard]] ProcessGroups make_process_groups(const GroupLayout& layout, int rank,
                                                const CommunicatorFactory& factory,
                                                int secondary_degree = 0);

}  // namespace hopshard
