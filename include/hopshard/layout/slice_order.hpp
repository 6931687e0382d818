// Slice order (D2): (node j, local rank l) owns slice l * N + j, so that an inter-node gather
// lands contiguous slices and an intra-node gather of those blocks finishes in order: no re-layout.
//
//   N = 2 nodes, k = 2 ranks each:  rank   0    1    2    3
//                                   (j,l) 0,0  0,1  1,0  1,1
//                                   slice  0    2    1    3
// Pure. Next: flat_layout.hpp.
#pragma once

#include <vector>

namespace hopshard {

struct NodeAndLocalRank {
  int node = 0;
  int local_rank = 0;
  bool operator==(const NodeAndLocalRank&) const = default;
};

/// A bijection between places in a sharding group and slices.
class SliceOrder {
 public:
  /// @param num_nodes N >= 1, @param ranks_per_node k >= 1.
  /// @throws InvalidArgument
  SliceOrder(int num_nodes, int ranks_per_node);

  [[nodiscard]] int size() const noexcept { return num_nodes_ * ranks_per_node_; }
  [[nodiscard]] int slice_of(NodeAndLocalRank place) const;
  [[nodiscard]] NodeAndLocalRank place_of(int slice) const;
  /// Slices by group rank q = j * k + l: the `slots` of a Group.
  [[nodiscard]] std::vector<int> slots() const;

 private:
  int num_nodes_;
  int ranks_per_node_;
};

}  // namespace hopshard
