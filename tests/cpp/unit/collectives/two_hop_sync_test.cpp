#include "hopshard/collectives/two_hop_sync.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <limits>
#include <tuple>

#include "hopshard/core/error.hpp"
#include "support/thread_world.hpp"

namespace hopshard {
namespace {

using testing::run_ranks;
using testing::world_of;

// Slot s of rank i's flat gradient holds 10 i + s: the shard in slot s is 10 (0 + … + p-1) + p s.
TEST(HopOne, AddsTheSumOfThisRanksSlot) {
  for (const std::vector<int>& slots : {std::vector<int>{}, {0, 2, 1, 3}, {3, 2, 1, 0}}) {
    run_ranks(4, [&](int rank, LocalHub& hub) {
      const CommunicatorPtr sharding = hub.communicator(world_of(4, rank, slots));
      const int slot = sharding->group().my_slot();
      const at::Tensor shard = at::full({5}, std::numeric_limits<float>::quiet_NaN());
      for (int pass = 1; pass <= 2; ++pass) {
        const at::Tensor flat =
            at::arange(20, at::kFloat).div(5, "floor").add(static_cast<double>(10 * rank));
        reduce_into_shard(*sharding, flat, shard, /*accumulate=*/pass > 1, "reduce/h.0")->wait();
        const double sum = 10 * 6 + 4 * slot;
        EXPECT_TRUE(at::equal(shard, at::full({5}, sum * pass, at::kFloat))) << shard;
      }
    });
  }
}

TEST(HopOne, RefusesSizesThatDoNotFit) {
  run_ranks(2, [](int rank, LocalHub& hub) {
    const CommunicatorPtr sharding = hub.communicator(world_of(2, rank));
    EXPECT_THROW(
        reduce_into_shard(*sharding, at::full({7}, 1.0), at::full({4}, 0.0), false, "t")->wait(),
        InvalidArgument);
  });
}

TEST(HopTwo, SumsInBucketsOverReplicas) {
  for (const std::int64_t bucket_bytes : {1, 4, 12, 40, 1 << 20}) {
    run_ranks(3, [&](int rank, LocalHub& hub) {
      const CommunicatorPtr replication = hub.communicator(world_of(3, rank));
      const at::Tensor shards = at::arange(10, at::kFloat).add(static_cast<double>(rank));
      for (const WorkPtr& work :
           sum_over_replicas(*replication, shards, bucket_bytes, "second_hop/all")) {
        work->wait();
      }
      EXPECT_TRUE(at::equal(shards, at::arange(10, at::kFloat).mul(3).add(3)));
    });
  }
}

TEST(HopTwo, OneReplicaAndEmptyShardsChangeNothing) {
  run_ranks(2, [](int rank, LocalHub& hub) {
    const CommunicatorPtr alone = hub.communicator({.name = "one", .ranks = {rank}, .rank = 0});
    const at::Tensor shards = at::full({3}, static_cast<double>(rank), at::kFloat);
    std::ignore = sum_over_replicas(*alone, shards, 4, "t");
    EXPECT_TRUE(at::equal(shards, at::full({3}, static_cast<double>(rank), at::kFloat)));
    const CommunicatorPtr both = hub.communicator(world_of(2, rank));
    std::ignore = sum_over_replicas(*both, at::full({0}, 1.0), 4, "t");
    EXPECT_THROW(std::ignore = sum_over_replicas(*both, shards, 0, "t"), InvalidArgument);
  });
}

}  // namespace
}  // namespace hopshard
