// The schedule as a pure machine: the events that modules and autograd would report, and what must
// hold for the actions. No tensor, so thousands of units and many ranks take a second. Long: one
// test per rule of the machine.
#include "hopshard/runtime/schedule.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <random>
#include <string>

#include "hopshard/core/error.hpp"

namespace hopshard {
namespace {

constexpr Action gather(int unit) { return {ActionKind::kGather, unit}; }
constexpr Action release(int unit) { return {ActionKind::kRelease, unit}; }
constexpr Action reduce(int unit) { return {ActionKind::kReduce, unit}; }

std::vector<UnitTraits> trainable(int num_units) {
  return std::vector<UnitTraits>(static_cast<std::size_t>(num_units));
}

std::string text_of(const Actions& actions) {
  std::string text;
  for (const Action& action : actions) {
    constexpr std::array kNames = {" G", " P", " W", " -", " R"};
    text += kNames.at(static_cast<std::size_t>(action.kind)) + std::to_string(action.unit);
    text += action.from_secondary ? "s" : "";
  }
  return text;
}

/// A forward of one unit, and the forwards of other units inside it.
struct Call {
  int unit = 0;
  std::vector<Call> inside{};
  bool is_incomplete = false;  ///< One of its parameters gets no gradient.
};
using Program = std::vector<Call>;

Program one_after_another(int num_units) {
  Program program;
  for (int unit = 1; unit < num_units; ++unit) {
    program.push_back({.unit = unit});
  }
  return program;
}

/// One rank: reports the events of a program in autograd's order, carries the actions out on a
/// model of memory and checks each of them.
class Rank {
 public:
  explicit Rank(std::vector<UnitTraits> traits, int prefetch_depth = 0)
      : schedule(traits, prefetch_depth),
        traits_(std::move(traits)),
        gathered_(traits_.size(), false),
        in_flight_(traits_.size(), false),
        holds_secondary_(traits_.size(), false),
        pending_(traits_.size(), false),
        num_reductions_(traits_.size(), 0) {}

  void carry_out(const Actions& actions) {
    for (const Action& action : actions) {
      const auto unit = static_cast<std::size_t>(action.unit);
      switch (action.kind) {
        case ActionKind::kGather:
        case ActionKind::kPrefetch:
          ASSERT_FALSE(gathered_[unit]) << "unit " << unit << " is gathered twice";
          gathered_[unit] = true;
          in_flight_[unit] = action.kind == ActionKind::kPrefetch;
          ASSERT_TRUE(!action.from_secondary || holds_secondary_[unit])
              << "unit " << unit << " has no secondary shards";
          ASSERT_FALSE(action.from_secondary && action.keeps_secondary);
          holds_secondary_[unit] = holds_secondary_[unit] || action.keeps_secondary;
          collectives.push_back({.kind = ActionKind::kGather,
                                 .unit = action.unit,
                                 .from_secondary = action.from_secondary});
          break;
        case ActionKind::kWait:
          ASSERT_TRUE(in_flight_[unit]) << "unit " << unit << " is waited for without need";
          in_flight_[unit] = false;
          break;
        case ActionKind::kRelease:
          ASSERT_TRUE(gathered_[unit]) << "unit " << unit << " is released twice";
          gathered_[unit] = false;
          in_flight_[unit] = false;
          break;
        case ActionKind::kReduce:
          ASSERT_TRUE(traits_[unit].is_trainable) << "frozen unit " << unit << " is reduced";
          pending_[unit] = false;
          ++num_reductions_[unit];
          collectives.push_back(action);
          break;
      }
    }
    for (std::size_t unit = 0; unit < gathered_.size(); unit += 1 + gathered_.size() / 8) {
      ASSERT_EQ(gathered_[unit] && !in_flight_[unit], schedule.is_gathered(static_cast<int>(unit)));
    }
    most_gathered = std::max(most_gathered, num_gathered());
  }

  void forward(const Program& program, bool will_backward = true) {
    carry_out(schedule.begin_forward());
    carry_out(schedule.before_forward(0));
    expect_gathered(0, "the root's forward");
    for (const Call& call : program) {
      forward_of(call, will_backward);
    }
    carry_out(schedule.after_forward(0, will_backward, /*keep=*/will_backward));
    carry_out(schedule.end_forward(will_backward));
  }

  void backward(const Program& program, bool keep = false, bool with_gradients = true) {
    num_reductions_.assign(num_reductions_.size(), 0);
    first_uses_.clear();
    for (const Call& call : program) {
      note_uses(call);
    }
    schedule.begin_backward(keep);
    carry_out(schedule.before_backward(0));
    for (auto call = program.rbegin(); call != program.rend(); ++call) {
      backward_of(*call, with_gradients);
    }
    if (with_gradients) {
      arrive({.unit = 0});
    }
    carry_out(schedule.end_backward());
  }

