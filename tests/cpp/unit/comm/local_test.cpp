// What only the `local` hub promises; the rest is in the conformance suite.
#include "hopshard/comm/local.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "hopshard/core/error.hpp"
#include "support/thread_world.hpp"

namespace hopshard {
namespace {

using testing::run_ranks;
using testing::world_of;

TEST(LocalHub, RefusesBadWorldsAndGroups) {
  EXPECT_THROW(LocalHub(0), InvalidArgument);
  EXPECT_THROW(LocalHub(2, std::chrono::milliseconds(0)), InvalidArgument);
  LocalHub hub(2);
  EXPECT_EQ(hub.world_size(), 2);
  EXPECT_THROW((void)hub.communicator(Group{"g", {0, 2}, 0, {}}), InvalidArgument);
  EXPECT_THROW((void)hub.communicator(Group{"g", {}, 0, {}}), InvalidArgument);
}

TEST(LocalHub, MembersMustAgreeOnSlots) {
  LocalHub hub(2);
  const CommunicatorPtr first = hub.communicator(world_of(2, 0, {1, 0}));
  EXPECT_THROW((void)hub.communicator(world_of(2, 1)), InvalidArgument);
}

TEST(LocalHub, AGroupCanBeMadeAgain) {
  run_ranks(2, [](int rank, LocalHub& hub) {
    for (int round = 0; round < 3; ++round) {
      const CommunicatorPtr world = hub.communicator(world_of(2, rank));
      const at::Tensor tensor = at::full({4}, rank + 1.0);
      world->all_reduce(tensor)->wait();
      EXPECT_EQ(tensor[0].item<double>(), 3.0);
    }
  });
}

TEST(LocalHub, AbortReachesGroupsMadeLater) {
  LocalHub hub(2);
  const CommunicatorPtr early = hub.communicator(world_of(2, 0));
  hub.abort("enough");
  EXPECT_THROW(early->barrier(), CommError);
  EXPECT_THROW(hub.communicator(Group{"late", {0, 1}, 0, {}})->barrier(), CommError);
}

TEST(LocalHub, AFailedRankIsNamedInItsGroupsOnly) {
  LocalHub hub(3);
  const CommunicatorPtr with = hub.communicator(Group{"with", {0, 2}, 0, {}});
  hub.rank_failed(2, "killed by signal 9");
  try {
    with->barrier();
    ADD_FAILURE() << "no error";
  } catch (const CommError& error) {
    EXPECT_NE(std::string(error.what()).find("global rank 2 failed: killed by signal 9"),
              std::string::npos)
        << error.what();
  }
  EXPECT_THROW(hub.communicator(Group{"later", {0, 2}, 0, {}})->barrier(), CommError);
  const CommunicatorPtr zero = hub.communicator(Group{"without", {0, 1}, 0, {}});
  const CommunicatorPtr one = hub.communicator(Group{"without", {0, 1}, 1, {}});
  const at::Tensor left = at::full({2}, 1.0);
  const at::Tensor right = at::full({2}, 2.0);
  // One thread may play several ranks, because calls do not block.
  const WorkPtr left_work = zero->all_reduce(left);
  const WorkPtr right_work = one->all_reduce(right);
  left_work->wait();
  right_work->wait();
  EXPECT_TRUE(left.equal(right));
}

TEST(ThreadWorld, RethrowsTheFirstErrorAndKeepsItsLimit) {
  EXPECT_THROW(run_ranks(3,
                         [](int rank, LocalHub& hub) {
                           const CommunicatorPtr world = hub.communicator(world_of(3, rank));
                           HOPSHARD_CHECK(rank != 1, ConfigError, "rank 1 does not like it");
                           world->barrier();
                         }),
               ConfigError);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THROW(run_ranks(
                   2,
                   [](int rank, LocalHub& hub) {
                     const CommunicatorPtr world = hub.communicator(world_of(2, rank));
                     if (rank == 0) {
                       world->barrier({.timeout = std::chrono::seconds(50), .tag = ""});
                     } else {
                       const CommunicatorPtr other = hub.communicator({"other", {0, 1}, 1, {}});
                       other->barrier({.timeout = std::chrono::seconds(50), .tag = ""});
                     }
                   },
                   std::chrono::milliseconds(200)),
               TimeoutError);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

}  // namespace
}  // namespace hopshard
