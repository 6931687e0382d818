#include "hopshard/runtime/schedule.hpp"

#include <algorithm>
#include <utility>

#include "hopshard/core/error.hpp"

namespace hopshard {

Schedule::Schedule(std::vector<UnitTraits> units, int prefetch_depth)
    : prefetch_depth_(prefetch_depth) {
  HOPSHARD_CHECK(!units.empty(), InvalidArgument, "a schedule needs at least the root unit");
  HOPSHARD_CHECK(prefetch_depth >= 0, InvalidArgument, "prefetch_depth is ", prefetch_depth,
                 "; it counts units and is at least 0");
  for (const UnitTraits& traits : units) {
    units_.push_back(State{.traits = traits});
  }
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    if (at(unit).traits.residency != Residency::kStep) {
      forward_plan_.push_back(unit);
    }
  }
  plan_backward_from_forward();
}

// The mirror of the forward. The root's outputs start the backward and its parameters finish last.
void Schedule::plan_backward_from_forward() {
  std::vector<int> order = forward_plan_;
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    if (std::find(order.begin(), order.end(), unit) == order.end()) {
      order.insert(order.begin(), unit);  // Did not run: other ranks may still reduce it.
    }
  }
  backward_plan_.assign(1, {ActionKind::kGather, 0});
  std::vector<bool> planned(units_.size(), false);
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    planned[static_cast<std::size_t>(unit)] = is_reduced_last(unit);
  }
  for (auto unit = order.rbegin(); unit != order.rend(); ++unit) {
    if (planned[static_cast<std::size_t>(*unit)]) {
      continue;
    }
    planned[static_cast<std::size_t>(*unit)] = true;
    backward_plan_.push_back({ActionKind::kGather, *unit});
    if (at(*unit).traits.is_trainable) {
      backward_plan_.push_back({ActionKind::kReduce, *unit});
    }
  }
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    if (is_reduced_last(unit) && at(unit).traits.is_trainable) {
      backward_plan_.push_back({ActionKind::kReduce, unit});
    }
  }
  count_uses();
}

void Schedule::adopt_forward() {
  forward_plan_ = forward_seen_;
  if (has_adopted_backward_) {
    count_uses();
  } else {
    plan_backward_from_forward();
  }
}

void Schedule::adopt_backward() {
  backward_plan_ = backward_seen_;
  has_adopted_backward_ = true;
  count_uses();
}

void Schedule::count_uses() {
  const auto happens_once = [this](const auto& plan, const auto& unit_of) {
    std::vector<int> counts(units_.size());
    for (const auto& entry : plan) {
      if (const int unit = unit_of(entry); unit >= 0) {
        ++counts[static_cast<std::size_t>(unit)];
      }
    }
    std::vector<bool> once;
    for (const int count : counts) {
      once.push_back(count == 1);
    }
    return once;
  };
  const auto unit_of = [](ActionKind kind) {
    return [kind](const Action& action) { return action.kind == kind ? action.unit : -1; };
  };
  is_once_in_forward_ = happens_once(forward_plan_, [](int unit) { return unit; });
  is_once_in_backward_ = happens_once(backward_plan_, unit_of(ActionKind::kGather));
  is_reduced_once_ = happens_once(backward_plan_, unit_of(ActionKind::kReduce));
}

const Schedule::State& Schedule::at(int unit) const {
  HOPSHARD_CHECK(unit >= 0 && unit < static_cast<int>(units_.size()), ScheduleError,
                 "there is no unit ", unit, ", only ", units_.size());
  return units_[static_cast<std::size_t>(unit)];
}

Schedule::State& Schedule::at(int unit) {
  return const_cast<State&>(std::as_const(*this).at(unit));
}

void Schedule::hold(State& state) const {
  state.held = state.held || state.traits.residency == Residency::kStep ||
               (state.traits.residency == Residency::kPass && (in_forward_ || in_backward_));
}

void Schedule::end_hold_of_pass(State& state) {
  state.held = state.held && state.traits.residency == Residency::kStep;
}

Action Schedule::begin_gather(ActionKind kind, int unit) {
  State& state = at(unit);
  state.gathered = true;
  Action action{.kind = kind, .unit = unit, .from_secondary = state.has_secondary};
  if (state.traits.residency == Residency::kSecondary && !state.has_secondary && in_forward_ &&
      may_backward_) {
    action.keeps_secondary = true;
    state.has_secondary = true;
  }
  return action;
}

