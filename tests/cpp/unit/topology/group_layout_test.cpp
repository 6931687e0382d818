// Groups are partitions of the world, agree among their members and match the formulas of D1, for
// every legal layout of small worlds and some of thousands of ranks.
#include "hopshard/topology/group_layout.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "hopshard/core/error.hpp"

namespace hopshard {
namespace {

using Ranks = std::vector<int>;

std::vector<GroupLayout> all_layouts(int max_world_size) {
  std::vector<GroupLayout> layouts;
  for (int world_size = 1; world_size <= max_world_size; ++world_size) {
    for (int ranks_per_node = 1; ranks_per_node <= world_size + 1; ++ranks_per_node) {
      for (int degree = 1; degree <= world_size; ++degree) {
        if (world_size % degree == 0) layouts.emplace_back(world_size, ranks_per_node, degree);
      }
    }
  }
  return layouts;
}

std::string describe(const GroupLayout& layout) {
  return "n=" + std::to_string(layout.world_size()) +
         " k=" + std::to_string(layout.ranks_per_node()) + " p=" + std::to_string(layout.degree());
}

/// Every rank is in exactly one group, every member names the same group, and it is ascending.
void expect_partition(const GroupLayout& layout, const std::function<Ranks(int)>& group_of) {
  Ranks times_seen(static_cast<std::size_t>(layout.world_size()), 0);
  for (int rank = 0; rank < layout.world_size(); ++rank) {
    const Ranks group = group_of(rank);
    ASSERT_TRUE(std::is_sorted(group.begin(), group.end())) << describe(layout);
    ASSERT_TRUE(std::binary_search(group.begin(), group.end(), rank)) << describe(layout);
    if (group.front() != rank) continue;
    for (const int member : group) {
      ASSERT_EQ(group_of(member), group) << describe(layout) << " rank " << rank;
      ++times_seen[static_cast<std::size_t>(member)];
    }
  }
  ASSERT_EQ(times_seen, Ranks(times_seen.size(), 1)) << describe(layout);
}

TEST(GroupLayout, ExampleOfTheHeader) {
  const GroupLayout layout(8, 2, 4);
  EXPECT_EQ(layout.sharding_group(5), (Ranks{4, 5, 6, 7}));
  EXPECT_EQ(layout.replication_group(5), (Ranks{1, 5}));
  EXPECT_EQ(layout.intra_node_group(5), (Ranks{4, 5}));
  EXPECT_EQ(layout.inter_node_group(5), (Ranks{5, 7}));
  EXPECT_EQ(layout.num_replicas(), 2);
  EXPECT_TRUE(layout.is_hierarchical());
  EXPECT_EQ(layout.node_of(5), 2);
  EXPECT_EQ(layout.local_rank_of(5), 1);
}

TEST(GroupLayout, GroupsPartitionEveryWorldUpTo24) {
  for (const GroupLayout& layout : all_layouts(24)) {
    expect_partition(layout, [&](int rank) { return layout.sharding_group(rank); });
    expect_partition(layout, [&](int rank) { return layout.replication_group(rank); });
    expect_partition(layout, [&](int rank) { return layout.intra_node_group(rank); });
    expect_partition(layout, [&](int rank) { return layout.inter_node_group(rank); });
    if (HasFatalFailure()) return;
  }
}

TEST(GroupLayout, ShardingAndReplicationGroupsMeetInOneRank) {
  for (const GroupLayout& layout : all_layouts(24)) {
    for (int rank = 0; rank < layout.world_size(); ++rank) {
      const Ranks sharding = layout.sharding_group(rank);
      const Ranks replication = layout.replication_group(rank);
      ASSERT_EQ(static_cast<int>(sharding.size()), layout.degree());
      ASSERT_EQ(static_cast<int>(replication.size()), layout.num_replicas());
      Ranks common;
      std::set_intersection(sharding.begin(), sharding.end(), replication.begin(),
                            replication.end(), std::back_inserter(common));
      ASSERT_EQ(common, Ranks{rank}) << describe(layout);
    }
  }
}

TEST(GroupLayout, ReplicasOwnTheSameSlice) {
  for (const GroupLayout& layout : all_layouts(24)) {
    for (int rank = 0; rank < layout.world_size(); ++rank) {
      for (const int replica : layout.replication_group(rank)) {
        ASSERT_EQ(layout.slice_of(replica), layout.slice_of(rank)) << describe(layout);
      }
      std::set<int> slices;
      for (const int member : layout.sharding_group(rank)) slices.insert(layout.slice_of(member));
      ASSERT_EQ(static_cast<int>(slices.size()), layout.degree()) << describe(layout);
      ASSERT_EQ(*slices.begin(), 0);
      ASSERT_EQ(*slices.rbegin(), layout.degree() - 1);
    }
  }
}

TEST(GroupLayout, IntraNodeStaysOnTheNodeAndInterNodeTakesOnePerNode) {
  for (const GroupLayout& layout : all_layouts(24)) {
    for (int rank = 0; rank < layout.world_size(); ++rank) {
      for (const int member : layout.intra_node_group(rank)) {
        ASSERT_EQ(layout.node_of(member), layout.node_of(rank)) << describe(layout);
      }
      std::set<int> nodes;
      const Ranks inter = layout.inter_node_group(rank);
      for (const int member : inter) {
        ASSERT_EQ(layout.local_rank_of(member), layout.local_rank_of(rank)) << describe(layout);
        nodes.insert(layout.node_of(member));
      }
      ASSERT_EQ(nodes.size(), inter.size()) << describe(layout);
      if (layout.is_hierarchical()) {
        ASSERT_EQ(static_cast<int>(layout.intra_node_group(rank).size()), layout.ranks_per_node());
        ASSERT_EQ(static_cast<int>(inter.size()), layout.degree() / layout.ranks_per_node());
      }
    }
  }
}

TEST(GroupLayout, HierarchicalExactlyForGroupsOfWholeNodes) {
  for (const GroupLayout& layout : all_layouts(24)) {
    // From the definition: each group has N >= 2 nodes, and k >= 2 members on each of them.
    bool expected = layout.ranks_per_node() >= 2;
    for (int rank = 0; rank < layout.world_size(); ++rank) {
      std::set<int> nodes;
      for (const int member : layout.sharding_group(rank)) nodes.insert(layout.node_of(member));
      expected = expected && nodes.size() >= 2 &&
                 nodes.size() * static_cast<std::size_t>(layout.ranks_per_node()) ==
                     layout.sharding_group(rank).size();
    }
    ASSERT_EQ(layout.is_hierarchical(), expected) << describe(layout);
  }
}

TEST(GroupLayout, ThousandsOfRanks) {
  for (const int degree : {1, 2, 8, 16, 64, 512, 4096}) {
    const GroupLayout layout(4096, 8, degree);
    for (const int rank : {0, 1, 7, 8, 777, 2048, 4095}) {
      const Ranks replication = layout.replication_group(rank);
      EXPECT_EQ(static_cast<int>(replication.size()), 4096 / degree);
      EXPECT_EQ(replication.front(), rank % degree);
      EXPECT_EQ(layout.sharding_group(rank).front(), rank / degree * degree);
    }
    EXPECT_EQ(layout.is_hierarchical(), degree >= 16);
  }
  const GroupLayout layout(4096, 8, 512);
  expect_partition(layout, [&](int rank) { return layout.intra_node_group(rank); });
  expect_partition(layout, [&](int rank) { return layout.inter_node_group(rank); });
}

TEST(GroupLayout, AHugeNodeDoesNotOverflow) {
  const GroupLayout layout(6, std::numeric_limits<int>::max(), 3);
  EXPECT_EQ(layout.intra_node_group(4), (Ranks{3, 4, 5}));
  EXPECT_EQ(layout.inter_node_group(4), Ranks{4});
  EXPECT_FALSE(layout.is_hierarchical());
}

TEST(GroupLayout, UnevenLastNodeIsLegalAndFlat) {
  const GroupLayout layout(6, 4, 6);
  EXPECT_FALSE(layout.is_hierarchical());
  EXPECT_EQ(layout.intra_node_group(5), (Ranks{4, 5}));
  EXPECT_EQ(layout.slice_of(5), 5);
}

TEST(GroupLayout, ErrorNamesDegreeWorldAndLegalDegrees) {
  for (const int degree : {5, 0, -1, 24, 13}) {
    try {
      const GroupLayout layout(12, 4, degree);
      FAIL() << "degree " << degree << " was accepted";
    } catch (const ConfigError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("degree " + std::to_string(degree) + " "), std::string::npos) << text;
      EXPECT_NE(text.find("world size 12"), std::string::npos) << text;
      EXPECT_NE(text.find("1, 2, 3, 4, 6, 12"), std::string::npos) << text;
    }
  }
  EXPECT_THROW(GroupLayout(0, 1, 1), ConfigError);
  EXPECT_THROW(GroupLayout(4, 0, 1), ConfigError);
}

TEST(GroupLayout, RanksOutsideTheWorldThrow) {
  const GroupLayout layout(8, 2, 4);
  for (const int rank : {-1, 8}) {
    EXPECT_THROW(static_cast<void>(layout.node_of(rank)), InvalidArgument);
    EXPECT_THROW(static_cast<void>(layout.local_rank_of(rank)), InvalidArgument);
    EXPECT_THROW(static_cast<void>(layout.sharding_group(rank)), InvalidArgument);
    EXPECT_THROW(static_cast<void>(layout.replication_group(rank)), InvalidArgument);
    EXPECT_THROW(static_cast<void>(layout.intra_node_group(rank)), InvalidArgument);
    EXPECT_THROW(static_cast<void>(layout.inter_node_group(rank)), InvalidArgument);
    EXPECT_THROW(static_cast<void>(layout.slice_of(rank)), InvalidArgument);
  }
}

}  // namespace
}  // namespace hopshard
