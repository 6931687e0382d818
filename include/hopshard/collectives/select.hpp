// A communicator that picks the flat or the two-level algorithm for each call, by the cost model of
// topology/link_cost.hpp. The choice depends on the call's size and on what all ranks were given
// alike, so all ranks choose the same. Next: two_hop_sync.hpp.
#pragma once

#include <cstdint>
#include <memory>

#include "hopshard/comm/communicator.hpp"
#include "hopshard/comm/store.hpp"
#include "hopshard/metrics/meter.hpp"
#include "hopshard/topology/link_cost.hpp"

namespace hopshard {

enum class Selection { kByCost, kFlat, kHierarchical };

/// All but the meter must be the same on all ranks.
struct SelectOptions {
  NodeShape shape;  ///< Of the group; N * k is its size if there is a hierarchical one.
  NodeLinkCosts costs;
  /// kFlat, kHierarchical: always this one, for comparisons; flat still where it alone can.
  Selection selection = Selection::kByCost;
  /// See HierarchicalOptions; here it finds ranks whose calls went different ways.
  StorePtr store;
  /// Optional: counts calls under "algorithm/<op>/flat" and "algorithm/<op>/hierarchical".
  std::shared_ptr<Meter> meter;
};

/// Passes each call on to one of both. Calls of both kinds may be in flight at once.
///
/// all_gather and reduce_scatter of a group whose slots are not in slice order are always flat.
/// A part that split() makes has two levels if it takes the same places on several nodes; its
/// links are taken to cost the same. Memory comes from the hierarchical one, if there is one.
///
/// @param hierarchical  null: every call is flat.
/// @throws InvalidArgument  null flat one, the two differ in ranks or slots, or a bad shape or
/// cost.
[[nodiscard]] CommunicatorPtr make_selecting_communicator(CommunicatorPtr flat,
                                                          CommunicatorPtr hierarchical,
                                                          SelectOptions options);

/// What make_selecting_communicator's result picks for a call of this size.
[[nodiscard]] Algorithm select_algorithm(CollectiveOp op, std::int64_t bytes, const Group& group,
                                         bool has_hierarchical, const SelectOptions& options);

}  // namespace hopshard