void Schedule::gather(int unit, Actions& out) {
  State& state = at(unit);
  hold(state);
  if (!state.gathered) {
    out.push_back(begin_gather(ActionKind::kGather, unit));
  } else if (std::exchange(state.in_flight, false)) {
    out.push_back({ActionKind::kWait, unit});
  }
}

void Schedule::gather_for_step(Actions& out) {
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    if (at(unit).traits.residency == Residency::kStep) {
      gather(unit, out);
    }
  }
}

void Schedule::prefetch(int unit, Actions& out) {
  State& state = at(unit);
  hold(state);
  state.expected = true;
  if (!state.gathered) {
    state.in_flight = true;
    out.push_back(begin_gather(ActionKind::kPrefetch, unit));
  }
}

void Schedule::pass_forward(std::size_t position, Actions& out) {
  if (prefetch_depth_ == 0) {
    return;
  }
  prefetch(forward_plan_[position], out);
  const std::size_t end =
      std::min(position + 1 + static_cast<std::size_t>(prefetch_depth_), forward_plan_.size());
  for (std::size_t i = position + 1; i < end; ++i) {
    if (is_once_in_forward_[static_cast<std::size_t>(forward_plan_[i])]) {
      prefetch(forward_plan_[i], out);
    }
  }
  at(forward_plan_[position]).expected = false;
}

void Schedule::pass_backward(std::size_t position, Actions& out) {
  if (prefetch_depth_ == 0) {
    return;
  }
  prefetch(backward_plan_[position].unit, out);
  int num_ahead = 0;
  for (std::size_t i = position + 1; i < backward_plan_.size() && num_ahead < prefetch_depth_;
       ++i) {
    const Action& ahead = backward_plan_[i];
    if (ahead.kind != ActionKind::kGather) {
      continue;
    }
    ++num_ahead;
    if (is_once_in_backward_[static_cast<std::size_t>(ahead.unit)]) {
      prefetch(ahead.unit, out);
    }
  }
  at(backward_plan_[position].unit).expected = false;
}

void Schedule::release_if_free(int unit, Actions& out) {
  State& state = at(unit);
  if (in_backward_ && keep_gathered_) {
    return;
  }
  if (state.gathered && state.forward_depth == 0 && state.pins == 0 && !state.kept && !state.held &&
      !state.expected && !state.backward_active) {
    state.gathered = false;
    state.in_flight = false;
    out.push_back({ActionKind::kRelease, unit});
  }
}

void Schedule::take_part(int unit, Actions& out) {
  gather(unit, out);
  release_if_free(unit, out);
}

void Schedule::reduce(int unit, Actions& out) {
  out.push_back({ActionKind::kReduce, unit});
  gradients_left(unit, out);
}

// The gradient of its inputs may still need its weights, frozen ones most of all: a unit whose
// backward runs stays until that of another begins.
void Schedule::gradients_left(int unit, Actions& out) {
  State& state = at(unit);
  state.has_arrivals = false;
  if (state.backward_active) {
    state.backward_seen = false;
    state.is_reduced = true;
  } else {
    leave_backward(unit, out);
  }
}

void Schedule::leave_backward(int unit, Actions& out) {
  State& state = at(unit);
  state.is_reduced = false;
  state.backward_active = false;
  state.backward_seen = false;
  state.kept = false;
  release_if_free(unit, out);
}

Actions Schedule::begin_forward(bool may_backward) {
  Actions out;
  if (in_forward_) {  // The last forward ended in an exception.
    out = reset();
  }
  in_forward_ = true;
  may_backward_ = may_backward;
  forward_position_ = 0;
  forward_seen_.clear();
  return out;
}

