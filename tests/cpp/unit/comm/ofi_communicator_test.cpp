// What the conformance suite does not reach: other providers, several rails, tagged messages in
// place of remote writes, rings over nodes that a thread world has to play, and the texts of
// connecting.
#include <ATen/ops/from_blob.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "cpp/conformance/backends.hpp"
#include "hopshard/comm/ofi.hpp"
#include "hopshard/core/error.hpp"

namespace hopshard::testing {
namespace {

OfiOptions loopback(std::size_t num_rails = 1) {
  OfiOptions options;
  options.provider = "tcp";
  options.interfaces.assign(num_rails, "lo");
  options.allow_tcp = true;
  return options;
}

class Ofi : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const BackendInfo& backend : backends()) {
      if (backend.name == "ofi" && backend.why_not) {
        GTEST_SKIP() << *backend.why_not;
      }
    }
  }
};

CommunicatorPtr connect(ThreadWorld& world, int rank, const OfiOptions& options) {
  return connect_ofi({.store = world.store(),
                      .group = world_of(world.world_size(), rank),
                      .timeout = std::chrono::seconds(20)},
                     options);
}

/// Runs every operation on ranks that are `ranks_per_node` to a node, exactly.
void run_all_operations(int size, int ranks_per_node, const OfiOptions& base) {
  run_ranks(size, [&](int rank, ThreadWorld& world) {
    OfiOptions options = base;
    options.node = detail::concatenate("node", rank / ranks_per_node);
    const CommunicatorPtr everyone = connect(world, rank, options);
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kLong}) {
      for (const std::int64_t numel : {1, 2500, 100'003}) {
        SCOPED_TRACE(::testing::Message() << dtype << " of " << numel);
        const auto mine = [&](std::int64_t i) { return value_of(rank, i); };
        const auto sum = [&](std::int64_t i) {
          std::int64_t total = 0;
          for (int member = 0; member < size; ++member) {
            total += value_of(member, i);
          }
          return total;
        };
        const at::Tensor whole = make_tensor(numel * size, dtype, [](auto) { return 99; });
        everyone->all_gather(whole, make_tensor(numel, dtype, mine))->wait();
        expect_equal(whole,
                     [&](auto i) { return value_of(static_cast<int>(i / numel), i % numel); });

        const at::Tensor input = make_tensor(numel * size, dtype, mine);
        const at::Tensor part = make_tensor(numel, dtype, [](auto) { return 3; });
        everyone
            ->reduce_scatter(part, input, ReduceOp::kSum,
                             {.timeout = {}, .tag = "x", .accumulate = true})
            ->wait();
        expect_equal(part, [&](auto i) { return 3 + sum(rank * numel + i); });

        const at::Tensor reduced = make_tensor(numel, dtype, mine);
        everyone->all_reduce(reduced)->wait();
        expect_equal(reduced, sum);
        everyone->all_reduce(reduced, ReduceOp::kMax)->wait();
        expect_equal(reduced, sum);

        const at::Tensor copied = make_tensor(numel, dtype, mine);
        everyone->broadcast(copied, size - 1)->wait();
        expect_equal(copied, [&](auto i) { return value_of(size - 1, i); });
      }
    }
  });
}

TEST_F(Ofi, SeveralRailsShareLargeMessages) { run_all_operations(2, 1, loopback(3)); }

TEST_F(Ofi, TaggedMessagesReplaceRemoteWrites) {
  OfiOptions options = loopback(2);
  options.remote_writes = false;
  run_all_operations(3, 1, options);
}

TEST_F(Ofi, RingsCrossNodes) { run_all_operations(4, 2, loopback()); }

// 2 nodes of 4: where even the wider partial sums of a ring are fewer bytes.
TEST_F(Ofi, RingsCarryHalfPrecisionSumsInFp32) {
  constexpr int kSize = 8;
  run_ranks(kSize, [&](int rank, ThreadWorld& world) {
    OfiOptions options = loopback();
    options.node = rank < 4 ? "a" : "b";
    const CommunicatorPtr everyone = connect(world, rank, options);
    const std::int64_t numel = 40'000;
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
      // Any partial sum but the last is no value of the dtype: rounding on the way would show.
      const std::int64_t big = dtype == at::kBFloat16 ? 256 : 2048;
      const auto fill = [&](auto) { return rank == 0 ? big : 1; };
      const at::Tensor output = make_tensor(numel, dtype, fill);
      everyone->reduce_scatter(output, make_tensor(kSize * numel, dtype, fill))->wait();
      expect_equal(output, [&](auto) { return big + 8; });
      const at::Tensor tensor = make_tensor(kSize * numel, dtype, fill);
      everyone->all_reduce(tensor)->wait();
      expect_equal(tensor, [&](auto) { return big + 8; });
    }
  });
}