  /// What must hold after a backward that brought gradients.
  void expect_every_unit_reduced_once() const {
    for (std::size_t unit = 0; unit < traits_.size(); ++unit) {
      ASSERT_EQ(num_reductions_[unit], traits_[unit].is_trainable ? 1 : 0) << "unit " << unit;
      ASSERT_FALSE(pending_[unit]) << "gradients of unit " << unit << " are left behind";
    }
  }

  void expect_gathered(int unit, const std::string& when) const {
    ASSERT_TRUE(gathered_[static_cast<std::size_t>(unit)])
        << "unit " << unit << " is sharded in " << when;
    ASSERT_FALSE(in_flight_[static_cast<std::size_t>(unit)])
        << "unit " << unit << " is still being gathered in " << when;
  }

  [[nodiscard]] int num_gathered() const {
    return static_cast<int>(std::count(gathered_.begin(), gathered_.end(), true));
  }
  [[nodiscard]] bool has_pending(int unit) const {
    return pending_[static_cast<std::size_t>(unit)];
  }
  Actions take_collectives() { return std::exchange(collectives, {}); }

  Schedule schedule;
  Actions collectives;
  int most_gathered = 0;
  bool recomputes = false;

 private:
  void forward_of(const Call& call, bool will_backward) {
    carry_out(schedule.before_forward(call.unit));
    expect_gathered(call.unit, "its forward");
    for (const Call& inner : call.inside) {
      forward_of(inner, will_backward);
      expect_gathered(call.unit, "its forward, after another unit's inside it");
    }
    carry_out(schedule.after_forward(call.unit, will_backward, /*keep=*/false));
  }

  void note_uses(const Call& call) {
    if (std::find(first_uses_.begin(), first_uses_.end(), &call) == first_uses_.end()) {
      const bool is_known = std::any_of(first_uses_.begin(), first_uses_.end(),
                                        [&](const Call* use) { return use->unit == call.unit; });
      if (!is_known) {
        first_uses_.push_back(&call);
      }
    }
    for (const Call& inner : call.inside) {
      note_uses(inner);
    }
  }

  void backward_of(const Call& call, bool with_gradients) {
    carry_out(schedule.before_backward(call.unit));
    expect_gathered(call.unit, "its backward");
    if (recomputes) {
      carry_out(schedule.before_forward(call.unit));
      carry_out(schedule.after_forward(call.unit, true, false));
      expect_gathered(call.unit, "its backward, after the recomputation");
    }
    for (auto inner = call.inside.rbegin(); inner != call.inside.rend(); ++inner) {
      backward_of(*inner, with_gradients);
    }
    // Autograd adds up the gradients of several uses first; they arrive with the earliest use.
    if (with_gradients &&
        std::find(first_uses_.begin(), first_uses_.end(), &call) != first_uses_.end()) {
      arrive(call);
    }
  }

  void arrive(const Call& call) {
    if (!traits_[static_cast<std::size_t>(call.unit)].is_trainable) {
      return;
    }
    expect_gathered(call.unit, "the arrival of its gradients");
    schedule.gradient_arrived(call.unit);
    pending_[static_cast<std::size_t>(call.unit)] = true;
    if (!call.is_incomplete) {
      carry_out(schedule.gradients_complete(call.unit));
    }
  }

