// When to gather, release and reduce which unit (D4). A pure state machine: events in, actions
// out; no tensor, no communicator, so it runs for thousands of units and ranks in a test.
// The engine carries the actions out. Next: shard_engine.hpp.
//
// [Note: one order on all ranks]
// Collectives must be issued in one order by every rank, but a rank may skip a unit (a branch
// that its data did not take). So there is a plan for the forward and one for the backward: first
// the order in which the units were declared and its mirror, after one iteration the orders that
// all ranks saw.
// An event for unit u first carries out everything the plan has before u: units that this rank
// skipped are gathered and let go, or reduced with zeros, because other ranks may need them. What
// the plan does not contain is gathered on demand, which is right when all ranks do the same.
// Gradients that the plan has no reduction for stay in the unit's flat gradient and either ride
// along with its next reduction or are reduced when the optimizer steps.
//
// [Note: prefetch]
// Whoever passes a gather of the plan, because the unit runs or because it was skipped, also issues
// the next few gathers of the plan. That depends on the place in the plan alone, so the order stays
// one on all ranks. A unit that the plan gathers more than once is never prefetched: whether it is
// still gathered from its last use may differ between ranks.
//
// [Note: secondary shards]
// With Residency::kSecondary the first gather of a training forward leaves a larger shard on every
// rank, of a group that is smaller than the sharding group (one node, say). Later gathers use those
// and stay inside it, until the weights change (hpZ of ZeRO++, arXiv 2306.10209, section 3.2).
// Which gathers these are depends on the order of gathers alone, so it is the same on all ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hopshard {

enum class ActionKind {
  kGather,    ///< Collective: attach memory to the unit's flat buffers, all-gather into it, wait.
  kPrefetch,  ///< Collective: the same without waiting; kWait or kRelease follows.
  kWait,      ///< Local: a prefetched unit is about to be used.
  kRelease,   ///< Local: detach the memory; parameters become placeholders.
  kReduce,    ///< Collective: hop 1 of the unit's gradients (zeros where none arrived).
};

struct Action {
  ActionKind kind = ActionKind::kGather;
  int unit = 0;
  // Of kGather and kPrefetch, as carried out; in a plan both are false.
  bool from_secondary = false;   ///< Over the smaller group, from what an earlier gather left.
  bool keeps_secondary = false;  ///< Leaves secondary shards.
  bool operator==(const Action&) const = default;
};
using Actions = std::vector<Action>;

/// How long a unit stays gathered after its use. Where it is longer than the use, it is the same on
/// all ranks, whatever units they skip: nothing lets go of it alone.
enum class Residency {
  kUse,        ///< Around its forward, and again around its backward.
  kPass,       ///< From its forward to the end of the backward (reshard_after_forward = false).
  kStep,       ///< Gathered before all others and in no plan; until the weights change.
  kSecondary,  ///< As kUse, and a secondary shard stays until the weights change.
};

/// What the schedule must know of a unit.
struct UnitTraits {
  bool is_trainable = true;  ///< Has at least one parameter that gets gradients.
  Residency residency = Residency::kUse;
};

/// Decides, for one rank. Unit 0 is the root: what no other unit holds.
///
/// Threads: one at a time. Illegal events throw ScheduleError in all builds.
class Schedule {
 public:
  /// @param prefetch_depth  gathers of the plan that are issued ahead of their use; 0 is none.
  explicit Schedule(std::vector<UnitTraits> units, int prefetch_depth = 0);

  // Events of a forward pass. Between begin and end the plan is followed; a unit that is called
  // by itself (outside the root's forward) is gathered on demand.
  /// @param may_backward  gradients are enabled.
  Actions begin_forward(bool may_backward = true);
  Actions before_forward(int unit);
  /// @param will_backward  the outputs have a graph: a backward may come.
  /// @param keep           stay gathered (the root; an output that aliases the flat buffer).
  Actions after_forward(int unit, bool will_backward, bool keep);
  /// @param will_backward  else nothing stays for a backward.
  Actions end_forward(bool will_backward = true);

  // Events of a backward pass; a forward inside it is a recomputation.
  /// @param keep  it builds a graph (create_graph): gathered units stay so afterwards.
  void begin_backward(bool keep);
  Actions before_backward(int unit);
  void gradient_arrived(int unit);
  /// Every gradient that the unit can get has arrived. It stays gathered until another unit's
  /// backward begins, or this one ends.
  Actions gradients_complete(int unit);
  Actions end_backward();

