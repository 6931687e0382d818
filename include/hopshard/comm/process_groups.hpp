// The three groups that one rank needs (D1), as plain Groups and as communicators. How a
// communicator is made is the caller's affair: see local.hpp, recording.hpp, c10d.hpp.
// Next: collectives/two_hop_sync.hpp.
#pragma once

#include <functional>

#include "hopshard/comm/communicator.hpp"
#include "hopshard/topology/group_layout.hpp"

namespace hopshard {

/// All ranks; "world[0-7]".
[[nodiscard]] Group make_world_group(const GroupLayout& layout, int rank);
/// The ranks that share one copy of the state, slots in slice order (D2); "sharding[0-3]".
[[nodiscard]] Group make_sharding_group(const GroupLayout& layout, int rank);
/// The ranks that own the same slice, one per sharding group; "replication[0,4]".
[[nodiscard]] Group make_replication_group(const GroupLayout& layout, int rank);

/// Makes the communicator of one of the caller's own groups.
using CommunicatorFactory = std::function<CommunicatorPtr(const Group&)>;

struct ProcessGroups {
  CommunicatorPtr world;
  CommunicatorPtr sharding;
  CommunicatorPtr replication;
};

/// Calls `factory` for the caller's world, sharding and replication group, in this order, and
/// checks what it returns.
/// @throws InvalidArgument  `rank` is not in the layout, or the factory returned a communicator
///                          of another group; ConfigError if it returned none.
[[nodiscard]] ProcessGroups make_process_groups(const GroupLayout& layout, int rank,
                                                const CommunicatorFactory& factory);

}  // namespace hopshard
