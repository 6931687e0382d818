// What must happen when ranks fail, disagree or break off a pass: a typed error on every rank, no
// hang, no memory held, and an engine that can be destroyed or goes on.
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <atomic>

#include "hopshard/comm/decorators.hpp"
#include "hopshard/core/error.hpp"
#include "training_world.hpp"

namespace hopshard::testing {
namespace {

/// Passes everything on; tests override what they break.
class Forwarding : public Communicator {
 public:
  explicit Forwarding(CommunicatorPtr inner)
      : Communicator(inner->group()), inner_(std::move(inner)) {}
  [[nodiscard]] std::string_view backend() const noexcept override { return "forwarding"; }
  void abort(std::string_view reason) override { inner_->abort(reason); }

 protected:
  [[nodiscard]] virtual CommOptions passed(const CommOptions& options) const { return options; }
  at::Tensor do_allocate(std::int64_t num_bytes) override { return inner_->allocate(num_bytes); }

 private:
  WorkPtr do_all_gather(at::Tensor output, at::Tensor input, const CommOptions& options) override {
    return inner_->all_gather(std::move(output), std::move(input), passed(options));
  }
  WorkPtr do_reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                            const CommOptions& options) override {
    return inner_->reduce_scatter(std::move(output), std::move(input), op, passed(options));
  }
  WorkPtr do_all_reduce(at::Tensor tensor, ReduceOp op, const CommOptions& options) override {
    return inner_->all_reduce(std::move(tensor), op, passed(options));
  }
  WorkPtr do_broadcast(at::Tensor tensor, int root, const CommOptions& options) override {
    return inner_->broadcast(std::move(tensor), root, passed(options));
  }
  void do_barrier(const CommOptions& options) override { inner_->barrier(passed(options)); }
  CommunicatorPtr do_split(Group part) override { return inner_->split(std::move(part)); }

  CommunicatorPtr inner_;
};

/// Without tags, as a transport that cannot compare what ranks issue.
class Tagless final : public Forwarding {
 public:
  using Forwarding::Forwarding;

 private:
  [[nodiscard]] CommOptions passed(const CommOptions& options) const override {
    return {.timeout = options.timeout, .tag = {}, .accumulate = options.accumulate};
  }
};

/// Has no memory for one allocation; they are counted from 0.
class OutOfMemory final : public Forwarding {
 public:
  OutOfMemory(CommunicatorPtr inner, int fail_at) : Forwarding(std::move(inner)), left_(fail_at) {}

 private:
  at::Tensor do_allocate(std::int64_t num_bytes) override {
    if (left_-- == 0) {
      throw Error("out of memory, says the test");
    }
    return Forwarding::do_allocate(num_bytes);
  }

  int left_;
};

void train_one_step(ShardEngine& engine, const Model& model, int rank, int step) {
  loss_of(model.forward(engine, input_of(rank, step, 0), all_units(rank, step, 0)), rank, step, 0)
      .backward();
  engine.finish_gradients();
}

// Every call of one rank fails once, in forward, backward and step.
TEST(Failures, EveryRankGetsAnErrorAndNothingHangs) {
  const GroupLayout layout(4, 2, 2);
  int call = 0;
  for (; call < 200; ++call) {
    std::atomic<int> num_errors = 0;
    const auto train = [&] {
      run_ranks(4, [&](int rank, LocalHub& hub) {
        const Model model(rank);
        DelayedOptions options;
        options.fail_at_call = rank == 1 ? call : -1;
        try {
          // The groups count their calls separately, so all three fail within a run of calls.
          ShardEngine engine(model.units,
                             make_groups(hub, layout, rank,
                                         [&](CommunicatorPtr inner) {
                                           return make_delayed_communicator(std::move(inner),
                                                                            options);
                                         }),
                             {});
          train_one_step(engine, model, rank, 0);
          train_one_step(engine, model, rank, 1);
        } catch (const CommError&) {
          ++num_errors;
          throw;
        }
      });
    };
    try {
      train();
      break;  // Fewer calls than this: all of them have failed once.
    } catch (const CommError&) {
      EXPECT_EQ(num_errors, 4) << "at call " << call;
    }
  }
  EXPECT_GT(call, 20);
  EXPECT_LT(call, 200);
}

// The sharding group fails at each of its calls once, wherever in the step that is.
TEST(Failures, AfterAnErrorNothingStaysGathered) {
  int num_errors = 0;
  for (int call = 0; call < 40; ++call) {
    const auto train = [call] {
      run_ranks(2, [call](int rank, LocalHub& hub) {
        const Model model(0);
        DelayedOptions options;
        options.fail_at_call = rank == 0 ? call : -1;
        const Decorator fail = [&](CommunicatorPtr inner) {
          return inner->group().name.starts_with("sharding")
                     ? make_delayed_communicator(std::move(inner), options)
                     : inner;
        };
        ShardEngine engine(model.units, make_groups(hub, GroupLayout(2, 2, 2), rank, fail), {});
        try {
          train_one_step(engine, model, rank, 0);
        } catch (const CommError&) {
          expect_all_sharded(engine);
          throw;
        }
      });
    };
    try {
      train();
    } catch (const CommError&) {
      ++num_errors;
    }
  }
  EXPECT_GT(num_errors, 10);
  EXPECT_LT(num_errors, 40);
}

/// Runs one unit by itself: rank 1 another one than the others, of the same size.
void run_different_units(const Decorator& decorate) {
  run_ranks(4, [&](int rank, LocalHub& hub) {
    const at::NoGradGuard no_grad;
    const Model model(0);
    ShardEngine engine(model.units, make_groups(hub, GroupLayout(4, 4, 4), rank, decorate), {});
    const int unit = rank == 1 ? 3 : 1;  // Both have a weight and a bias.
    engine.before_forward(unit);
    const at::Tensor output = model.unit(unit, input_of(rank, 0, 0));
    engine.after_forward(unit, {output});
    engine.finish_gradients();
  });
}

std::string schedule_error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const ScheduleError& error) {
    return error.what();
  }
  return "no error";
}

