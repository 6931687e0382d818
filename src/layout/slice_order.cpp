// The bijection l * N + j and its inverse.
#include "hopshard/layout/slice_order.hpp"

#include <limits>

#include "hopshard/core/error.hpp"

namespace hopshard {

SliceOrder::SliceOrder(int num_nodes, int ranks_per_node)
    : num_nodes_(num_nodes), ranks_per_node_(ranks_per_node) {
  HOPSHARD_CHECK(num_nodes >= 1 && ranks_per_node >= 1, InvalidArgument,
                 "slice order needs at least one node and one rank per node, got ", num_nodes,
                 " nodes of ", ranks_per_node, " ranks");
  HOPSHARD_CHECK(num_nodes <= std::numeric_limits<int>::max() / ranks_per_node, InvalidArgument,
                 "slice order of ", num_nodes, " nodes of ", ranks_per_node,
                 " ranks has more slices than an int can count");
}

int SliceOrder::slice_of(NodeAndLocalRank place) const {
  HOPSHARD_CHECK(place.node >= 0 && place.node < num_nodes_ && place.local_rank >= 0 &&
                     place.local_rank < ranks_per_node_,
                 InvalidArgument, "node ", place.node, ", local rank ", place.local_rank,
                 " is outside a group of ", num_nodes_, " nodes of ", ranks_per_node_, " ranks");
  return place.local_rank * num_nodes_ + place.node;
}

NodeAndLocalRank SliceOrder::place_of(int slice) const {
  HOPSHARD_CHECK(slice >= 0 && slice < size(), InvalidArgument, "slice ", slice,
                 " is outside a group of ", size(), " slices");
  return {.node = slice % num_nodes_, .local_rank = slice / num_nodes_};
}

std::vector<int> SliceOrder::slots() const {
  std::vector<int> slots;
  slots.reserve(static_cast<std::size_t>(size()));
  for (int node = 0; node < num_nodes_; ++node) {
    for (int local_rank = 0; local_rank < ranks_per_node_; ++local_rank) {
      slots.push_back(slice_of({.node = node, .local_rank = local_rank}));
    }
  }
  return slots;
}

}  // namespace hopshard