TEST_F(Ofi, RunsOverOtherProviders) {
  for (const char* provider : {"net", "shm"}) {
    SCOPED_TRACE(provider);
    OfiOptions options = loopback();
    options.provider = provider;
    if (options.provider == "shm") {
      options.interfaces.clear();
    }
    run_all_operations(2, 1, options);
  }
}

TEST_F(Ofi, ManyRanksPassABarrierAndSmallSums) {
  run_ranks(9, [&](int rank, ThreadWorld& world) {
    const CommunicatorPtr everyone = connect(world, rank, loopback());
    for (int round = 0; round < 20; ++round) {
      const at::Tensor sum = make_tensor(3, at::kInt, [&](auto) { return rank + round; });
      everyone->all_reduce(sum)->wait();
      expect_equal(sum, [&](auto) { return 36 + 9 * round; });
      everyone->barrier();
    }
  });
}

TEST_F(Ofi, ARankWhoseProviderIsMissingTellsTheOthers) {
  run_ranks(2, [&](int rank, ThreadWorld& world) {
    OfiOptions options = loopback();
    if (rank == 1) {
      options.provider = "no_such_provider";
    }
    try {
      static_cast<void>(connect(world, rank, options));
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("no_such_provider"), std::string::npos) << text;
      EXPECT_EQ(text.find("global rank 1 failed") != std::string::npos, rank == 0) << text;
    }
  });
}

TEST_F(Ofi, DifferentCardsAreFoundBeforeAnythingIsSent) {
  run_ranks(2, [&](int rank, ThreadWorld& world) {
    EXPECT_THROW(
        static_cast<void>(connect(world, rank, loopback(static_cast<std::size_t>(rank) + 1))),
        ConfigError);
  });
}

TEST_F(Ofi, AMissingRankIsNamedWhenTheTimeLimitOfConnectingEnds) {
  ThreadWorld world(2);
  try {
    static_cast<void>(connect_ofi(
        {.store = world.store(), .group = world_of(2, 0), .timeout = std::chrono::milliseconds(50)},
        loopback()));
    ADD_FAILURE() << "no error";
  } catch (const TimeoutError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("global rank 1 did not arrive within the 50 ms"), std::string::npos)
        << text;
  }
}

TEST_F(Ofi, AllocatedMemoryOutlivesItsCommunicator) {
  std::array<at::Tensor, 2> kept;
  run_ranks(2, [&](int rank, ThreadWorld& world) {
    const CommunicatorPtr everyone = connect(world, rank, loopback());
    const at::Tensor memory = everyone->allocate(1 << 20);
    memory.fill_(rank + 1);
    everyone->broadcast(memory, 1)->wait();
    kept[static_cast<std::size_t>(rank)] = memory;
  });
  for (const at::Tensor& memory : kept) {
    expect_equal(memory, [](auto) { return 2; });
  }
}

TEST_F(Ofi, SlotsThatDifferAreADisagreement) {
  run_ranks(2, [&](int rank, ThreadWorld& world) {
    const CommunicatorPtr everyone = connect(world, rank, loopback());
    const CommunicatorPtr part = everyone->split(
        {"part", {0, 1}, rank, rank == 0 ? std::vector<int>{1, 0} : std::vector<int>{}});
    const at::Tensor tensor = make_tensor(4, at::kFloat, [](auto) { return 1; });
    EXPECT_THROW(part->all_reduce(tensor)->wait(), ScheduleError);
    everyone->all_reduce(tensor)->wait();  // Another group is not touched.
    expect_equal(tensor, [](auto) { return 2; });
  });
}

}  // namespace
}  // namespace hopshard::testing
