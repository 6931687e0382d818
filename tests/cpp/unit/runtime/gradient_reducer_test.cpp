// Which gradient is counted how often: 4 ranks, 2 replicas, integer values.
#include "hopshard/runtime/gradient_reducer.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "hopshard/comm/process_groups.hpp"
#include "hopshard/core/error.hpp"
#include "support/thread_world.hpp"

namespace hopshard {
namespace {

using testing::run_ranks;

constexpr int kWorld = 4;

/// Unit 1 holds two trainable parameters and a frozen one; every rank's gradient is rank + value.
class Reducer {
 public:
  Reducer(LocalHub& hub, int rank, int degree)
      : rank_(rank),
        weight(at::zeros({10, 7}).set_requires_grad(true)),
        bias(at::zeros({5}).set_requires_grad(true)),
        groups(make_process_groups(GroupLayout(kWorld, 2, degree), rank,
                                   [&](const Group& group) { return hub.communicator(group); })),
        store({{"", {}, {}}, {"h", {"weight", "bias", "frozen"}, {weight, bias, at::zeros({3})}}},
              groups.world, groups.sharding, pool),
        reducer(store, groups.sharding, groups.replication, pool, 1.0 / kWorld, 64) {}

  void arrive(int parameter, int value) {
    const at::Tensor& target = parameter == 0 ? weight : bias;
    target.mutable_grad() = at::full(target.sizes(), rank_ + value, target.options());
    reducer.take(parameter);
    EXPECT_FALSE(target.grad().defined());
  }
  /// The mean over the ranks of `arrive(value)`.
  static float mean(int value) { return 1.5f + static_cast<float>(value); }

  void expect(int parameter, float value) {
    const at::Tensor mine = store.piece_of(reducer.arenas()[0], parameter);
    EXPECT_TRUE(at::equal(mine, at::full(mine.sizes(), value, mine.options())))
        << "parameter " << parameter << " is " << mine << ", not " << value;
  }

 private:
  int rank_;

