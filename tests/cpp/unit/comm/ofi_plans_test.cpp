// The plans of the `ofi` backend: pure arithmetic, tested without libfabric.
#include <gtest/gtest.h>

#include <set>

#include "comm/backends/ofi/plans.hpp"

namespace hopshard::detail::ofi {
namespace {

TEST(OfiPlans, EvenSlicesCoverEverythingOnce) {
  for (const int size : {1, 2, 3, 7}) {
    for (const std::size_t numel : {std::size_t{7}, std::size_t{8}, std::size_t{1000}}) {
      std::size_t end = 0;
      for (const Slice& slice : even_slices(size, numel)) {
        EXPECT_EQ(slice.begin, end);
        EXPECT_GE(slice.count, numel / static_cast<std::size_t>(size));
        EXPECT_LE(slice.count, numel / static_cast<std::size_t>(size) + 1);
        end += slice.count;
      }
      EXPECT_EQ(end, numel);
    }
  }
}

TEST(OfiPlans, SlicesLieAtTheSlots) {
  const Group group{"g", {4, 5, 6}, 0, {2, 0, 1}};
  const std::vector<Slice> slices = slot_slices(group, 10);
  EXPECT_EQ(slices[0].begin, 20U);
  EXPECT_EQ(slices[1].begin, 0U);
  EXPECT_EQ(slices[2].begin, 10U);
}

TEST(OfiPlans, ChunksCoverASlice) {
  const std::vector<Slice> chunks = chunks_of({5, 25}, 10);
  ASSERT_EQ(chunks.size(), 3U);
  EXPECT_EQ(chunks[2].begin, 25U);
  EXPECT_EQ(chunks[2].count, 5U);
  EXPECT_TRUE(chunks_of({5, 0}, 10).empty());
}

TEST(OfiPlans, ChunksAreWholeCacheLinesOfABoundedSize) {
  for (const std::size_t element : {1U, 2U, 4U, 8U}) {
    for (const std::size_t numel : {1U, 100'000U, 50'000'000U}) {
      const std::size_t bytes = chunk_numel(numel, element, 1) * element;
      EXPECT_EQ(bytes % 64, 0U);
      EXPECT_GE(bytes, 64U * 1024);
      EXPECT_LE(bytes, 512U * 1024);
    }
  }
  // More rails: smaller chunks, so that each rail has some.
  EXPECT_LT(chunk_numel(1 << 20, 1, 4), chunk_numel(1 << 20, 1, 1));
}

TEST(OfiPlans, TreesAndChainsReachEverybodyOnce) {
  for (auto* const make : {binomial_tree, chain}) {
    for (int size = 1; size <= 9; ++size) {
      for (int root = 0; root < size; ++root) {
        std::multiset<int> reached;
        for (int member = 0; member < size; ++member) {
          const TreePlace place = make(member, root, size);
          EXPECT_EQ(place.parent < 0, member == root);
          for (const int child : place.children) {
            reached.insert(child);
            EXPECT_EQ(make(child, root, size).parent, member);
          }
        }
        EXPECT_EQ(reached.size(), static_cast<std::size_t>(size) - 1);
        EXPECT_EQ(std::set<int>(reached.begin(), reached.end()).size(), reached.size());
        EXPECT_FALSE(reached.contains(root));
      }
    }
  }
  EXPECT_EQ(binomial_tree(0, 0, 8).children.size(), 3U);
  EXPECT_EQ(chain(0, 0, 8).children.size(), 1U);
}

TEST(OfiPlans, EverybodySendsToSomebodyElseAtATime) {
  std::set<int> targets;
  for (int member = 0; member < 5; ++member) {
    targets.insert(peers_after(member, 5).front());
  }
  EXPECT_EQ(targets.size(), 5U);
  EXPECT_EQ(peers_after(3, 5), (std::vector<int>{4, 0, 1, 2}));
}

TEST(OfiPlans, ReductionsTakeTheWayWithFewerBytesBetweenNodes) {
  const auto nodes = [](std::size_t count, std::size_t ranks) {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < count * ranks; ++i) {
      names.push_back(std::to_string(i / ranks));
    }
    return names;
  };
  // One rank on each node: both (p-1)/p, so the one with the ranks' order.
  EXPECT_EQ(choose_reduce_algorithm(nodes(4, 1), 1), ReduceAlgorithm::kDirect);
  EXPECT_EQ(choose_reduce_algorithm(nodes(1, 4), 1), ReduceAlgorithm::kDirect);
  // 2 x 2: direct 2 * 2 slices, ring 3, as fp32 6.
  EXPECT_EQ(choose_reduce_algorithm(nodes(2, 2), 1), ReduceAlgorithm::kRing);
  EXPECT_EQ(choose_reduce_algorithm(nodes(2, 2), 2), ReduceAlgorithm::kDirect);
  // 2 x 4: direct 4 * 4, ring 7, as fp32 14.
  EXPECT_EQ(choose_reduce_algorithm(nodes(2, 4), 2), ReduceAlgorithm::kRing);
  // Ranks that alternate between nodes make every step of a ring cross a boundary.
  EXPECT_EQ(choose_reduce_algorithm({"a", "b", "a", "b"}, 1), ReduceAlgorithm::kDirect);
}

}  // namespace
}  // namespace hopshard::detail::ofi
