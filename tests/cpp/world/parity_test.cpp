// Sharded training over all degrees equals one process with the data of all ranks, bit for bit.
#include <gtest/gtest.h>

#include "hopshard/comm/decorators.hpp"
#include "hopshard/comm/recording.hpp"
#include "training_world.hpp"

namespace hopshard::testing {
namespace {

constexpr int kSteps = 3;

struct World {
  int size = 1;
  int degree = 1;
  int ranks_per_node = 2;
};

std::ostream& operator<<(std::ostream& out, const World& world) {
  return out << world.size << " ranks, degree " << world.degree << ", " << world.ranks_per_node
             << " per node";
}

class Parity : public ::testing::TestWithParam<World> {
 protected:
  /// @param hold  the passes before the last are held, instead of counted.
  static void train(int num_passes, const OrderOf& order_of, bool hold, const Decorator& decorate,
                    bool leaves_the_order = false, bool stays = false, int secondary_degree = 0) {
    const World world = GetParam();
    const Reference reference(world.size, kSteps, num_passes, order_of);
    run_ranks(world.size, [&](int rank, LocalHub& hub) {
      const GroupLayout layout(world.size, world.ranks_per_node, world.degree);
      const Model model(/*seed=*/rank);  // Rank 0's values count.
      EngineOptions options;
      options.backward_passes_per_step = hold ? 1 : num_passes;
      options.second_hop_bucket_bytes = 256;  // Several buckets.
      options.reshard_after_forward = !stays;
      options.fills_idle_memory = true;
      ShardEngine engine(model.units, make_groups(hub, layout, rank, decorate, secondary_degree),
                         options);
      expect_all_sharded(engine);
      std::int64_t allocations = 0;
      bool is_steady = true;
      for (int step = 0; step < kSteps; ++step) {
        for (int pass = 0; pass < num_passes; ++pass) {
          engine.hold_second_hop(hold && pass + 1 < num_passes);
          const std::vector<int> order = order_of(rank, step, pass);
          is_steady = is_steady && order == all_units(rank, step, pass);
          const at::Tensor output = model.forward(engine, input_of(rank, step, pass), order);
          for (const ShardedBuffer& buffer : engine.store().buffers()) {
            EXPECT_EQ(buffer.flat->is_attached(), buffer.unit == 0 || stays) << buffer.unit;
          }
          loss_of(output, rank, step, pass).backward();
          expect_all_sharded(engine);
        }
        EXPECT_TRUE(engine.finish_gradients());
        EXPECT_FALSE(engine.finish_gradients());  // Nothing happened since.
        const Reference::Step& expected = reference.steps[static_cast<std::size_t>(step)];
        expect_gradients(engine, expected);
        step_shards(engine);
        expect_weights(engine, expected);
        if (is_steady && step > 1) {  // The first step learns the order.
          EXPECT_EQ(allocations, engine.statistics().pool_allocations);
        }
        allocations = engine.statistics().pool_allocations;
      }
      EXPECT_EQ(engine.statistics().num_deviations > 0, leaves_the_order);
    });
  }
};

TEST_P(Parity, OnePass) { train(1, all_units, false, {}); }
TEST_P(Parity, TwoPasses) { train(2, all_units, false, {}); }
TEST_P(Parity, FourPasses) { train(4, all_units, false, {}); }
TEST_P(Parity, HeldPasses) { train(3, all_units, true, {}); }
TEST_P(Parity, RanksSkipUnits) { train(2, units_of_choice, false, {}); }
TEST_P(Parity, UnitsStayForTheBackward) {
  train(2, all_units, false, {}, /*leaves_the_order=*/false, /*stays=*/true);
  train(2, units_of_choice, false, {}, /*leaves_the_order=*/false, /*stays=*/true);
}

TEST_P(Parity, SecondaryShards) {
  for (const int divisor : {1, 2, 4}) {
    if (GetParam().degree % divisor == 0) {
      const int degree = GetParam().degree / divisor;
      train(2, all_units, false, {}, /*leaves_the_order=*/false, /*stays=*/false, degree);
      train(2, units_of_choice, true, {}, /*leaves_the_order=*/false, /*stays=*/false, degree);
    }
  }
}

TEST_P(Parity, SimulatedStreams) {
  for (const std::uint64_t seed : {1u, 2u}) {
    const Decorator simulate = [seed](CommunicatorPtr inner) {
      return make_simulated_communicator(
          std::move(inner), {.seed = seed, .max_delay = std::chrono::microseconds(300)});
    };
    train(2, all_units, false, simulate);
    train(2, units_of_choice, false, simulate);
    train(3, all_units, true, simulate, /*leaves_the_order=*/false, /*stays=*/true);
    train(2, units_of_choice, false, simulate, /*leaves_the_order=*/false, /*stays=*/false,
          /*secondary_degree=*/(GetParam().degree + 1) / 2);
  }
}

// All ranks leave the order that the first step learned: gradients that it has no place for wait
// for the step's end.
TEST_P(Parity, AnotherOrder) {
  for (const int num_passes : {1, 2}) {
    train(
        num_passes,
        [](int, int step, int) {
          return step == 0 ? std::vector<int>{1, 2, 3} : std::vector<int>{3, 1, 2};
        },
        false, {}, /*leaves_the_order=*/true);
  }
}

TEST_P(Parity, LateRanks) {
  for (const std::uint64_t seed : {1u, 2u}) {
    train(2, units_of_choice, false, [seed](CommunicatorPtr inner) {
      DelayedOptions options;
      options.seed = seed;
      options.max_delay = std::chrono::microseconds(300);
      return make_delayed_communicator(std::move(inner), options);
    });
  }
}

std::vector<World> worlds() {
  std::vector<World> all;
  for (const int size : {1, 2, 4, 8}) {
    for (int degree = 1; degree <= size; degree *= 2) {
      all.push_back({size, degree, 2});
    }
  }
  all.push_back({8, 8, 4});
  all.push_back({8, 4, 8});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Worlds, Parity, ::testing::ValuesIn(worlds()), [](const auto& tested) {
  return "n" + std::to_string(tested.param.size) + "_p" + std::to_string(tested.param.degree) +
         "_k" + std::to_string(tested.param.ranks_per_node);
});

// Hop 1 on every pass, hop 2 once per step, whether passes are counted or held.
TEST(Traffic, CollectivesOfAStepByNumber) {
  constexpr int kPasses = 3;
  for (const bool hold : {false, true}) {
    run_ranks(4, [&](int rank, LocalHub& hub) {
      const auto meter = std::make_shared<Meter>();
      const Decorator record = [&](const CommunicatorPtr& inner) {
        return make_recording_communicator(inner, inner->group(), meter, /*ranks_per_node=*/2);
      };
      const Model model(0);
      EngineOptions options;
      options.backward_passes_per_step = hold ? 1 : kPasses;
      ShardEngine engine(model.units, make_groups(hub, GroupLayout(4, 2, 2), rank, record),
                         options);
      for (int step = 0; step < 3; ++step) {
        meter->reset();
        for (int pass = 0; pass < kPasses; ++pass) {
          engine.hold_second_hop(hold && pass + 1 < kPasses);
          loss_of(model.forward(engine, input_of(rank, step, pass), {1, 2, 3}), rank, step, pass)
              .backward();
        }
        engine.finish_gradients();
        step_shards(engine);
        const auto calls = [&](const CommFilter& filter) {
          return comm_total(*meter, "calls", filter);
        };
        // Per pass: five flat buffers in forward, all but the root's again in backward; one
        // reduction for each of the four units.
        EXPECT_EQ(calls({.group = "sharding", .op = "all_gather", .kind = {}}), kPasses * (5 + 4));
        EXPECT_EQ(calls({.group = "sharding", .op = "reduce_scatter", .kind = {}}), kPasses * 4);
        EXPECT_EQ(calls({.group = "replication", .op = "all_reduce", .kind = {}}), 1);
        // The agreement of the step; the first one agrees on two orders too.
        EXPECT_EQ(calls({.group = "world", .op = {}, .kind = {}}), step == 0 ? 3 : 1);
      }
    });
  }
}

// Slices are permuted over two nodes; a test of slots is void if they are the identity.
TEST(SliceOrderInWorld, SlotsArePermutedOverTwoNodes) {
  EXPECT_FALSE(make_sharding_group(GroupLayout(8, 2, 4), 0).has_identity_slots());
  EXPECT_FALSE(make_sharding_group(GroupLayout(4, 2, 4), 0).has_identity_slots());
}

// Shards must be laid out in slice order, not merely in any order that all ranks share: it is what
// a two-level gather and a checkpoint rely on.
TEST(SliceOrderInWorld, EachRankHoldsItsSlice) {
  run_ranks(4, [](int rank, LocalHub& hub) {
    const GroupLayout layout(4, 2, 4);
    const Model model(0);
    const std::vector<at::Tensor> values = Model(0).parameters();
    ShardEngine engine(model.units, make_groups(hub, layout, rank), {});
    const ShardedBuffer& root = engine.store().buffers()[0];
    const std::int64_t n = root.flat->layout().slice_numel();
    // 144 elements in slices of 64: the last is padding.
    const std::int64_t begin = std::min(layout.slice_of(rank) * n, values[0].numel());
    const std::int64_t numel = std::min(n, values[0].numel() - begin);
    EXPECT_EQ(layout.slice_of(rank),
              std::vector<int>({0, 2, 1, 3})[static_cast<std::size_t>(rank)]);
    const at::Tensor expected = values[0].detach().reshape({-1}).narrow(0, begin, numel);
    EXPECT_TRUE(at::equal(root.master.narrow(0, 0, numel), expected));
  });
}

class Backwards : public ::testing::TestWithParam<World> {
 protected:
  /// Runs `num_passes` backwards where hop 2 was to follow every `passes_per_step`.
  static void run(int passes_per_step, int num_passes) {
    const World world = GetParam();
    const Reference reference(world.size, 1, num_passes, all_units);
    run_ranks(world.size, [&](int rank, LocalHub& hub) {
      const Model model(rank);
      EngineOptions options;
      options.backward_passes_per_step = passes_per_step;
      ShardEngine engine(model.units,
                         make_groups(hub, GroupLayout(world.size, 2, world.degree), rank), options);
      for (int pass = 0; pass < num_passes; ++pass) {
        loss_of(model.forward(engine, input_of(rank, 0, pass), all_units(rank, 0, pass)), rank, 0,
                pass)
            .backward();
      }
      EXPECT_TRUE(engine.finish_gradients());
      expect_gradients(engine, reference.steps[0]);
    });
  }
};

// Sums that hop 2 has closed must not be counted once per sharding group, nor twice.
TEST_P(Backwards, OneTooFew) { run(3, 2); }
TEST_P(Backwards, OneTooMany) { run(2, 3); }
TEST_P(Backwards, ThreeHops) { run(1, 3); }

INSTANTIATE_TEST_SUITE_P(Worlds, Backwards,
                         ::testing::Values(World{2, 1}, World{2, 2}, World{4, 2}),
                         [](const auto& tested) {
                           return "n" + std::to_string(tested.param.size) + "_p" +
                                  std::to_string(tested.param.degree);
                         });

}  // namespace
}  // namespace hopshard::testing
