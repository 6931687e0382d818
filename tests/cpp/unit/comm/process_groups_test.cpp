#include "hopshard/comm/process_groups.hpp"

#include <gtest/gtest.h>

#include <array>

#include "hopshard/comm/recording.hpp"
#include "hopshard/comm/registry.hpp"
#include "hopshard/core/error.hpp"

namespace hopshard {
namespace {

CommunicatorPtr alone(const Group& group) {
  return make_recording_communicator(nullptr, group, std::make_shared<Meter>(), 2);
}

TEST(ProcessGroups, AsksForTheOwnGroupsInOrder) {
  const GroupLayout layout(/*world_size=*/8, /*ranks_per_node=*/2, /*degree=*/4);
  std::vector<Group> asked;
  const ProcessGroups groups = make_process_groups(layout, 5, [&](const Group& group) {
    asked.push_back(group);
    return alone(group);
  });
  ASSERT_EQ(asked.size(), 3u);
  EXPECT_EQ(asked[0].name, "world[0-7]");
  EXPECT_EQ(asked[0].rank, 5);
  EXPECT_TRUE(asked[0].slots.empty());
  EXPECT_EQ(asked[1].name, "sharding[4-7]");
  EXPECT_EQ(asked[1].ranks, (std::vector<int>{4, 5, 6, 7}));
  EXPECT_EQ(asked[1].rank, 1);
  EXPECT_EQ(asked[1].slots, (std::vector<int>{0, 2, 1, 3}));  // Slice order for 2 nodes of 2.
  EXPECT_EQ(asked[2].name, "replication[1,5]");
  EXPECT_EQ(asked[2].ranks, (std::vector<int>{1, 5}));
  EXPECT_EQ(asked[2].rank, 1);
  EXPECT_EQ(groups.world->size(), 8);
  EXPECT_EQ(groups.sharding->size(), 4);
  EXPECT_EQ(groups.replication->size(), 2);
}

TEST(ProcessGroups, SlotsAreASharedPermutation) {
  const GroupLayout layout(/*world_size=*/64, /*ranks_per_node=*/4, /*degree=*/16);
  for (int rank = 0; rank < 64; ++rank) {
    const Group mine = make_sharding_group(layout, rank);
    mine.validate();
    EXPECT_EQ(mine.slots, make_sharding_group(layout, rank / 16 * 16).slots);
    EXPECT_EQ(mine.my_slot(), layout.slice_of(rank));
    make_replication_group(layout, rank).validate();
  }
  EXPECT_TRUE(make_sharding_group(GroupLayout(8, 8, 4), 6).slots.empty());
}

TEST(ProcessGroups, NamesStayShort) {
  EXPECT_EQ(make_world_group(GroupLayout(1, 1, 1), 0).name, "world[0]");
  EXPECT_EQ(make_replication_group(GroupLayout(4096, 8, 2), 3).name, "replication[1,3,..,4095]");
}

TEST(ProcessGroups, RefusesBadRanksAndFactories) {
  const GroupLayout layout(4, 2, 2);
  EXPECT_THROW((void)make_process_groups(layout, 4, alone), InvalidArgument);
  EXPECT_THROW((void)make_process_groups(layout, -1, alone), InvalidArgument);
  EXPECT_THROW((void)make_process_groups(layout, 0, [](const Group&) { return CommunicatorPtr(); }),
               ConfigError);
  EXPECT_THROW((void)make_process_groups(layout, 0,
                                         [&](const Group& group) {
                                           Group other = group;
                                           other.rank = (other.rank + 1) % other.size();
                                           return alone(other);
                                         }),
               InvalidArgument);
  const GroupLayout hierarchical(4, 2, 4);
  EXPECT_THROW((void)make_process_groups(hierarchical, 0,
                                         [&](const Group& group) {
                                           Group other = group;
                                           other.slots.clear();
                                           return alone(other);
                                         }),
               InvalidArgument);
}

TEST(NodeParts, AreThoseOfTheLayoutForShardingGroups) {
  for (const auto& [world_size, ranks_per_node, degree] :
       {std::array{8, 2, 4}, std::array{64, 4, 16}, std::array{4096, 8, 4096}}) {
    const GroupLayout layout(world_size, ranks_per_node, degree);
    for (int rank = 0; rank < world_size; rank += 1 + world_size / 64) {
      const auto parts = plan_node_parts(make_sharding_group(layout, rank), ranks_per_node);
      ASSERT_TRUE(parts.has_value());
      EXPECT_EQ(parts->intra_node.ranks, layout.intra_node_group(rank));
      EXPECT_EQ(parts->inter_node.ranks, layout.inter_node_group(rank));
      EXPECT_EQ(parts->intra_node.global_rank(), rank);
      EXPECT_EQ(parts->inter_node.global_rank(), rank);
      EXPECT_EQ(parts->num_nodes * parts->ranks_per_node, degree);
      parts->intra_node.validate();
      parts->inter_node.validate();
    }
  }
}

TEST(NodeParts, HaveShortNames) {
  const auto parts = plan_node_parts(make_sharding_group(GroupLayout(8, 2, 4), 5), 2);
  ASSERT_TRUE(parts.has_value());
  EXPECT_EQ(parts->intra_node.name, "sharding_intra_node[4,5]");
  EXPECT_EQ(parts->inter_node.name, "sharding_inter_node[5,7]");
}

TEST(NodeParts, OfAReplicationGroupNeedNotBeNeighbours) {
  // Degree 2 on nodes of 4: each replication group has every other rank of both nodes.
  const Group group = make_replication_group(GroupLayout(8, 4, 2), 5);
  EXPECT_EQ(group.ranks, (std::vector<int>{1, 3, 5, 7}));
  const auto parts = plan_node_parts(group, 4);
  ASSERT_TRUE(parts.has_value());
  EXPECT_EQ(parts->intra_node.ranks, (std::vector<int>{5, 7}));
  EXPECT_EQ(parts->inter_node.ranks, (std::vector<int>{1, 5}));
}

TEST(NodeParts, AreNoneWhereTwoLevelsDoNotApply) {
  const auto has_parts = [](std::vector<int> ranks, int ranks_per_node) {
    return plan_node_parts({"g", std::move(ranks), 0, {}}, ranks_per_node).has_value();
  };
  EXPECT_TRUE(has_parts({0, 1, 2, 3}, 2));
  EXPECT_TRUE(has_parts({4, 5, 0, 1}, 2));
  EXPECT_FALSE(has_parts({0}, 2));
  EXPECT_FALSE(has_parts({0, 1, 2, 3}, 4));        // One node.
  EXPECT_FALSE(has_parts({0, 1, 2, 3}, 1));        // One rank per node.
  EXPECT_FALSE(has_parts({0, 2, 4}, 2));           // The same.
  EXPECT_FALSE(has_parts({0, 1, 2}, 2));           // Unequal nodes.
  EXPECT_FALSE(has_parts({0, 1, 2, 4}, 2));        // The same.
  EXPECT_FALSE(has_parts({0, 2, 1, 3}, 2));        // Not node after node.
  EXPECT_FALSE(has_parts({0, 1, 4, 5, 2, 3}, 4));  // A node comes back.
  EXPECT_THROW(static_cast<void>(has_parts({0, 1}, 0)), InvalidArgument);
}

TEST(Registry, ListsTheBackendsAndExplainsUnknownOnes) {
  EXPECT_EQ(backends().front().name, "local");
  EXPECT_EQ(require_backend("c10d").name, "c10d");
  try {
    require_backend("ncll");
    ADD_FAILURE() << "no error";
  } catch (const ConfigError& error) {
    EXPECT_EQ(
        std::string(error.what()),
        "unknown backend 'ncll'; this build knows local, recording, c10d, shm, mpi, nccl, ofi");
  }
}

}  // namespace
}  // namespace hopshard