  std::vector<UnitTraits> traits_;
  std::vector<bool> gathered_;
  std::vector<bool> in_flight_;
  std::vector<bool> holds_secondary_;
  std::vector<bool> pending_;
  std::vector<int> num_reductions_;
  std::vector<const Call*> first_uses_;
};

/// Adopts what the ranks saw if all saw the same, as the engine does after the first step.
void adopt_if_equal(std::vector<Rank>& ranks) {
  const auto all_like_first = [&](const auto& of) {
    return std::all_of(ranks.begin(), ranks.end(),
                       [&](const Rank& rank) { return of(rank) == of(ranks.front()); });
  };
  const bool forwards = all_like_first([](const Rank& r) { return r.schedule.recorded_forward(); });
  const bool backwards =
      all_like_first([](const Rank& r) { return r.schedule.recorded_backward(); });
  for (Rank& rank : ranks) {
    if (forwards) {
      rank.schedule.adopt_forward();
    }
    if (backwards) {
      rank.schedule.adopt_backward();
    }
  }
}

void expect_one_order(std::vector<Rank>& ranks) {
  const Actions first = ranks.front().take_collectives();
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    const Actions other = ranks[rank].take_collectives();
    const auto [mine, theirs] =
        std::mismatch(first.begin(), first.end(), other.begin(), other.end());
    ASSERT_TRUE(mine == first.end() && theirs == other.end())
        << "ranks 0 and " << rank << " differ at collective " << (mine - first.begin()) << " of "
        << first.size() << " and " << other.size() << '\n'
        << text_of({first.begin(), first.begin() + std::min<std::ptrdiff_t>(40, std::ssize(first))})
        << '\n'
        << text_of(
               {other.begin(), other.begin() + std::min<std::ptrdiff_t>(40, std::ssize(other))});
  }
}

TEST(Schedule, GathersReleasesAndReducesEachUnitOnceInOrder) {
  Schedule schedule(trainable(3));
  EXPECT_EQ(schedule.begin_forward(), Actions());
  EXPECT_EQ(schedule.before_forward(0), Actions({gather(0)}));
  EXPECT_EQ(schedule.before_forward(1), Actions({gather(1)}));
  EXPECT_EQ(schedule.after_forward(1, true, false), Actions({release(1)}));
  EXPECT_EQ(schedule.before_forward(2), Actions({gather(2)}));
  EXPECT_EQ(schedule.after_forward(2, true, false), Actions({release(2)}));
  EXPECT_EQ(schedule.after_forward(0, true, true), Actions());  // Used last, needed first.
  EXPECT_EQ(schedule.end_forward(), Actions());

  schedule.begin_backward(/*keep=*/false);
  EXPECT_EQ(schedule.before_backward(0), Actions());
  EXPECT_EQ(schedule.before_backward(2), Actions({gather(2)}));
  schedule.gradient_arrived(2);
  // It stays while its backward may run: the gradient of its input may need a frozen weight.
  EXPECT_EQ(schedule.gradients_complete(2), Actions({reduce(2)}));
  EXPECT_EQ(schedule.before_backward(1), Actions({release(2), gather(1)}));
  schedule.gradient_arrived(1);
  EXPECT_EQ(schedule.gradients_complete(1), Actions({reduce(1)}));
  schedule.gradient_arrived(0);
  EXPECT_EQ(schedule.gradients_complete(0), Actions({reduce(0)}));
  EXPECT_EQ(schedule.end_backward(), Actions({release(1), release(0)}));
  EXPECT_EQ(schedule.num_deviations(), 0);
}

class Prefetching : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Depths, Prefetching, ::testing::Values(0, 1, 2, 20));

TEST(Schedule, PrefetchesTheNextUnitOfThePlan) {
  Schedule schedule(trainable(4), /*prefetch_depth=*/1);
  EXPECT_EQ(schedule.begin_forward(), Actions());
  EXPECT_EQ(text_of(schedule.before_forward(0)), " P0 P1 W0");
  EXPECT_EQ(text_of(schedule.before_forward(1)), " P2 W1");  // 2 travels while 1 computes.
  EXPECT_EQ(text_of(schedule.after_forward(1, true, false)), " -1");
  EXPECT_EQ(text_of(schedule.before_forward(3)), " P3 W2 -2 W3");  // 2 was skipped.
  EXPECT_EQ(text_of(schedule.after_forward(3, true, false)), " -3");
  EXPECT_EQ(text_of(schedule.after_forward(0, true, true)), "");
  EXPECT_EQ(text_of(schedule.end_forward()), "");

  schedule.begin_backward(/*keep=*/false);
  EXPECT_EQ(text_of(schedule.before_backward(0)), " P3");
  EXPECT_EQ(text_of(schedule.before_backward(3)), " P2 W3");
  EXPECT_FALSE(schedule.is_gathered(2));  // Not before it is waited for.
  schedule.gradient_arrived(3);
  EXPECT_EQ(text_of(schedule.gradients_complete(3)), " R3");
  EXPECT_EQ(text_of(schedule.reset()), " -0 -2 -3");  // An exception: the one under way, too.
}

TEST_P(Prefetching, ASecondStepWithTheLearnedPlanIssuesTheSame) {
  Rank rank(trainable(9), GetParam());
  const Program program = one_after_another(9);
  rank.forward(program);
  rank.backward(program);
  rank.expect_every_unit_reduced_once();
  const Actions first = rank.take_collectives();
  EXPECT_EQ(rank.num_gathered(), 0);
  // The root and one unit, and what travels.
  EXPECT_EQ(rank.most_gathered, std::min(2 + GetParam(), 9));
  rank.schedule.adopt_forward();
  rank.schedule.adopt_backward();
  rank.forward(program);
  rank.backward(program);
  rank.expect_every_unit_reduced_once();
  EXPECT_EQ(rank.take_collectives(), first);
  EXPECT_EQ(rank.schedule.num_deviations(), 0);
}

TEST(Schedule, AForwardWithoutABackwardKeepsNothing) {
  Rank rank(trainable(5));
  rank.forward(one_after_another(5), /*will_backward=*/false);
  EXPECT_EQ(rank.num_gathered(), 0);
  EXPECT_EQ(text_of(rank.collectives), " G0 G1 G2 G3 G4");
}

TEST(Schedule, FrozenUnitsAreGatheredButNotReduced) {
  std::vector<UnitTraits> traits = trainable(4);
  traits[2].is_trainable = false;
  Rank rank(traits);
  for (int step = 0; step < 3; ++step) {
    rank.forward(one_after_another(4));
    rank.backward(one_after_another(4));
    rank.expect_every_unit_reduced_once();
    EXPECT_EQ(text_of(rank.take_collectives()), " G0 G1 G2 G3 G3 R3 G2 G1 R1 R0");
    EXPECT_EQ(rank.num_gathered(), 0);
    rank.schedule.adopt_forward();
    rank.schedule.adopt_backward();
  }
  EXPECT_EQ(rank.most_gathered, 2);
}