TEST(OrderMismatch, TheLocalHubNamesBothUnits) {
  const std::string text = schedule_error_of([] { run_different_units({}); });
  EXPECT_NE(text.find("unshard/h.0"), std::string::npos) << text;
  EXPECT_NE(text.find("unshard/h.2"), std::string::npos) << text;
}

// Gathers of equal size that are mixed up raise no error in a transport: the step finds them.
TEST(OrderMismatch, TheStepNamesBothUnitsWhereTheTransportSeesNothing) {
  const std::string text = schedule_error_of([] {
    run_different_units([](CommunicatorPtr inner) -> CommunicatorPtr {
      return std::make_shared<Tagless>(std::move(inner));
    });
  });
  EXPECT_NE(text.find("number 0 of this step"), std::string::npos) << text;
  EXPECT_NE(text.find("gather of 'h.0' on rank 0 2 3"), std::string::npos) << text;
  EXPECT_NE(text.find("gather of 'h.2' on rank 1"), std::string::npos) << text;
  EXPECT_NE(text.find("No weight was changed"), std::string::npos) << text;
}

struct UserError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// All ranks break off in the same place, as a user's error on every rank does; then the next step
// must be as good as if nothing had happened.
TEST(BrokenPasses, TrainingGoesOnAfterAnExceptionInForward) {
  const Reference reference(2, 1, 1, all_units);
  run_ranks(2, [&](int rank, LocalHub& hub) {
    const Model model(0);
    ShardEngine engine(model.units, make_groups(hub, GroupLayout(2, 2, 2), rank), {});
    engine.before_root_forward();
    engine.before_forward(2);
    engine.abandon_forward();
    expect_all_sharded(engine);
    train_one_step(engine, model, rank, 0);
    expect_gradients(engine, reference.steps[0]);
  });
}

TEST(BrokenPasses, TrainingGoesOnAfterAnExceptionInBackward) {
  const Reference reference(2, 1, 1, all_units);
  run_ranks(2, [&](int rank, LocalHub& hub) {
    const Model model(0);
    ShardEngine engine(model.units, make_groups(hub, GroupLayout(2, 2, 2), rank), {});
    engine.before_root_forward();
    at::Tensor x = model.root(input_of(rank, 0, 0));
    for (const int unit : {1, 2, 3}) {
      engine.before_forward(unit);
      x = model.unit(unit, x);
      if (unit == 1) {
        x.register_hook([](const at::Tensor& /*grad*/) { throw UserError("user's hook"); });
      }
      engine.after_forward(unit, {x});
    }
    x = model.root(x);
    engine.after_root_forward({x});
    at::Tensor loss = loss_of(x, rank, 0, 0);
    EXPECT_THROW(loss.backward(), std::exception);
    engine.zero_gradients();
    train_one_step(engine, model, rank, 0);
    expect_gradients(engine, reference.steps[0]);
    expect_all_sharded(engine);
  });
}

// On all ranks, at each allocation of the first steps once.
class MemoryRunsOut : public ::testing::TestWithParam<int> {};  // Degree of secondary shards, or 0.
INSTANTIATE_TEST_SUITE_P(Secondary, MemoryRunsOut, ::testing::Values(0, 2));

