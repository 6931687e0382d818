// Which ranks shard together and which replicate each other (D1). Pure: plain integers, no
// communicator; tested for thousands of ranks. Next: layout/slice_order.hpp.
//
//   world of n = 8, degree p = 4, k = 2 ranks per node (nodes: 01 23 45 67)
//     sharding groups      {0 1 2 3} {4 5 6 7}       blocks of p consecutive ranks
//     replication groups   {0 4} {1 5} {2 6} {3 7}   strided by p
//     intra-node groups    {0 1} {2 3} {4 5} {6 7}   the part of a sharding group on one node
//     inter-node groups    {0 2} {1 3} {4 6} {5 7}   same local place, one per node ("rail")
#pragma once

#include <vector>

namespace hopshard {

/// Degrees of a world and the groups that follow from them.
class GroupLayout {
 public:
  /// @param world_size      n >= 1.
  /// @param ranks_per_node  k >= 1; the last node may hold fewer.
  /// @param degree          p, ranks of a sharding group.
  /// @throws ConfigError  unless 1 <= p <= n and p divides n; the text names the legal degrees.
  GroupLayout(int world_size, int ranks_per_node, int degree);

  [[nodiscard]] int world_size() const noexcept { return world_size_; }
  [[nodiscard]] int ranks_per_node() const noexcept { return ranks_per_node_; }
  [[nodiscard]] int degree() const noexcept { return degree_; }
  /// r = n / p, the sharding groups that hold the same state.
  [[nodiscard]] int num_replicas() const noexcept { return world_size_ / degree_; }

  [[nodiscard]] int node_of(int rank) const;
  [[nodiscard]] int local_rank_of(int rank) const;

  /// Ranks in ascending (node-contiguous) order.
  [[nodiscard]] std::vector<int> sharding_group(int rank) const;
  [[nodiscard]] std::vector<int> replication_group(int rank) const;
  /// Members of `rank`'s sharding group on its node; requires `is_hierarchical()` or one node.
  [[nodiscard]] std::vector<int> intra_node_group(int rank) const;
  /// Members of `rank`'s sharding group with its local place, one per node.
  [[nodiscard]] std::vector<int> inter_node_group(int rank) const;

  /// True if every sharding group consists of N >= 2 whole nodes of k >= 2 ranks, so that the
  /// two-level algorithms apply.
  [[nodiscard]] bool is_hierarchical() const noexcept;

  /// The slice that `rank` owns in its sharding group: l * N + j (D2) when hierarchical, its
  /// place in the group otherwise.
  [[nodiscard]] int slice_of(int rank) const;

 private:
  int world_size_;
  int ranks_per_node_;
  int degree_;
};

}  // namespace hopshard