TEST(Schedule, AFrozenRootIsReleasedToo) {
  std::vector<UnitTraits> traits = trainable(3);
  traits[0].is_trainable = false;
  Rank rank(traits);
  rank.forward(one_after_another(3));
  rank.backward(one_after_another(3));
  rank.expect_every_unit_reduced_once();
  EXPECT_EQ(rank.num_gathered(), 0);
}

TEST(Schedule, IncompleteGradientsAreReducedWhenTheNextUnitBegins) {
  Rank rank(trainable(4));
  Program program = one_after_another(4);
  program[1].is_incomplete = true;  // Unit 2.
  program[0].is_incomplete = true;  // Unit 1: nothing begins after it.
  rank.forward(program);
  rank.backward(program);
  rank.expect_every_unit_reduced_once();
  EXPECT_EQ(rank.num_gathered(), 0);
  EXPECT_EQ(rank.most_gathered, 2);
  EXPECT_EQ(rank.schedule.num_deviations(), 1);  // Unit 1 came after the root, once.
}

// The order of a unit that is used twice is only known after the first step, which reduces it when
// it does not fit; from then on its gradients are reduced where they arrive.
TEST(Schedule, AUnitUsedTwiceIsGatheredForEachUseAndReducedAfterTheLast) {
  Rank rank(trainable(4));
  const Program program = {{.unit = 1}, {.unit = 2}, {.unit = 1}, {.unit = 3}};
  rank.forward(program);
  rank.backward(program);
  rank.schedule.adopt_forward();
  rank.schedule.adopt_backward();
  rank.take_collectives();
  const std::int64_t deviations = rank.schedule.num_deviations();
  for (int step = 0; step < 2; ++step) {
    rank.forward(program);
    rank.backward(program);
    rank.expect_every_unit_reduced_once();
    EXPECT_EQ(rank.num_gathered(), 0);
    EXPECT_EQ(text_of(rank.take_collectives()), " G0 G1 G2 G1 G3 G3 R3 G1 G2 R2 G1 R1 R0");
  }
  EXPECT_EQ(rank.schedule.num_deviations(), deviations);
}

TEST(Schedule, NestedUnitsStayWhileTheirInnerUnitsRun) {
  Rank rank(trainable(5));
  const Program program = {{.unit = 1, .inside = {{.unit = 2}, {.unit = 3}}}, {.unit = 4}};
  for (int step = 0; step < 3; ++step) {
    rank.forward(program);
    rank.backward(program);
    EXPECT_EQ(rank.num_gathered(), 0);
    if (step > 0) {  // The first step learns that unit 1 starts before units 3 and 2 end.
      rank.expect_every_unit_reduced_once();
      EXPECT_EQ(text_of(rank.collectives), " G0 G1 G2 G3 G4 G4 R4 G1 G3 R3 G2 R2 R1 R0");
    }
    rank.take_collectives();
    rank.schedule.adopt_forward();
    rank.schedule.adopt_backward();
  }
}

TEST(Schedule, AUnitThatCallsItselfIsGatheredOnce) {
  Rank rank(trainable(2));
  const Program program = {{.unit = 1, .inside = {{.unit = 1}}}};
  rank.forward(program);
  EXPECT_EQ(text_of(rank.take_collectives()), " G0 G1");
  EXPECT_EQ(rank.num_gathered(), 1);
}

TEST(Schedule, RecomputationGathersNothingTwice) {
  Rank rank(trainable(6));
  rank.recomputes = true;
  const Program program = one_after_another(6);
  for (int step = 0; step < 2; ++step) {
    rank.forward(program);
    rank.backward(program);
    rank.expect_every_unit_reduced_once();
    EXPECT_EQ(rank.num_gathered(), 0);
    EXPECT_EQ(text_of(rank.take_collectives()),
              " G0 G1 G2 G3 G4 G5 G5 R5 G4 R4 G3 R3 G2 R2 G1 R1 R0");
    rank.schedule.adopt_forward();
    rank.schedule.adopt_backward();
  }
}

// Reentrant checkpoints: the first that autograd touches of a unit is its recomputation.
TEST(Schedule, ARecomputationMayBeginAUnitsBackward) {
  Rank rank(trainable(3));
  rank.forward(one_after_another(3));
  rank.schedule.begin_backward(false);
  rank.carry_out(rank.schedule.before_backward(0));
  EXPECT_EQ(rank.schedule.before_forward(2), Actions({gather(2)}));
  EXPECT_EQ(rank.schedule.after_forward(2, true, false), Actions());
  EXPECT_EQ(rank.schedule.before_backward(2), Actions());
  rank.schedule.gradient_arrived(2);
  EXPECT_EQ(rank.schedule.gradients_complete(2), Actions({reduce(2)}));
  EXPECT_EQ(text_of(rank.schedule.end_backward()), " -2 G1 R1 R0 -0 -1");
}