Actions Schedule::before_forward(int unit) {
  Actions out;
  State& state = at(unit);
  if (in_backward_) {  // Recomputation: the unit's backward begins with it and holds it.
    return before_backward(unit);
  }
  if (state.forward_depth > 0) {  // A part of a unit that runs: it is gathered.
    ++state.forward_depth;
    return out;
  }
  gather_for_step(out);
  if (in_forward_) {
    const auto from = forward_plan_.begin() + static_cast<std::ptrdiff_t>(forward_position_);
    const auto found = std::find(from, forward_plan_.end(), unit);
    if (found == forward_plan_.end()) {
      ++num_deviations_;
    } else {
      const auto end = static_cast<std::size_t>(found - forward_plan_.begin());
      for (; forward_position_ < end; ++forward_position_) {
        pass_forward(forward_position_, out);
        take_part(forward_plan_[forward_position_], out);
      }
      pass_forward(forward_position_++, out);
    }
    forward_seen_.push_back(unit);
  }
  gather(unit, out);
  ++state.forward_depth;
  state.last_visit = num_visits_++;
  return out;
}

Actions Schedule::after_forward(int unit, bool will_backward, bool keep) {
  Actions out;
  State& state = at(unit);
  if (in_backward_) {
    return out;
  }
  HOPSHARD_CHECK(state.forward_depth > 0, ScheduleError, "unit ", unit,
                 " left a forward that it had not entered");
  --state.forward_depth;
  if (will_backward) {
    ++state.open_uses;
  }
  state.kept = state.kept || keep;
  release_if_free(unit, out);
  return out;
}

Actions Schedule::end_forward(bool will_backward) {
  Actions out;
  HOPSHARD_CHECK(in_forward_, ScheduleError, "a forward ended that had not begun");
  for (; forward_position_ < forward_plan_.size(); ++forward_position_) {
    pass_forward(forward_position_, out);
    take_part(forward_plan_[forward_position_], out);
  }
  in_forward_ = false;
  for (int unit = 0; unit < static_cast<int>(units_.size()) && !will_backward; ++unit) {
    end_hold_of_pass(at(unit));
    release_if_free(unit, out);
  }
  return out;
}

void Schedule::begin_backward(bool keep) {
  HOPSHARD_CHECK(!in_backward_, ScheduleError, "a backward began inside another one");
  in_backward_ = true;
  keep_gathered_ = keep;
  any_arrival_ = false;
  backward_position_ = 0;
  backward_seen_.clear();
}

bool Schedule::follow_backward_plan_to(Action target, Actions& out) {
  backward_seen_.push_back(target);
  const auto from = backward_plan_.begin() + static_cast<std::ptrdiff_t>(backward_position_);
  const auto found = std::find(from, backward_plan_.end(), target);
  if (found == backward_plan_.end()) {
    ++num_deviations_;
    return false;
  }
  // Positions move first: what is carried out below must not find itself again.
  const auto begin = backward_position_;
  const auto end = static_cast<std::size_t>(found - backward_plan_.begin());
  backward_position_ = end + 1;
  for (std::size_t i = begin; i < end; ++i) {
    const Action& passed = backward_plan_[i];
    if (passed.kind == ActionKind::kReduce) {
      out.push_back(passed);  // With what is there; what arrives later is added later.
      at(passed.unit).has_arrivals = false;
      release_if_free(passed.unit, out);
    } else if (State& state = at(passed.unit); state.backward_active) {
      // Used twice, and this rank skipped what lies between: the others let it go and gather again.
      state.backward_active = false;
      release_if_free(passed.unit, out);
      pass_backward(i, out);
      gather(passed.unit, out);
      state.backward_active = true;
    } else if (state.open_uses > 0) {
      pass_backward(i, out);
      gather(passed.unit, out);  // It ran here: its backward comes later than planned.
      state.backward_active = true;
    } else {
      pass_backward(i, out);
      take_part(passed.unit, out);
    }
  }
  if (target.kind == ActionKind::kGather) {
    pass_backward(end, out);
  }
  return true;
}

void Schedule::finish_unit(int unit, Actions& out) {
  State& state = at(unit);
  // A unit that ran twice is not done after its last use; its weights may go until the next.
  const bool is_due = state.open_uses == 0 && !state.is_reduced;
  if (state.traits.is_trainable && (state.has_arrivals || is_due)) {
    const Actions complete = gradients_complete(unit);
    out.insert(out.end(), complete.begin(), complete.end());
  }
  leave_backward(unit, out);
}