TEST_P(MemoryRunsOut, TrainingGoesOn) {
  constexpr int kSteps = 3;
  const Reference reference(4, kSteps, 1, all_units);
  int num_failures = 0;
  int num_at_start = 0;
  constexpr int kMostAllocations = 60;
  for (int fail_at = 0; fail_at < kMostAllocations; ++fail_at) {
    std::atomic<int> failed = 0;
    std::atomic<int> failed_at_start = 0;
    run_ranks(4, [&](int rank, LocalHub& hub) {
      const Decorator exhaust = [&](CommunicatorPtr inner) -> CommunicatorPtr {
        const bool is_sharding = inner->group().name.starts_with("sharding");
        return is_sharding ? std::make_shared<OutOfMemory>(std::move(inner), fail_at) : inner;
      };
      const Model model(rank);
      std::unique_ptr<ShardEngine> engine;
      try {
        engine = std::make_unique<ShardEngine>(
            model.units, make_groups(hub, GroupLayout(4, 2, 4), rank, exhaust, GetParam()),
            EngineOptions{});
      } catch (const Error&) {
        ++failed_at_start;
        return;
      }
      for (int step = 0; step < kSteps; ++step) {
        const Reference::Step& expected = reference.steps[static_cast<std::size_t>(step)];
        try {
          train_one_step(*engine, model, rank, step);
        } catch (const std::exception& error) {  // Through autograd it has no type of ours.
          EXPECT_NE(std::string(error.what()).find("says the test"), std::string::npos)
              << error.what();
          ++failed;
          engine->zero_gradients();
          expect_all_sharded(*engine);
          train_one_step(*engine, model, rank, step);
        }
        expect_gradients(*engine, expected);
        step_shards(*engine);
        try {
          expect_weights(*engine, expected);
        } catch (const Error&) {
          ++failed;
          expect_all_sharded(*engine);
          expect_weights(*engine, expected);
        }
      }
    });
    num_failures += failed;
    num_at_start += failed_at_start;
    EXPECT_TRUE(failed == 0 || failed == 4) << "at allocation " << fail_at;
    if (failed == 0 && failed_at_start == 0) {
      break;
    }
  }
  EXPECT_GT(num_at_start, 4);
  EXPECT_GE(num_failures, 4 * 4);
  EXPECT_LT(num_failures + num_at_start, 4 * kMostAllocations);
}

TEST(BrokenPasses, AGradientOfAShardedUnitNamesItsParameter) {
  run_ranks(2, [](int rank, LocalHub& hub) {
    const Model model(0);
    ShardEngine engine(model.units, make_groups(hub, GroupLayout(2, 2, 2), rank), {});
    engine.pin(1);
    at::Tensor loss = model.units[1].parameters[0].sum();  // Not an output of the unit.
    engine.unpin(1, false);
    std::string text;
    try {
      loss.backward();
    } catch (const std::exception& error) {
      text = error.what();
    }
    EXPECT_NE(text.find("the gradient of 'h.0.weight'"), std::string::npos) << text;
    EXPECT_NE(text.find("unshard(module)"), std::string::npos) << text;
  });
}

TEST(BrokenPasses, AStepInsideAPinIsRefused) {
  run_ranks(2, [](int rank, LocalHub& hub) {
    const Model model(0);
    ShardEngine engine(model.units, make_groups(hub, GroupLayout(2, 2, 2), rank), {});
    engine.pin(2);
    EXPECT_THROW(engine.end_step(true), ShardedError);
    engine.unpin(2, false);
    engine.end_step(true);
  });
}

TEST(BrokenPasses, HooksThatOutliveTheEngineDoNothing) {
  run_ranks(2, [](int rank, LocalHub& hub) {
    const Model model(0);
    at::Tensor loss;
    {
      ShardEngine engine(model.units, make_groups(hub, GroupLayout(2, 2, 2), rank), {});
      const at::Tensor output = model.forward(engine, input_of(rank, 0, 0), all_units(rank, 0, 0));
      loss = loss_of(output, rank, 0, 0);
    }
    try {
      loss.backward();  // Reads NaNs or placeholders; must not touch the engine that is gone.
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find("is sharded"), std::string::npos) << error.what();
    }
  });
}

TEST(Engine, RefusesStepsWithoutPasses) {
  LocalHub hub(1);
  EngineOptions options;
  options.backward_passes_per_step = 0;
  EXPECT_THROW(ShardEngine(Model(0).units, make_groups(hub, GroupLayout(1, 1, 1), 0), options),
               ConfigError);
}

}  // namespace
}  // namespace hopshard::testing