// Nobody can know before its end that a backward brings no gradient (another rank may get some), so
// reductions that it passes are carried out, with zeros; those after its last unit are not.
TEST(Schedule, APassWithoutGradientsStopsAtItsLastUnit) {
  Rank rank(trainable(4));
  const Program program = one_after_another(4);
  rank.forward(program);
  rank.take_collectives();
  rank.backward(program, /*keep=*/false, /*with_gradients=*/false);  // autograd.grad(out, input)
  EXPECT_EQ(text_of(rank.take_collectives()), " G3 R3 G2 R2 G1");
  EXPECT_EQ(rank.num_gathered(), 0);
  rank.backward(program);
  rank.expect_every_unit_reduced_once();
  EXPECT_EQ(rank.num_gathered(), 0);
}

TEST(Schedule, ABackwardThatBuildsAGraphKeepsItsUnitsUntilTheNextOne) {
  Rank rank(trainable(4));
  const Program program = one_after_another(4);
  rank.forward(program);
  rank.backward(program, /*keep=*/true, /*with_gradients=*/false);
  EXPECT_EQ(rank.num_gathered(), 4);
  rank.take_collectives();
  rank.backward(program);
  rank.expect_every_unit_reduced_once();
  EXPECT_EQ(text_of(rank.take_collectives()), " R3 R2 R1 R0");
  EXPECT_EQ(rank.num_gathered(), 0);
}

TEST(Schedule, AnOutputThatAliasesTheBufferKeepsItsUnit) {
  Schedule schedule(trainable(2));
  schedule.begin_forward();
  schedule.before_forward(0);
  EXPECT_EQ(schedule.before_forward(1), Actions({gather(1)}));
  EXPECT_EQ(schedule.after_forward(1, true, /*keep=*/true), Actions());
  schedule.after_forward(0, true, true);
  schedule.end_forward();
  EXPECT_TRUE(schedule.is_gathered(1));
  schedule.begin_backward(false);
  schedule.before_backward(0);
  EXPECT_EQ(schedule.before_backward(1), Actions());
  schedule.gradient_arrived(1);
  EXPECT_EQ(schedule.gradients_complete(1), Actions({reduce(1)}));
  EXPECT_EQ(schedule.end_backward(), Actions({release(1), reduce(0), release(0)}));
}

TEST(Schedule, AUnitOutsideTheRootsForwardIsGatheredOnDemand) {
  Schedule schedule(trainable(3));
  EXPECT_EQ(schedule.before_forward(2), Actions({gather(2)}));
  EXPECT_EQ(schedule.after_forward(2, false, false), Actions({release(2)}));
  EXPECT_EQ(schedule.num_deviations(), 0);
}

std::vector<UnitTraits> with_residents() {
  return {{},
          {.is_trainable = true, .residency = Residency::kPass},
          {.is_trainable = true, .residency = Residency::kPass},
          {.is_trainable = true, .residency = Residency::kStep}};
}

TEST(Schedule, ResidentsAreGatheredOncePerPassAndOncePerStep) {
  Rank rank(with_residents());
  const Program program = one_after_another(3);
  for (int step = 0; step < 2; ++step) {
    rank.forward(program);
    EXPECT_EQ(text_of(rank.take_collectives()), " G3 G0 G1 G2");
    EXPECT_EQ(rank.num_gathered(), 4);
    rank.backward(program);
    rank.expect_every_unit_reduced_once();
    EXPECT_EQ(text_of(rank.take_collectives()), " R2 R1 R0 R3");
    EXPECT_EQ(rank.num_gathered(), 1);
    rank.forward(program);  // The next micro-step.
    EXPECT_EQ(text_of(rank.take_collectives()), " G0 G1 G2");
    rank.backward(program);
    rank.take_collectives();
    rank.carry_out(rank.schedule.reset(/*weights_changed=*/false));
    EXPECT_EQ(rank.num_gathered(), 1);
    rank.carry_out(rank.schedule.reset());
    EXPECT_EQ(rank.num_gathered(), 0);
    EXPECT_EQ(rank.schedule.num_deviations(), 0);
  }
}

TEST(Schedule, WithoutABackwardNothingStaysForIt) {
  Rank rank(with_residents());
  rank.forward(one_after_another(3), /*will_backward=*/false);
  EXPECT_EQ(rank.num_gathered(), 1);  // What stays for the step.
  EXPECT_EQ(rank.schedule.before_forward(1), Actions({gather(1)}));
  EXPECT_EQ(rank.schedule.after_forward(1, false, false), Actions({release(1)}));
}

