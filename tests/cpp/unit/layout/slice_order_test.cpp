// Slice order is a bijection, and the reason for it holds: a two-level gather, carried out on
// plain vectors, lands all slices in order without a copy, and so does its mirror.
#include "hopshard/layout/slice_order.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

#include "hopshard/core/error.hpp"
#include "hopshard/topology/group_layout.hpp"

namespace hopshard {
namespace {

using Buffer = std::vector<int>;
using SliceOf = std::function<int(NodeAndLocalRank)>;

std::size_t index(int i) { return static_cast<std::size_t>(i); }

/// Group members in rank order: q = j * k + l.
std::vector<NodeAndLocalRank> members(int num_nodes, int ranks_per_node) {
  std::vector<NodeAndLocalRank> places;
  for (int node = 0; node < num_nodes; ++node) {
    for (int local_rank = 0; local_rank < ranks_per_node; ++local_rank) {
      places.push_back({node, local_rank});
    }
  }
  return places;
}

/// Both stages concatenate in rank order and know nothing of slices: stage 1 over the nodes at a
/// fixed local rank, stage 2 over the local ranks of a node.
Buffer two_level_gather(int num_nodes, int ranks_per_node, const SliceOf& slice_of) {
  Buffer gathered;
  for (int local_rank = 0; local_rank < ranks_per_node; ++local_rank) {
    for (int node = 0; node < num_nodes; ++node) {
      gathered.push_back(slice_of({node, local_rank}));
    }
  }
  return gathered;
}

Buffer in_order(int size) {
  Buffer buffer(index(size));
  std::iota(buffer.begin(), buffer.end(), 0);
  return buffer;
}

TEST(SliceOrder, ExampleOfTheHeader) {
  EXPECT_EQ(SliceOrder(2, 2).slots(), (std::vector<int>{0, 2, 1, 3}));
  EXPECT_EQ(SliceOrder(3, 2).slots(), (std::vector<int>{0, 3, 1, 4, 2, 5}));
}

TEST(SliceOrder, TwoLevelGatherLandsInOrder) {
  for (int num_nodes = 1; num_nodes <= 12; ++num_nodes) {
    for (int ranks_per_node = 1; ranks_per_node <= 12; ++ranks_per_node) {
      const SliceOrder order(num_nodes, ranks_per_node);
      const Buffer gathered = two_level_gather(
          num_nodes, ranks_per_node, [&](NodeAndLocalRank place) { return order.slice_of(place); });
      ASSERT_EQ(gathered, in_order(order.size())) << num_nodes << " x " << ranks_per_node;
    }
  }
}

TEST(SliceOrder, ThePapersOrderNeedsACopy) {
  const auto paper = [](NodeAndLocalRank place) { return place.node * 2 + place.local_rank; };
  EXPECT_EQ(two_level_gather(2, 2, paper), (Buffer{0, 2, 1, 3}));
}

/// Stage by stage with every rank's own buffer, in place: after stage 1 a rank holds one contiguous
/// block of N slices, after stage 2 everything.
TEST(SliceOrder, StagesAreContiguousAndInPlaceOnEveryRank) {
  constexpr int kMissing = -1;
  for (const auto& [num_nodes, k] : {std::pair(2, 2), {3, 4}, {8, 2}, {2, 8}, {5, 3}, {128, 8}}) {
    const SliceOrder order(num_nodes, k);
    const auto places = members(num_nodes, k);
    std::vector<Buffer> buffers(places.size(), Buffer(places.size(), kMissing));
    for (std::size_t rank = 0; rank < places.size(); ++rank) {
      const int slice = order.slice_of(places[rank]);
      buffers[rank][index(slice)] = slice;
    }
    std::vector<Buffer> after_inter = buffers;
    for (std::size_t rank = 0; rank < places.size(); ++rank) {
      const int block = places[rank].local_rank * num_nodes;
      for (int node = 0; node < num_nodes; ++node) {
        const std::size_t peer = index(node * k + places[rank].local_rank);
        after_inter[rank][index(block + node)] = buffers[peer][index(block + node)];
      }
    }
    for (std::size_t rank = 0; rank < places.size(); ++rank) {
      Buffer whole(places.size(), kMissing);
      for (int local_rank = 0; local_rank < k; ++local_rank) {
        const Buffer& peer = after_inter[index(places[rank].node * k + local_rank)];
        std::copy_n(peer.begin() + local_rank * num_nodes, num_nodes,
                    whole.begin() + local_rank * num_nodes);
      }
      ASSERT_EQ(whole, in_order(order.size())) << num_nodes << " x " << k << " rank " << rank;
    }
  }
}

TEST(SliceOrder, MirrorScattersEverySliceToItsOwner) {
  for (const auto& [num_nodes, k] : {std::pair(2, 2), {3, 4}, {8, 2}, {1, 6}, {6, 1}}) {
    const SliceOrder order(num_nodes, k);
    const auto places = members(num_nodes, k);
    const int size = order.size();
    // Rank q contributes (q + 1) * (s + 1) to slice s, so each slice has a sum of its own.
    // Stage 1, inside the nodes: local rank l keeps the l-th block of N slices.
    std::vector<Buffer> blocks(places.size(), Buffer(index(num_nodes), 0));
    for (std::size_t rank = 0; rank < places.size(); ++rank) {
      for (int peer_local = 0; peer_local < k; ++peer_local) {
        const int peer = places[rank].node * k + peer_local;
        for (int i = 0; i < num_nodes; ++i) {
          const int slice = places[rank].local_rank * num_nodes + i;
          blocks[rank][index(i)] += (peer + 1) * (slice + 1);
        }
      }
    }
    // Stage 2, between the nodes: node j keeps the j-th slice of its block.
    for (std::size_t rank = 0; rank < places.size(); ++rank) {
      int kept = 0;
      for (int node = 0; node < num_nodes; ++node) {
        kept += blocks[index(node * k + places[rank].local_rank)][index(places[rank].node)];
      }
      const int sum_of_ranks = size * (size + 1) / 2;
      ASSERT_EQ(kept, sum_of_ranks * (order.slice_of(places[rank]) + 1));
    }
  }
}

TEST(SliceOrder, IsABijectionForThousandsOfRanks) {
  for (const auto& [num_nodes, k] : {std::pair(512, 8), {1, 4096}, {4096, 1}, {341, 12}}) {
    const SliceOrder order(num_nodes, k);
    std::vector<int> slots = order.slots();
    for (int slice = 0; slice < order.size(); ++slice) {
      ASSERT_EQ(order.slice_of(order.place_of(slice)), slice);
    }
    std::sort(slots.begin(), slots.end());
    ASSERT_EQ(slots, in_order(order.size()));
  }
}

TEST(SliceOrder, IsTheIdentityOnOneNodeAndOneRankPerNode) {
  EXPECT_EQ(SliceOrder(1, 7).slots(), in_order(7));
  EXPECT_EQ(SliceOrder(7, 1).slots(), in_order(7));
}

TEST(SliceOrder, AgreesWithGroupLayout) {
  for (int num_nodes = 2; num_nodes <= 6; ++num_nodes) {
    for (int k = 2; k <= 6; ++k) {
      const int degree = num_nodes * k;
      const GroupLayout layout(3 * degree, k, degree);
      const std::vector<int> slots = SliceOrder(num_nodes, k).slots();
      for (int rank = 0; rank < layout.world_size(); ++rank) {
        ASSERT_EQ(layout.slice_of(rank), slots[index(rank % degree)]);
      }
    }
  }
}

TEST(SliceOrder, BadArgumentsThrow) {
  EXPECT_THROW(SliceOrder(0, 1), InvalidArgument);
  EXPECT_THROW(SliceOrder(1, 0), InvalidArgument);
  EXPECT_THROW(SliceOrder(1 << 20, 1 << 20), InvalidArgument);
  const SliceOrder order(2, 3);
  EXPECT_THROW(static_cast<void>(order.slice_of({2, 0})), InvalidArgument);
  EXPECT_THROW(static_cast<void>(order.slice_of({0, 3})), InvalidArgument);
  EXPECT_THROW(static_cast<void>(order.slice_of({-1, 0})), InvalidArgument);
  EXPECT_THROW(static_cast<void>(order.place_of(6)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(order.place_of(-1)), InvalidArgument);
}

}  // namespace
}  // namespace hopshard