  /// Keeps a unit gathered until as many unpins.
  Actions pin(int unit);
  Actions unpin(int unit);
  /// Weights changed or an exception broke a pass: forget passes, release what is not pinned.
  /// @param weights_changed  else units that stay for the step may.
  Actions reset(bool weights_changed = true);
  /// A gather of the unit was not carried out after all.
  void forget(int unit);
  /// The unit's secondary shards are not what the next gather must give.
  void forget_secondary(int unit) { at(unit).has_secondary = false; }

  [[nodiscard]] bool in_forward() const noexcept { return in_forward_; }
  [[nodiscard]] bool in_backward() const noexcept { return in_backward_; }
  [[nodiscard]] bool is_gathered(int unit) const {
    return at(unit).gathered && !at(unit).in_flight;
  }
  [[nodiscard]] bool is_pinned(int unit) const { return at(unit).pins > 0; }
  [[nodiscard]] bool has_secondary(int unit) const { return at(unit).has_secondary; }

  /// Its gradients come all over the backward: it is reduced at the end, on every rank.
  [[nodiscard]] bool is_reduced_last(int unit) const {
    return unit == 0 || at(unit).traits.residency == Residency::kStep;
  }
  /// The plan of the backward holds one reduction of the unit.
  [[nodiscard]] bool is_reduced_once(int unit) const {
    return is_reduced_once_.at(static_cast<std::size_t>(unit));
  }

  // Plans. `recorded_*` is what the last pass saw; `adopt_*` makes it the plan.
  [[nodiscard]] const std::vector<int>& recorded_forward() const noexcept { return forward_seen_; }
  [[nodiscard]] const Actions& recorded_backward() const noexcept { return backward_seen_; }
  [[nodiscard]] const std::vector<int>& forward_plan() const noexcept { return forward_plan_; }
  [[nodiscard]] const Actions& backward_plan() const noexcept { return backward_plan_; }
  void adopt_forward();
  void adopt_backward();
  /// Events that the plan did not contain, since construction.
  [[nodiscard]] std::int64_t num_deviations() const noexcept { return num_deviations_; }

 private:
  struct State {
    UnitTraits traits;
    bool gathered = false;         // Or being gathered.
    bool in_flight = false;        // Prefetched, and not waited for.
    bool expected = false;         // Prefetched, and the plan has not come to it.
    bool kept = false;             // Stays gathered after its forward.
    bool held = false;             // Stays gathered for its residency.
    bool has_secondary = false;    // Gathers use secondary shards.
    bool backward_active = false;  // Gathered for its backward.
    bool backward_seen = false;    // Its backward runs.
    bool is_reduced = false;       // Its gradients are complete, its backward may not be.
    bool has_arrivals = false;     // Gradients arrived since its last reduction.
    int forward_depth = 0;         // Forwards that run now; a unit may call itself.
    int pins = 0;
    int open_uses = 0;             // Forwards whose backward has not been seen.
    std::int64_t last_visit = -1;  // Position of its last forward in program order.
  };
  const State& at(int unit) const;
  State& at(int unit);
  void plan_backward_from_forward();
  void count_uses();
  void hold(State& state) const;
  static void end_hold_of_pass(State& state);
  void gather(int unit, Actions& out);
  Action begin_gather(ActionKind kind, int unit);
  void gather_for_step(Actions& out);
  void prefetch(int unit, Actions& out);
  void pass_forward(std::size_t position, Actions& out);
  void pass_backward(std::size_t position, Actions& out);
  void release_if_free(int unit, Actions& out);
  void take_part(int unit, Actions& out);
  void reduce(int unit, Actions& out);
  void gradients_left(int unit, Actions& out);
  void leave_backward(int unit, Actions& out);
  bool follow_backward_plan_to(Action target, Actions& out);
  void finish_unit(int unit, Actions& out);
  void finish_units_after(int unit, Actions& out);

  std::vector<State> units_;
  int prefetch_depth_ = 0;
  std::vector<int> forward_plan_;
  std::vector<int> forward_seen_;
  std::size_t forward_position_ = 0;
  Actions backward_plan_;
  std::vector<bool> is_once_in_forward_;  // By unit: gathered once by the plan.
  std::vector<bool> is_once_in_backward_;
  std::vector<bool> is_reduced_once_;
  Actions backward_seen_;
  std::size_t backward_position_ = 0;
  bool has_adopted_backward_ = false;
  bool in_forward_ = false;
  bool may_backward_ = false;  // After the running forward.
  bool in_backward_ = false;
  bool keep_gathered_ = false;  // The running backward builds a graph.
  bool any_arrival_ = false;
  std::int64_t num_visits_ = 0;
  std::int64_t num_deviations_ = 0;
};

}  // namespace hopshard