TEST(Schedule, SecondaryShardsServeUntilTheWeightsChange) {
  Rank rank(std::vector<UnitTraits>(3, {.is_trainable = true, .residency = Residency::kSecondary}));
  const Program program = one_after_another(3);
  for (int step = 0; step < 2; ++step) {
    rank.forward(program);
    rank.backward(program);
    EXPECT_EQ(text_of(rank.take_collectives()), " G0 G1 G2 G2s R2 G1s R1 R0");
    rank.carry_out(rank.schedule.reset(/*weights_changed=*/false));
    rank.forward(program, /*will_backward=*/false);
    EXPECT_EQ(text_of(rank.take_collectives()), " G0s G1s G2s");
    rank.schedule.forget_secondary(1);
    rank.forward(program);
    rank.backward(program);
    EXPECT_EQ(text_of(rank.take_collectives()), " G0s G1 G2s G2s R2 G1s R1 R0");
    rank.carry_out(rank.schedule.reset());
  }
}

TEST(Schedule, OnlyAForwardThatMayHaveABackwardLeavesSecondaryShards) {
  Schedule schedule(
      std::vector<UnitTraits>(2, {.is_trainable = true, .residency = Residency::kSecondary}));
  schedule.begin_forward(/*may_backward=*/false);
  EXPECT_EQ(schedule.before_forward(0), Actions({gather(0)}));
  EXPECT_EQ(schedule.pin(1), Actions({gather(1)}));
  EXPECT_FALSE(schedule.has_secondary(0));
  EXPECT_FALSE(schedule.has_secondary(1));
}

// Evaluated between a forward and its backward: gathered again, by all ranks.
TEST(Schedule, AnEvaluationLetsGoOfWhatAnEarlierForwardKept) {
  Rank rank(with_residents());
  const Program program = one_after_another(3);
  rank.forward(program);
  rank.forward(program, /*will_backward=*/false);
  EXPECT_EQ(rank.num_gathered(), 2);  // The root has a backward to come.
  rank.take_collectives();
  rank.backward(program);
  rank.expect_every_unit_reduced_once();
  EXPECT_EQ(text_of(rank.take_collectives()), " G2 R2 G1 R1 R0 R3");
}

TEST(Schedule, PinnedUnitsStayUntilAsManyUnpins) {
  Rank rank(trainable(3));
  rank.carry_out(rank.schedule.pin(1));
  rank.carry_out(rank.schedule.pin(1));
  const Program program = one_after_another(3);
  rank.forward(program);
  rank.backward(program);
  rank.expect_every_unit_reduced_once();
  EXPECT_EQ(text_of(rank.take_collectives()), " G1 G0 G2 G2 R2 R1 R0");
  rank.carry_out(rank.schedule.reset());
  EXPECT_EQ(rank.num_gathered(), 1);
  EXPECT_TRUE(rank.schedule.is_pinned(1));
  EXPECT_EQ(rank.schedule.unpin(1), Actions());
  EXPECT_EQ(rank.schedule.unpin(1), Actions({release(1)}));
  EXPECT_FALSE(rank.schedule.is_pinned(1));
}

TEST(Schedule, AUnitUnpinnedWhileItRunsIsReleasedAfterwards) {
  Schedule schedule(trainable(2));
  schedule.pin(1);
  schedule.before_forward(1);
  EXPECT_EQ(schedule.unpin(1), Actions());
  EXPECT_EQ(schedule.after_forward(1, false, false), Actions({release(1)}));
}

TEST(Schedule, ResetReleasesEverythingInEveryState) {
  using Events = std::function<void(Rank&)>;
  const std::vector<std::pair<std::string, Events>> states = {
      {"new", [](Rank&) {}},
      {"forward begun", [](Rank& r) { r.carry_out(r.schedule.begin_forward()); }},
      {"inside two units",
       [](Rank& r) {
         r.carry_out(r.schedule.begin_forward());
         for (const int unit : {0, 1, 2, 2}) {
           r.carry_out(r.schedule.before_forward(unit));
         }
       }},
      {"forward done", [](Rank& r) { r.forward(one_after_another(4)); }},
      {"backward begun",
       [](Rank& r) {
         r.forward(one_after_another(4));
         r.schedule.begin_backward(false);
       }},
      {"inside a unit's backward",
       [](Rank& r) {
         r.forward(one_after_another(4));
         r.schedule.begin_backward(false);
         for (const int unit : {0, 3, 2}) {
           r.carry_out(r.schedule.before_backward(unit));
         }
         r.schedule.gradient_arrived(2);
       }},
      {"inside a backward that builds a graph",
       [](Rank& r) {
         r.forward(one_after_another(4));
         r.schedule.begin_backward(true);
         r.carry_out(r.schedule.before_backward(0));
         r.carry_out(r.schedule.before_backward(3));
       }},
  };
  for (const auto& [name, events] : states) {
    SCOPED_TRACE(name);
    Rank rank(trainable(4));
    events(rank);
    rank.carry_out(rank.schedule.reset());
    EXPECT_EQ(rank.num_gathered(), 0);
    EXPECT_FALSE(rank.schedule.in_forward());
    EXPECT_FALSE(rank.schedule.in_backward());
    rank.take_collectives();
    for (int step = 0; step < 2; ++step) {
      rank.forward(one_after_another(4));
      rank.backward(one_after_another(4));
      rank.expect_every_unit_reduced_once();
      EXPECT_EQ(text_of(rank.take_collectives()), " G0 G1 G2 G3 G3 R3 G2 R2 G1 R1 R0");
      EXPECT_EQ(rank.num_gathered(), 0);
    }
  }
}

