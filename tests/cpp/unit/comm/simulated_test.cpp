// The device `sim` must find the mistakes that it is for.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <latch>

#include "hopshard/comm/decorators.hpp"
#include "hopshard/core/error.hpp"
#include "support/thread_world.hpp"

namespace hopshard {
namespace {

using testing::run_ranks;
using testing::world_of;

CommunicatorPtr simulated(LocalHub& hub, int rank) {
  return make_simulated_communicator(hub.communicator(world_of(2, rank)),
                                     {.seed = 5, .max_delay = std::chrono::microseconds(500)});
}

bool has_nan(const at::Tensor& tensor) { return tensor.isnan().any().item<bool>(); }

TEST(Simulated, GivesWhatTheInnerOneGives) {
  run_ranks(2, [](int rank, LocalHub& hub) {
    const CommunicatorPtr world = simulated(hub, rank);
    const at::Tensor whole = at::zeros({6});
    const at::Tensor slot = whole.narrow(0, 3 * rank, 3);
    slot.fill_(rank + 1);
    world->all_gather(whole, slot)->wait();  // In place.
    EXPECT_EQ(whole.sum().item<float>(), 9.0f);
    const at::Tensor sum = at::full({3}, 10.0);
    world
        ->reduce_scatter(sum, whole, ReduceOp::kSum, {.timeout = {}, .tag = "", .accumulate = true})
        ->wait();
    EXPECT_TRUE(at::equal(sum, at::full({3}, 10.0 + 2 * (rank + 1))));
    EXPECT_TRUE(has_nan(whole));  // It holds no defined value.
    world->all_reduce(sum)->wait();
    EXPECT_TRUE(at::equal(sum, at::full({3}, 26.0)));
    world->broadcast(sum.fill_(rank), 1)->wait();
    EXPECT_TRUE(at::equal(sum, at::full({3}, 1.0)));
    world->barrier();
    const CommunicatorPtr part = world->split(world_of(2, rank));
    const at::Tensor moved = at::full({1}, static_cast<double>(rank));
    part->all_reduce(moved)->wait();
    EXPECT_EQ(moved.item<float>(), 1.0f);
  });
}

TEST(Simulated, WhoDoesNotWaitReadsNaN) {
  std::latch has_looked(1);
  run_ranks(2, [&](int rank, LocalHub& hub) {
    const CommunicatorPtr world = simulated(hub, rank);
    const at::Tensor whole = at::zeros({4});
    if (rank == 1) {
      has_looked.wait();
    }
    const WorkPtr work = world->all_gather(whole, at::full({2}, 1.0));
    if (rank == 0) {
      EXPECT_TRUE(has_nan(whole));
      EXPECT_FALSE(work->test());
      has_looked.count_down();
    }
    work->wait();
    EXPECT_TRUE(at::equal(whole, at::full({4}, 1.0)));
  });
}

TEST(Simulated, AnInputThatChangesBeforeTheWaitSendsSomethingElse) {
  run_ranks(2, [](int rank, LocalHub& hub) {
    bool was_late = false;
    for (std::uint64_t seed = 0; seed < 50 && !was_late; ++seed) {
      const CommunicatorPtr world = make_simulated_communicator(
          hub.communicator(Group{"try" + std::to_string(seed), {0, 1}, rank, {}}),
          {.seed = 1, .max_delay = std::chrono::milliseconds(5)});
      const at::Tensor input = at::full({1}, 1.0);
      const at::Tensor whole = at::zeros({2});
      const WorkPtr work = world->all_gather(whole, input);
      input.fill_(2);
      work->wait();
      was_late = whole[rank].item<float>() == 2.0f && whole[1 - rank].item<float>() == 2.0f;
      const at::Tensor agreed = at::full({1}, was_late ? 1.0 : 0.0);
      world->all_reduce(agreed)->wait();
      was_late = agreed.item<float>() > 0;
    }
    EXPECT_TRUE(was_late);
  });
}

TEST(Simulated, FailuresOfTheInnerOneReachTheWait) {
  run_ranks(2, [](int rank, LocalHub& hub) {
    CommunicatorPtr inner = hub.communicator(world_of(2, rank));
    if (rank == 0) {
      inner = make_delayed_communicator(std::move(inner), {.fail_at_call = 0});
    }
    const CommunicatorPtr world = make_simulated_communicator(std::move(inner), {});
    const at::Tensor tensor = at::zeros({1});
    const WorkPtr work = world->all_reduce(tensor);
    EXPECT_THROW(work->wait(), CommError);
    EXPECT_THROW(work->wait(), CommError);
  });
}

TEST(Simulated, RefusesBadOptions) {
  LocalHub hub(1);
  EXPECT_THROW((void)make_simulated_communicator(nullptr, {}), InvalidArgument);
  EXPECT_THROW(
      (void)make_simulated_communicator(hub.communicator(world_of(1, 0)),
                                        {.seed = 0, .max_delay = std::chrono::microseconds(-1)}),
      InvalidArgument);
}

}  // namespace
}  // namespace hopshard
