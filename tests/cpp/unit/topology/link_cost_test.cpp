// The model's formulas by hand-made numbers, and what must hold for all layouts and sizes.
#include "hopshard/topology/link_cost.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "hopshard/core/error.hpp"

namespace hopshard {
namespace {

constexpr auto kFlat = Algorithm::kFlat;
constexpr auto kHierarchical = Algorithm::kHierarchical;
constexpr std::int64_t kMib = std::int64_t{1} << 20;

const std::vector<CollectiveOp> kOps = {CollectiveOp::kAllGather, CollectiveOp::kReduceScatter,
                                        CollectiveOp::kAllReduce, CollectiveOp::kBroadcast,
                                        CollectiveOp::kBarrier};

/// Fast inside, slow between nodes.
const NodeLinkCosts kCluster = {.intra_node = {.alpha_us = 5, .gb_per_s = 100},
                                .inter_node = {.alpha_us = 20, .gb_per_s = 10}};

std::vector<NodeShape> shapes() {
  std::vector<NodeShape> all;
  for (const int num_nodes : {1, 2, 3, 4, 8, 64, 512}) {
    for (const int ranks_per_node : {1, 2, 4, 7, 8, 16}) {
      all.push_back({num_nodes, ranks_per_node});
    }
  }
  return all;
}

TEST(LinkCost, FollowsTheFormulas) {
  // 2 nodes of 2 ranks, 4 MB: chunks of 1 MB, 100 us each between nodes and 10 us inside.
  const NodeShape shape{.num_nodes = 2, .ranks_per_node = 2};
  const std::int64_t bytes = 4'000'000;
  const auto predicted = [&](CollectiveOp op, Algorithm algorithm) {
    return predict_us(op, algorithm, shape, bytes, kCluster);
  };
  // Three steps, each as slow as the hop between the nodes.
  EXPECT_DOUBLE_EQ(predicted(CollectiveOp::kAllGather, kFlat), 3 * (20 + 100));
  // One step of two rails over one link, then one of half the buffer inside.
  EXPECT_DOUBLE_EQ(predicted(CollectiveOp::kAllGather, kHierarchical), (20 + 200) + (5 + 20));
  EXPECT_DOUBLE_EQ(predicted(CollectiveOp::kAllReduce, kFlat), 2 * 360);
  EXPECT_DOUBLE_EQ(predicted(CollectiveOp::kAllReduce, kHierarchical), 2 * 245);
  // Latencies add up, the bytes follow each other.
  EXPECT_DOUBLE_EQ(predicted(CollectiveOp::kBroadcast, kFlat), 2 * 20 + (20 + 400));
  EXPECT_DOUBLE_EQ(predicted(CollectiveOp::kBroadcast, kHierarchical), (20 + 400) + (5 + 40));
  EXPECT_DOUBLE_EQ(predicted(CollectiveOp::kBarrier, kFlat), 3 * 20);
  EXPECT_DOUBLE_EQ(predicted(CollectiveOp::kBarrier, kHierarchical), 20 + 5);
}

TEST(LinkCost, AScatterMirrorsAGather) {
  for (const NodeShape& shape : shapes()) {
    for (const Algorithm algorithm : {kFlat, kHierarchical}) {
      EXPECT_EQ(predict_us(CollectiveOp::kAllGather, algorithm, shape, kMib, kCluster),
                predict_us(CollectiveOp::kReduceScatter, algorithm, shape, kMib, kCluster));
    }
  }
}

TEST(LinkCost, MoreBytesNeverCostLess) {
  for (const NodeShape& shape : shapes()) {
    for (const CollectiveOp op : kOps) {
      for (const Algorithm algorithm : {kFlat, kHierarchical}) {
        double last = 0;
        for (const std::int64_t bytes :
             {std::int64_t{0}, std::int64_t{1}, kMib, 1024 * kMib, std::int64_t{1} << 50}) {
          const double now = predict_us(op, algorithm, shape, bytes, kCluster);
          ASSERT_TRUE(std::isfinite(now));
          ASSERT_GE(now, last) << to_string(op) << ' ' << to_string(algorithm) << ' '
                               << shape.num_nodes << 'x' << shape.ranks_per_node;
          last = now;
        }
      }
    }
  }
}

TEST(LinkCost, MoreNodesNeverCostLess) {
  for (const CollectiveOp op : kOps) {
    for (const Algorithm algorithm : {kFlat, kHierarchical}) {
      double last = 0;
      for (const int num_nodes : {1, 2, 4, 64, 1024, 8192}) {
        const double now = predict_us(op, algorithm, {num_nodes, 8}, 64 * kMib, kCluster);
        ASSERT_GE(now, last) << to_string(op) << ' ' << to_string(algorithm);
        last = now;
      }
    }
  }
}

TEST(LinkCost, OneLevelCostsTheSameByBothAlgorithms) {
  for (const CollectiveOp op : kOps) {
    for (const NodeShape shape : {NodeShape{1, 1}, NodeShape{1, 8}, NodeShape{8, 1}}) {
      EXPECT_DOUBLE_EQ(predict_us(op, kFlat, shape, kMib, kCluster),
                       predict_us(op, kHierarchical, shape, kMib, kCluster));
      EXPECT_EQ(choose_algorithm(op, shape, kMib, kCluster), kFlat);
    }
  }
}

TEST(LinkCost, TwoLevelsWinWhereTheNodeIsFast) {
  for (const CollectiveOp op : kOps) {
    for (const NodeShape shape : {NodeShape{2, 2}, NodeShape{4, 2}, NodeShape{512, 8}}) {
      for (const std::int64_t bytes : {std::int64_t{0}, kMib, 1024 * kMib}) {
        // A broadcast's bytes pass both levels one after the other, so large ones are flat.
        const bool flat = op == CollectiveOp::kBroadcast &&
                          predict_us(op, kFlat, shape, bytes, kCluster) <=
                              predict_us(op, kHierarchical, shape, bytes, kCluster);
        EXPECT_EQ(choose_algorithm(op, shape, bytes, kCluster), flat ? kFlat : kHierarchical)
            << to_string(op) << ' ' << bytes;
      }
    }
  }
  EXPECT_EQ(choose_algorithm(CollectiveOp::kBroadcast, {2, 2}, 1024 * kMib, kCluster), kFlat);
  EXPECT_EQ(choose_algorithm(CollectiveOp::kBroadcast, {2, 2}, 0, kCluster), kHierarchical);
}

TEST(LinkCost, AFlatRingWinsWhereBothLinksAreAlike) {
  // 3/4 of the buffer at full speed against a half between the nodes and then a half inside.
  const NodeLinkCosts costs = {.intra_node = {.alpha_us = 5, .gb_per_s = 1},
                               .inter_node = {.alpha_us = 5, .gb_per_s = 1}};
  EXPECT_EQ(choose_algorithm(CollectiveOp::kAllGather, {2, 2}, 64 * kMib, costs), kFlat);
  // Latencies alone still favour two levels: two steps instead of three.
  EXPECT_EQ(choose_algorithm(CollectiveOp::kAllGather, {2, 2}, 0, costs), kHierarchical);
}

TEST(LinkCost, ThousandsOfRanksGainTheStepsThatTheySave) {
  // Of 4096 ranks on 512 nodes, latencies count: 4095 steps against 511 + 7.
  const NodeShape shape{.num_nodes = 512, .ranks_per_node = 8};
  EXPECT_DOUBLE_EQ(predict_us(CollectiveOp::kAllGather, kFlat, shape, 0, kCluster), 4095 * 20.0);
  EXPECT_DOUBLE_EQ(predict_us(CollectiveOp::kAllGather, kHierarchical, shape, 0, kCluster),
                   511 * 20.0 + 7 * 5.0);
}

TEST(LinkCost, TheNodesTrafficIsThatOfTheFormulas) {
  // Without latencies and inside for free, time is the bytes that leave a node over its bandwidth.
  const NodeLinkCosts wire = {.intra_node = {.alpha_us = 0, .gb_per_s = 1e9},
                              .inter_node = {.alpha_us = 0, .gb_per_s = 1}};
  for (const NodeShape shape :
       {NodeShape{2, 2}, NodeShape{4, 2}, NodeShape{2, 4}, NodeShape{64, 8}}) {
    const double p = shape.num_nodes * shape.ranks_per_node;
    const double k = shape.ranks_per_node;
    const auto bytes = static_cast<double>(64 * kMib);
    EXPECT_NEAR(predict_us(CollectiveOp::kAllGather, kFlat, shape, 64 * kMib, wire),
                (p - 1) / p * bytes / 1e3, 1);
    EXPECT_NEAR(predict_us(CollectiveOp::kAllGather, kHierarchical, shape, 64 * kMib, wire),
                (p - k) / p * bytes / 1e3, 1);
  }
}

TEST(LinkCost, RefusesWhatMakesNoSense) {
  const auto predict = [](NodeShape shape, std::int64_t bytes, NodeLinkCosts costs) {
    return predict_us(CollectiveOp::kAllGather, kFlat, shape, bytes, costs);
  };
  EXPECT_THROW(static_cast<void>(predict({0, 1}, 1, kCluster)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(predict({1, 0}, 1, kCluster)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(predict({1, 1}, -1, kCluster)), InvalidArgument);
  for (const double bad : {-1.0, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THROW(static_cast<void>(predict({2, 2}, 1, {{bad, 1}, {1, 1}})), InvalidArgument);
    EXPECT_THROW(static_cast<void>(predict({2, 2}, 1, {{1, 1}, {1, bad}})), InvalidArgument);
  }
  EXPECT_THROW(static_cast<void>(predict({2, 2}, 1, {{1, 0}, {1, 1}})), InvalidArgument);
}

}  // namespace
}  // namespace hopshard