TEST(Schedule, AForwardAfterABrokenOneStartsClean) {
  Rank rank(trainable(3));
  rank.carry_out(rank.schedule.begin_forward());
  rank.carry_out(rank.schedule.before_forward(0));
  rank.carry_out(rank.schedule.before_forward(1));
  rank.take_collectives();
  rank.forward(one_after_another(3));
  EXPECT_EQ(text_of(rank.take_collectives()), " G0 G1 G2");
}

TEST(Schedule, IllegalEventsThrow) {
  EXPECT_THROW(Schedule({}), InvalidArgument);
  Schedule schedule(trainable(2));
  EXPECT_THROW(schedule.before_forward(2), ScheduleError);
  EXPECT_THROW(schedule.before_forward(-1), ScheduleError);
  EXPECT_THROW(schedule.after_forward(1, true, false), ScheduleError);
  EXPECT_THROW(schedule.end_forward(), ScheduleError);
  EXPECT_THROW(schedule.before_backward(1), ScheduleError);
  EXPECT_THROW(schedule.gradients_complete(1), ScheduleError);
  EXPECT_THROW(schedule.end_backward(), ScheduleError);
  EXPECT_THROW(schedule.unpin(1), ScheduleError);
  EXPECT_THROW(schedule.pin(2), ScheduleError);
  EXPECT_THROW(schedule.gradient_arrived(7), ScheduleError);
  schedule.begin_backward(false);
  EXPECT_THROW(schedule.begin_backward(false), ScheduleError);
}

TEST(Schedule, ARankThatSkipsUnitsTakesPartInTheirCollectives) {
  std::vector<Rank> ranks(2, Rank(trainable(5)));
  for (int step = 0; step < 3; ++step) {
    // Rank 1 skips units 1 and 3, and 4, the last one.
    const Program programs[] = {one_after_another(5), {{.unit = 2}}};
    for (std::size_t rank = 0; rank < 2; ++rank) {
      ranks[rank].forward(programs[rank]);
      ranks[rank].backward(programs[rank]);
      ranks[rank].expect_every_unit_reduced_once();
      EXPECT_EQ(ranks[rank].num_gathered(), 0);
      EXPECT_EQ(ranks[rank].schedule.num_deviations(), 0);
    }
    EXPECT_EQ(text_of(ranks[1].collectives), " G0 G1 G2 G3 G4 G4 R4 G3 R3 G2 R2 G1 R1 R0");
    expect_one_order(ranks);
    adopt_if_equal(ranks);
  }
}

struct RandomCase {
  int num_units = 0;
  int num_ranks = 0;
  int num_steps = 0;
  double skip = 0;
  bool first_step_skips = false;
  int prefetch_depth = 0;
  bool has_residents = false;  ///< Units stay for the pass or leave secondary shards; the last
                               ///< stays for the step.
};

class RandomSkips : public ::testing::TestWithParam<RandomCase> {};

