#include "hopshard/comm/decorators.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "hopshard/core/error.hpp"
#include "support/thread_world.hpp"

namespace hopshard {
namespace {

using testing::run_ranks;
using testing::world_of;

TEST(Delayed, FailsAtTheGivenCall) {
  run_ranks(2, [](int rank, LocalHub& hub) {
    DelayedOptions options;
    options.fail_at_call = rank == 0 ? 1 : -1;
    const CommunicatorPtr world =
        make_delayed_communicator(hub.communicator(world_of(2, rank)), options);
    world->barrier();
    if (rank == 1) {
      EXPECT_THROW(world->barrier(), CommError);  // Rank 0 leaves without it.
      return;
    }
    try {
      world->barrier();
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      EXPECT_NE(std::string(error.what()).find("injected failure at call 1"), std::string::npos);
    }
  });
}

TEST(Delayed, HangsUntilAborted) {
  run_ranks(2, [](int rank, LocalHub& hub) {
    DelayedOptions options;
    options.hang_at_call = rank == 0 ? 0 : -1;
    const CommunicatorPtr world =
        make_delayed_communicator(hub.communicator(world_of(2, rank)), options);
    if (rank == 1) {
      EXPECT_THROW(world->barrier({.timeout = std::chrono::milliseconds(50), .tag = ""}),
                   TimeoutError);
      return;
    }
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(150));
      world->abort("test over");
    });
    EXPECT_THROW(world->barrier(), CommError);
    other.join();
  });
}

TEST(Delayed, AHangEndsAtItsLimit) {
  LocalHub hub(2);
  DelayedOptions options;
  options.hang_at_call = 0;
  options.hang_limit = std::chrono::milliseconds(20);
  const CommunicatorPtr world =
      make_delayed_communicator(hub.communicator(world_of(2, 0)), options);
  EXPECT_THROW(world->barrier(), CommError);
}

TEST(Delayed, RefusesBadArguments) {
  EXPECT_THROW((void)make_delayed_communicator(nullptr, {}), InvalidArgument);
  LocalHub hub(1);
  DelayedOptions options;
  options.max_delay = std::chrono::microseconds(-1);
  EXPECT_THROW((void)make_delayed_communicator(hub.communicator(world_of(1, 0)), options),
               InvalidArgument);
}

}  // namespace
}  // namespace hopshard
