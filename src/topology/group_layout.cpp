// Degrees and groups by plain arithmetic on ranks. Ranks are node-contiguous and sharding groups
// are blocks of consecutive ranks, so every question has a closed form; nothing is stored.
#include "hopshard/topology/group_layout.hpp"

#include <algorithm>
#include <string>

#include "hopshard/core/error.hpp"

namespace hopshard {
namespace {

std::string legal_degrees(int world_size) {
  std::string text;
  for (int degree = 1; degree <= world_size; ++degree) {
    if (world_size % degree != 0) continue;
    if (!text.empty()) text += ", ";
    text += std::to_string(degree);
  }
  return text;
}

void check_rank(int rank, int world_size) {
  HOPSHARD_CHECK(rank >= 0 && rank < world_size, InvalidArgument, "rank ", rank,
                 " is outside the world of ", world_size, " ranks (0..", world_size - 1, ")");
}

}  // namespace

GroupLayout::GroupLayout(int world_size, int ranks_per_node, int degree)
    : world_size_(world_size), ranks_per_node_(ranks_per_node), degree_(degree) {
  HOPSHARD_CHECK(world_size >= 1, ConfigError, "world size must be at least 1, got ", world_size);
  HOPSHARD_CHECK(ranks_per_node >= 1, ConfigError, "ranks per node must be at least 1, got ",
                 ranks_per_node);
  // The list of divisors is built only on the way to the error.
  HOPSHARD_CHECK(degree >= 1 && degree <= world_size && world_size % degree == 0, ConfigError,
                 "sharding degree ", degree, " does not divide the world size ", world_size,
                 "; legal degrees are ", legal_degrees(world_size));
}

int GroupLayout::node_of(int rank) const {
  check_rank(rank, world_size_);
  return rank / ranks_per_node_;
}

int GroupLayout::local_rank_of(int rank) const {
  check_rank(rank, world_size_);
  return rank % ranks_per_node_;
}

std::vector<int> GroupLayout::sharding_group(int rank) const {
  check_rank(rank, world_size_);
  const int first = rank - rank % degree_;
  std::vector<int> ranks;
  ranks.reserve(static_cast<std::size_t>(degree_));
  for (int member = first; member < first + degree_; ++member) ranks.push_back(member);
  return ranks;
}

std::vector<int> GroupLayout::replication_group(int rank) const {
  check_rank(rank, world_size_);
  std::vector<int> ranks;
  ranks.reserve(static_cast<std::size_t>(num_replicas()));
  for (int member = rank % degree_; member < world_size_; member += degree_) {
    ranks.push_back(member);
  }
  return ranks;
}

std::vector<int> GroupLayout::intra_node_group(int rank) const {
  check_rank(rank, world_size_);
  const int place = rank % degree_;
  const int local_rank = rank % ranks_per_node_;
  // Counted from the rank outwards, because "first rank of the next node" may overflow: a single
  // node is often declared with a huge ranks_per_node.
  const int begin = rank - std::min(place, local_rank);
  const int end = rank + std::min(degree_ - place, ranks_per_node_ - local_rank);
  std::vector<int> ranks;
  for (int member = begin; member < end; ++member) ranks.push_back(member);
  return ranks;
}

std::vector<int> GroupLayout::inter_node_group(int rank) const {
  check_rank(rank, world_size_);
  const int group_first = rank - rank % degree_;
  // Steps back to the first node of the group that has this local place.
  const int nodes_before = (rank - group_first) / ranks_per_node_;
  const int num_members = nodes_before + (group_first + degree_ - 1 - rank) / ranks_per_node_ + 1;
  std::vector<int> ranks;
  ranks.reserve(static_cast<std::size_t>(num_members));
  for (int i = -nodes_before; i < num_members - nodes_before; ++i) {
    ranks.push_back(rank + i * ranks_per_node_);
  }
  return ranks;
}

bool GroupLayout::is_hierarchical() const noexcept {
  return ranks_per_node_ >= 2 && degree_ % ranks_per_node_ == 0 && degree_ / ranks_per_node_ >= 2;
}

int GroupLayout::slice_of(int rank) const {
  check_rank(rank, world_size_);
  const int place = rank % degree_;
  if (!is_hierarchical()) return place;
  // SliceOrder holds the same bijection for whole groups; topology lies below layout and must not
  // include it. The two are held equal by test_layout.
  const int num_nodes = degree_ / ranks_per_node_;
  return (place % ranks_per_node_) * num_nodes + place / ranks_per_node_;
}

}  // namespace hopshard