 public:
  at::Tensor weight;
  at::Tensor bias;
  ProcessGroups groups;
  BufferPool pool;
  ShardStore store;
  GradientReducer reducer;
};

class Sums : public ::testing::TestWithParam<int> {
 protected:
  static void run(const std::function<void(Reducer&)>& body) {
    run_ranks(kWorld, [&](int rank, LocalHub& hub) {
      Reducer reducer(hub, rank, GetParam());
      body(reducer);
    });
  }
  static bool has_replicas() { return GetParam() < kWorld; }
};

TEST_P(Sums, HopsMakeTheMeanOverTheWorld) {
  run([](Reducer& r) {
    r.arrive(0, 2);
    r.arrive(1, 7);
    r.reducer.reduce(1);
    EXPECT_TRUE(r.reducer.is_open());
    r.reducer.second_hop();
    EXPECT_FALSE(r.reducer.is_open());
    r.expect(0, Reducer::mean(2));
    r.expect(1, Reducer::mean(7));
    EXPECT_EQ(r.pool.taken_bytes(), 0);
  });
}

TEST_P(Sums, MicroStepsAddUp) {
  run([](Reducer& r) {
    for (const int value : {1, 2, 3}) {
      r.arrive(0, value);
      r.reducer.reduce(1);
    }
    r.reducer.second_hop();
    r.expect(0, Reducer::mean(1) + Reducer::mean(2) + Reducer::mean(3));
    r.expect(1, 0);
    EXPECT_TRUE(r.reducer.has_gradient(0));
    EXPECT_FALSE(r.reducer.has_gradient(1));
  });
}

TEST_P(Sums, ClosedSumsAreNotCountedPerReplica) {
  run([](Reducer& r) {
    for (const int value : {1, 2, 3}) {
      r.arrive(0, value);
      r.reducer.reduce(1);
      r.reducer.second_hop();
    }
    r.expect(0, Reducer::mean(1) + Reducer::mean(2) + Reducer::mean(3));
  });
}

// Buckets of 64 bytes: hop 2 of the unit begins inside the pass.
TEST_P(Sums, TheLastPassHopsEarly) {
  run([](Reducer& r) {
    for (int step = 1; step <= 2; ++step) {
      r.reducer.begin_pass(/*is_last=*/false);
      r.arrive(0, step);
      r.reducer.reduce(1, /*is_final=*/true);
      EXPECT_FALSE(r.reducer.is_hopping());
      r.reducer.begin_pass(/*is_last=*/true);
      EXPECT_FALSE(r.reducer.is_hopping());
      r.arrive(0, 2 * step);
      r.arrive(1, 3);
      r.reducer.reduce(1, /*is_final=*/true);
      r.reducer.begin_pass(/*is_last=*/true);  // Only waits.
      EXPECT_EQ(r.reducer.is_hopping(), has_replicas());
      r.reducer.second_hop();
      EXPECT_FALSE(r.reducer.is_hopping());
      r.expect(0, Reducer::mean(step) + Reducer::mean(2 * step));
      r.expect(1, Reducer::mean(3));
      r.reducer.zero();
    }
  });
}

// Its hop 2 begins as soon as somebody waits for it: the next backward must complete it first.
TEST_P(Sums, AFinalReductionUnderWayCountsAsHopping) {
  run([](Reducer& r) {
    r.reducer.begin_pass(/*is_last=*/true);
    r.arrive(0, 1);
    r.reducer.reduce(1, /*is_final=*/true);
    EXPECT_EQ(r.reducer.is_hopping(), has_replicas());
    if (r.reducer.is_hopping()) {
      r.reducer.second_hop();
    }
    r.reducer.begin_pass(/*is_last=*/true);
    r.arrive(0, 2);
    r.reducer.reduce(1, /*is_final=*/true);
    r.reducer.second_hop();
    r.expect(0, Reducer::mean(1) + Reducer::mean(2));
  });
}

TEST_P(Sums, AUnitThatIsReducedAgainHopsAfterwards) {
  run([](Reducer& r) {
    r.reducer.begin_pass(/*is_last=*/true);
    for (const int value : {1, 2}) {
      r.arrive(0, value);
      r.reducer.reduce(1, /*is_final=*/false);
    }
    r.reducer.begin_pass(/*is_last=*/true);
    EXPECT_FALSE(r.reducer.is_hopping());
    r.reducer.second_hop();
    r.expect(0, Reducer::mean(1) + Reducer::mean(2));
  });
}

TEST_P(Sums, ZeroForgetsHopsThatHaveBegun) {
  run([](Reducer& r) {
    r.reducer.begin_pass(/*is_last=*/true);
    r.arrive(0, 5);
    r.reducer.reduce(1, /*is_final=*/true);
    r.reducer.begin_pass(/*is_last=*/true);
    r.reducer.zero();
    EXPECT_FALSE(r.reducer.is_hopping());
    r.reducer.begin_pass(/*is_last=*/true);
    r.arrive(0, 1);
    r.reducer.reduce(1, /*is_final=*/true);
    r.reducer.second_hop();
    r.expect(0, Reducer::mean(1));
  });
}

TEST_P(Sums, TakingTwiceAdds) {
  run([](Reducer& r) {
    r.arrive(0, 1);
    r.arrive(0, 5);
    EXPECT_TRUE(r.reducer.has_leftover(1));
    r.reducer.reduce(1);
    EXPECT_FALSE(r.reducer.has_leftover(1));
    r.reducer.second_hop();
    r.expect(0, Reducer::mean(1) + Reducer::mean(5));
  });
}

TEST_P(Sums, ARankWithoutGradientsSendsZerosNotWhatTheBlockHeld) {
  run([](Reducer& r) {
    r.arrive(0, 1000);
    r.reducer.reduce(1);  // The block that comes back holds large values.
    r.reducer.zero();
    if (r.groups.world->rank() == 0) {
      r.arrive(1, 8);
    }
    r.reducer.reduce(1);
    r.reducer.second_hop();
    r.expect(0, 0);
    r.expect(1, 2);  // 8 of one rank in 4.
  });
}

TEST_P(Sums, ZeroForgetsEverything) {
  run([](Reducer& r) {
    r.arrive(0, 1);
    r.reducer.reduce(1);
    r.reducer.second_hop();
    r.arrive(0, 1);
    r.reducer.reduce(1);
    r.arrive(0, 1);
    r.reducer.zero();
    EXPECT_FALSE(r.reducer.is_open());
    EXPECT_FALSE(r.reducer.has_leftover(1));
    EXPECT_FALSE(r.reducer.has_gradient(0));
    r.expect(0, 0);
    r.arrive(0, 4);
    r.reducer.reduce(1);
    r.reducer.second_hop();
    r.expect(0, Reducer::mean(4));
  });
}

TEST_P(Sums, ZeroOfOneParameterLeavesTheOthers) {
  run([](Reducer& r) {
    r.arrive(0, 1);
    r.arrive(1, 2);
    r.reducer.reduce(1);
    r.reducer.second_hop();
    r.arrive(0, 3);
    r.arrive(1, 4);
    r.reducer.zero(0);
    EXPECT_FALSE(r.reducer.has_gradient(0));
    r.expect(0, 0);
    r.arrive(0, 5);
    r.reducer.reduce(1);
    r.reducer.second_hop();
    r.expect(0, Reducer::mean(5));
    r.expect(1, Reducer::mean(2) + Reducer::mean(4));
  });
}

TEST_P(Sums, AGradientThatIsSetReplacesTheSum) {
  run([](Reducer& r) {
    r.arrive(0, 1);
    r.arrive(1, 1);
    r.reducer.reduce(1);
    r.reducer.second_hop();
    r.reducer.set_gradient(0, at::full({10, 7}, 42.0));
    r.expect(0, 42);
    r.expect(1, Reducer::mean(1));
    r.arrive(0, 2);
    r.reducer.reduce(1);
    r.reducer.second_hop();
    r.expect(0, 42 + Reducer::mean(2));
  });
}

TEST_P(Sums, AGradientMayBeSetBeforeAnyBackward) {
  run([](Reducer& r) {
    r.reducer.set_gradient(0, at::full({10, 7}, 42.0));
    EXPECT_TRUE(r.reducer.has_gradient(0));
    r.expect(0, 42);
    r.arrive(0, 2);
    r.reducer.reduce(1);
    r.reducer.second_hop();
    r.expect(0, 42 + Reducer::mean(2));
  });
}

TEST_P(Sums, AGradientSetInAnOpenSumIsRefused) {
  run([](Reducer& r) {
    r.arrive(0, 1);
    r.reducer.reduce(1);
    if (has_replicas()) {
      EXPECT_THROW(r.reducer.set_gradient(0, at::full({10, 7}, 42.0)), ShardedError);
    } else {
      r.reducer.set_gradient(0, at::full({10, 7}, 42.0));
      r.expect(0, 42);
    }
  });
}

TEST_P(Sums, AHookThatUsedUpTheGradientLeavesNothing) {
  run([](Reducer& r) {
    r.reducer.take(0);
    EXPECT_FALSE(r.reducer.has_gradient(0));
    EXPECT_FALSE(r.reducer.has_leftover(1));
  });
}

INSTANTIATE_TEST_SUITE_P(Degrees, Sums, ::testing::Values(1, 2, 4));

}  // namespace
}  // namespace hopshard