// Autograd runs younger nodes first, so once a unit's backward begins, those that ran after it in
// the forward are done: also with parameters that got no gradient, or none that need one.
void Schedule::finish_units_after(int unit, Actions& out) {
  std::vector<int> done;
  for (int other = 1; other < static_cast<int>(units_.size()); ++other) {
    if (other != unit && at(other).backward_active && at(other).last_visit > at(unit).last_visit) {
      done.push_back(other);
    }
  }
  std::sort(done.begin(), done.end(),
            [this](int a, int b) { return at(a).last_visit > at(b).last_visit; });
  for (const int other : done) {
    finish_unit(other, out);
  }
}

Actions Schedule::before_backward(int unit) {
  HOPSHARD_CHECK(in_backward_, ScheduleError, "unit ", unit, " has a backward outside of one");
  Actions out;
  State& state = at(unit);
  if (state.backward_seen) {
    return out;  // Another of its outputs was first.
  }
  if (state.is_reduced) {  // A later use, which the other ranks gather again.
    leave_backward(unit, out);
  }
  gather_for_step(out);
  if (unit != 0) {
    finish_units_after(unit, out);
  }
  follow_backward_plan_to({ActionKind::kGather, unit}, out);
  gather(unit, out);
  state.backward_active = true;
  state.backward_seen = true;
  state.open_uses = std::max(0, state.open_uses - 1);
  return out;
}

void Schedule::gradient_arrived(int unit) {
  at(unit).has_arrivals = true;
  any_arrival_ = true;
}

Actions Schedule::gradients_complete(int unit) {
  HOPSHARD_CHECK(in_backward_, ScheduleError, "unit ", unit, " has gradients outside a backward");
  Actions out;
  if (follow_backward_plan_to({ActionKind::kReduce, unit}, out)) {
    reduce(unit, out);
  } else {
    gradients_left(unit, out);  // They wait for the step's end: do not record them again.
  }
  return out;
}

Actions Schedule::end_backward() {
  HOPSHARD_CHECK(in_backward_, ScheduleError, "a backward ended that had not begun");
  Actions out;
  if (any_arrival_) {  // Else torch.autograd.grad() with respect to inputs.
    std::vector<int> open;
    for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
      if (at(unit).backward_active || at(unit).has_arrivals ||
          at(unit).traits.residency == Residency::kStep) {
        open.push_back(unit);
      }
    }
    std::sort(open.begin(), open.end(),
              [this](int a, int b) { return at(a).last_visit > at(b).last_visit; });
    for (const int unit : open) {
      at(unit).open_uses = 0;
      finish_unit(unit, out);
    }
    for (; backward_position_ < backward_plan_.size(); ++backward_position_) {
      const Action& left = backward_plan_[backward_position_];
      if (left.kind == ActionKind::kReduce) {
        reduce(left.unit, out);
      } else {
        pass_backward(backward_position_, out);
        take_part(left.unit, out);
      }
    }
  }
  in_backward_ = false;
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    State& state = at(unit);
    state.expected = false;
    end_hold_of_pass(state);
    state.kept = keep_gathered_ && state.gathered;
    state.backward_active = false;
    state.backward_seen = false;
    state.is_reduced = false;
    if (any_arrival_ && !keep_gathered_) {
      state.open_uses = 0;
    }
    release_if_free(unit, out);
  }
  return out;
}

Actions Schedule::pin(int unit) {
  Actions out;
  gather(unit, out);
  ++at(unit).pins;
  return out;
}

Actions Schedule::unpin(int unit) {
  Actions out;
  HOPSHARD_CHECK(at(unit).pins > 0, ScheduleError, "unit ", unit, " was not pinned");
  --at(unit).pins;
  release_if_free(unit, out);
  return out;
}

Actions Schedule::reset(bool weights_changed) {
  Actions out;
  in_forward_ = false;
  in_backward_ = false;
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    State& state = at(unit);
    state.expected = false;
    end_hold_of_pass(state);
    state.held = state.held && !weights_changed;
    state.has_secondary = state.has_secondary && !weights_changed;
    state.kept = false;
    state.backward_active = false;
    state.backward_seen = false;
    state.is_reduced = false;
    state.forward_depth = 0;
    state.open_uses = 0;
    release_if_free(unit, out);
  }
  return out;
}

void Schedule::forget(int unit) {
  State& state = at(unit);
  state.gathered = false;
  state.in_flight = false;
  state.held = false;
  state.has_secondary = false;
}

}  // namespace hopshard