// Every rank leaves out units of its own choice, and gradients of some parameters; some units are
// frozen. All ranks must issue one sequence of collectives, or a real job hangs.
TEST_P(RandomSkips, AllRanksIssueOneOrder) {
  const RandomCase& param = GetParam();
  std::mt19937_64 random(20'220'501u + static_cast<std::uint64_t>(param.num_units));
  std::vector<UnitTraits> traits = trainable(param.num_units);
  std::bernoulli_distribution is_frozen(0.1);
  for (std::size_t unit = 1; unit < traits.size(); ++unit) {
    traits[unit].is_trainable = !is_frozen(random);
    if (param.has_residents) {
      traits[unit].residency = unit % 2 == 1 ? Residency::kPass : Residency::kSecondary;
    }
  }
  const auto num_planned = static_cast<int>(traits.size());
  if (param.has_residents) {
    traits.push_back({.is_trainable = true, .residency = Residency::kStep});
  }
  const int num_step_units = static_cast<int>(traits.size()) - num_planned;
  std::vector<Rank> ranks(static_cast<std::size_t>(param.num_ranks),
                          Rank(traits, param.prefetch_depth));
  std::bernoulli_distribution is_skipped(param.skip);
  std::bernoulli_distribution is_incomplete(0.2);
  for (int step = 0; step < param.num_steps; ++step) {
    for (Rank& rank : ranks) {
      rank.recomputes = step % 2 == 1;
      Program program;
      for (Call& call : one_after_another(param.num_units)) {
        if ((step > 0 || param.first_step_skips) && is_skipped(random)) {
          continue;
        }
        // Unit 1 has nothing after it; see IncompleteGradientsAreReducedWhenTheNextUnitBegins.
        call.is_incomplete = call.unit > 1 && is_incomplete(random);
        program.push_back(call);
      }
      rank.forward(program);
      const int num_pass_units = param.has_residents ? num_planned / 2 : 0;
      ASSERT_EQ(rank.num_gathered(), 1 + num_pass_units + num_step_units);  // The root is one.
      rank.backward(program);
      ASSERT_EQ(rank.num_gathered(), num_step_units);
      rank.expect_every_unit_reduced_once();
      ASSERT_LE(rank.most_gathered, 2 + param.prefetch_depth + num_pass_units + num_step_units);
      if (step % 3 == 2) {
        rank.carry_out(rank.schedule.reset());
        ASSERT_EQ(rank.num_gathered(), 0);
      }
      if (HasFatalFailure()) {
        return;
      }
    }
    expect_one_order(ranks);
    if (step == 0) {
      adopt_if_equal(ranks);
    }
    if (HasFatalFailure()) {
      return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, RandomSkips,
    ::testing::Values(RandomCase{2, 4, 6, 0.5, true}, RandomCase{5, 64, 8, 0.5, true},
                      RandomCase{5, 64, 8, 0.5, false}, RandomCase{60, 512, 3, 0.3, false},
                      RandomCase{60, 64, 3, 0.9, true}, RandomCase{2000, 6, 2, 0.3, false},
                      RandomCase{5, 64, 8, 0.5, true, 1}, RandomCase{5, 64, 8, 0.5, false, 2},
                      RandomCase{60, 64, 4, 0.3, false, 1}, RandomCase{60, 64, 4, 0.9, true, 4},
                      RandomCase{5, 64, 8, 0.5, true, 0, true},
                      RandomCase{61, 64, 8, 0.5, false, 2, true}),
    [](const auto& tested) {
      return "units" + std::to_string(tested.param.num_units) + "_ranks" +
             std::to_string(tested.param.num_ranks) + "_skip" +
             std::to_string(static_cast<int>(tested.param.skip * 100)) +
             (tested.param.first_step_skips ? "_at_once" : "") + "_prefetch" +
             std::to_string(tested.param.prefetch_depth) +
             (tested.param.has_residents ? "_residents" : "");
    });

// A learned order in which units run twice and inside one another; ranks leave out whole units.
TEST_P(Prefetching, LearnedOrdersHoldWhenRanksSkipUnits) {
  const Program whole = {{.unit = 4},
                         {.unit = 1, .inside = {{.unit = 2}, {.unit = 3}}},
                         {.unit = 5},
                         {.unit = 4},
                         {.unit = 6}};
  std::mt19937_64 random(5);
  std::bernoulli_distribution is_skipped(0.4);
  std::vector<Rank> ranks(32, Rank(trainable(7), GetParam()));
  for (int step = 0; step < 20; ++step) {
    for (Rank& rank : ranks) {
      std::vector<bool> skips;
      for (int unit = 0; unit < 7; ++unit) {
        skips.push_back(step > 0 && is_skipped(random));
      }
      Program program;
      for (const Call& call : whole) {
        if (skips[static_cast<std::size_t>(call.unit)]) {
          continue;
        }
        Call kept{.unit = call.unit};
        for (const Call& inner : call.inside) {
          if (!skips[static_cast<std::size_t>(inner.unit)]) {
            kept.inside.push_back(inner);
          }
        }
        program.push_back(kept);
      }
      rank.forward(program);
      rank.backward(program);
      if (step > 0) {
        rank.expect_every_unit_reduced_once();
      }
      ASSERT_EQ(rank.num_gathered(), 0);
    }
    expect_one_order(ranks);
    if (step == 0) {
      adopt_if_equal(ranks);
    }
    if (HasFatalFailure()) {
      return;
    }
  }
}

// All ranks leave the learned order together (another branch of the model): on demand, and what the
// plan has no place for is left for the step's end, on all ranks alike.
TEST_P(Prefetching, AnotherOrderOnAllRanksIsCarriedOutOnDemand) {
  std::vector<Rank> ranks(3, Rank(trainable(4), GetParam()));
  const Program learned = one_after_another(4);
  const Program other = {{.unit = 3}, {.unit = 1}, {.unit = 2}};
  for (Rank& rank : ranks) {
    rank.forward(learned);
    rank.backward(learned);
    rank.schedule.adopt_forward();
    rank.schedule.adopt_backward();
    rank.forward(other);
    rank.backward(other);
    EXPECT_EQ(rank.num_gathered(), 0);
    EXPECT_GT(rank.schedule.num_deviations(), 0);
  }
  expect_one_order(ranks);
  ranks[0].forward(learned);  // And back again.
  ranks[0].backward(learned);
  ranks[0].expect_every_unit_reduced_once();
}

}  // namespace
}  // namespace hopshard
