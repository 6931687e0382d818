// Long, because all events meet here, from modules, autograd, optimizers and users. What decides
// lives in schedule.cpp, what moves data in shard_store.cpp and gradient_reducer.cpp.
#include "hopshard/runtime/shard_engine.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/core/InferenceMode.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <chrono>
#include <utility>

#include "hopshard/core/error.hpp"
#include "hopshard/core/hash.hpp"
#include "hopshard/core/log.hpp"

namespace hopshard {

namespace {

/// Numbers of the step's control message before those by unit and by parameter.
constexpr std::int64_t kControlHeader = 3;

class Timer {
 public:
  explicit Timer(double& seconds) : seconds_(seconds) {}
  ~Timer() {
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

std::int64_t hash_of(const std::vector<int>& units) {
  Fnv1a hash;
  for (const int unit : units) {
    hash.add(static_cast<std::uint64_t>(unit));
  }
  return hash.signed_value();
}

std::int64_t hash_of(const Actions& actions) {
  OrderCheck order;
  for (const Action& action : actions) {
    order.record(action);
  }
  return order.hash();
}

}  // namespace

ShardEngine::ShardEngine(const std::vector<UnitSpec>& units, ProcessGroups groups,
                         EngineOptions options)
    : groups_(std::move(groups)),
      options_(options),
      pool_([sharding = groups_.sharding](
                std::int64_t num_bytes) { return sharding->allocate(num_bytes); },
            options_.fills_idle_memory) {
  HOPSHARD_CHECK(options_.backward_passes_per_step >= 1, ConfigError,
                 "backward_passes_per_step is ", options_.backward_passes_per_step,
                 "; it counts the backward passes of a step and is at least 1");
  store_ = std::make_unique<ShardStore>(units, groups_.world, groups_.sharding, pool_, &timeline_,
                                        groups_.secondary);
  pool_.trim();  // Start-up used every unit once; training has its own needs.
#if defined(__GLIBC__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
  // Sanitizers bring their own malloc; trimming glibc's beside it ends the process.
  malloc_trim(0);  // The whole parameters are gone: the C library would keep their memory.
#endif
  std::vector<UnitTraits> traits;
  for (int unit = 0; unit < store_->num_units(); ++unit) {
    Residency residency = Residency::kUse;
    if (units[static_cast<std::size_t>(unit)].is_persistent) {
      HOPSHARD_CHECK(unit != 0, InvalidArgument, "the root unit cannot be persistent");
      residency = Residency::kStep;
    } else if (groups_.secondary) {
      residency = Residency::kSecondary;
    } else if (unit != 0 && !options_.reshard_after_forward) {
      residency = Residency::kPass;
    }
    traits.push_back({.is_trainable = store_->is_trainable(unit), .residency = residency});
  }
  schedule_ = std::make_unique<Schedule>(std::move(traits), options_.prefetch_depth);
  reducer_ = std::make_unique<GradientReducer>(
      *store_, groups_.sharding, groups_.replication, pool_, 1.0 / groups_.world->size(),
      options_.second_hop_bucket_bytes, &timeline_, options_.reduce_dtype);

  const auto& parameters = store_->parameters();
  control_message_ = at::empty(
      {kControlHeader + store_->num_units() + static_cast<std::int64_t>(parameters.size())},
      at::TensorOptions().dtype(at::kLong));
  num_missing_.assign(static_cast<std::size_t>(store_->num_units()), 0);
  arrived_.assign(parameters.size(), false);
  handles_.resize(parameters.size());
  handle_installed_.assign(parameters.size(), false);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const ParameterPlace& place = parameters[i];
    if (!place.is_trainable) {
      continue;
    }
    hooks_.watch(
        place.parameter,
        [this, i] {
          ensure_backward();
          const ParameterPlace& watched = store_->parameters()[i];
          HOPSHARD_CHECK(schedule_->is_gathered(watched.unit), ShardedError, "the gradient of '",
                         watched.name, "' was computed while its unit '",
                         store_->unit_name(watched.unit),
                         "' was sharded. A loss that does not come from the unit's outputs must "
                         "be computed inside `with hopshard.unshard(module):`, backward included");
        },
        [this, i] {
          const ParameterPlace& watched = store_->parameters()[i];
          timeline_.look();
          or_recover([&] { reducer_->take(static_cast<int>(i)); });
          pass_had_gradient_ = true;
          schedule_->gradient_arrived(watched.unit);
          if (!arrived_[i]) {
            arrived_[i] = true;
            // Not the root, e.g.: its head may be complete first, its embedding last.
            if (--num_missing_[static_cast<std::size_t>(watched.unit)] == 0 &&
                !schedule_->is_reduced_last(watched.unit)) {
              run(schedule_->gradients_complete(watched.unit));
            }
          }
        });
  }
}

ShardEngine::~ShardEngine() { *alive_ = false; }

void ShardEngine::begin_span(const char* what, int unit) {
  if (timeline_.is_recording()) {
    timeline_.begin_span(TimelineLane::kCompute, what + store_->unit_name(unit));
  }
}

void ShardEngine::run(const Actions& actions) {
  timeline_.look();
  or_recover([&] {
    for (const Action& action : actions) {
      carry_out(action);
    }
  });
}

void ShardEngine::carry_out(const Action& action) {
  switch (action.kind) {
    case ActionKind::kGather: {
      const Timer timer(gather_seconds_);
      order_.record(action);
      store_->begin_gather(action.unit, action.from_secondary, action.keeps_secondary);
      store_->finish_gather(action.unit);
      return;
    }
    case ActionKind::kPrefetch: {
      const Timer timer(gather_seconds_);
      order_.record(action);
      store_->begin_gather(action.unit, action.from_secondary, action.keeps_secondary);
      return;
    }
    case ActionKind::kWait: {
      const Timer timer(gather_seconds_);
      store_->finish_gather(action.unit);
      return;
    }
    case ActionKind::kRelease: {
      // Let go first: the error must not leave the unit half released.
      std::exception_ptr lost_change;
      try {
        store_->check_unchanged(action.unit);
      } catch (const ShardedError&) {
        lost_change = std::current_exception();
      }
      store_->release(action.unit);
      if (lost_change) {
        std::rethrow_exception(lost_change);
      }
      return;
    }
    case ActionKind::kReduce: {
      const Timer timer(reduce_seconds_);
      order_.record(action);
      reducer_->reduce(action.unit, schedule_->is_reduced_once(action.unit));
      int& missing = num_missing_[static_cast<std::size_t>(action.unit)];
      missing = 0;
      for (std::size_t i = 0; i < arrived_.size(); ++i) {
        if (store_->parameters()[i].unit == action.unit && store_->parameters()[i].is_trainable) {
          arrived_[i] = false;
          ++missing;
        }
      }
      return;
    }
  }
}

void ShardEngine::or_recover(const std::function<void()>& body) {
  try {
    body();
  } catch (const CommError&) {
    abandon_collectives();
    throw;
  } catch (const ScheduleError&) {
    abandon_collectives();
    throw;
  } catch (...) {
    recover();
    throw;
  }
}

/// After one that failed. Throws the error of one that had failed before, if there is any.
void ShardEngine::abandon_collectives() {
  // What is under way may have failed first, and knows why.
  std::exception_ptr cause = store_->abandon_gathers();
  if (const std::exception_ptr other = reducer_->abandon_reductions(); !cause) {
    cause = other;
  }
  recover(/*weights_changed=*/true);  // Of no unit is it known that it was gathered.
  order_.clear();                     // All ranks hear of it, and begin anew.
  if (cause) {
    std::rethrow_exception(cause);
  }
}

void ShardEngine::forget_secondary(int unit) {
  schedule_->forget_secondary(unit);
  store_->forget_secondary(unit);
}

void ShardEngine::recover(bool weights_changed) {
  // Not only what reset() says: of actions that an error cut off, the schedule believes that they
  // were carried out.
  static_cast<void>(schedule_->reset(weights_changed));
  timeline_.drop_spans(TimelineLane::kCompute);
  for (int unit = 0; unit < store_->num_units(); ++unit) {
    if (weights_changed) {
      store_->forget_secondary(unit);
    }
    if (!schedule_->is_gathered(unit)) {
      store_->release(unit);
    } else if (!store_->is_attached(unit)) {
      schedule_->forget(unit);
      store_->release(unit);
    }
    if (!store_->holds_secondary(unit)) {
      schedule_->forget_secondary(unit);
    }
  }
}

void ShardEngine::before_root_forward() {
  if (!is_in_backward()) {
    if (schedule_->in_backward()) {
      recover();  // The last backward ended in an exception.
    }
    if (is_joined_) {
      HOPSHARD_CHECK(!at::GradMode::is_enabled(), ScheduleError,
                     "inside `with hopshard.join(model):` the model runs without a backward; use "
                     "torch.no_grad()");
      meet_joined(/*runs=*/true, /*failed=*/false);
    }
    run(schedule_->begin_forward(/*may_backward=*/at::GradMode::is_enabled()));
  }
  before_forward(0);
}

void ShardEngine::after_root_forward(const std::vector<at::Tensor>& outputs) {
  const bool will_backward = any_needs_backward(outputs);
  if (!is_in_backward()) {
    timeline_.end_span(TimelineLane::kCompute);
  }
  watch_outputs(0, outputs);
  // The root stays: its head is used last and needed first.
  run(schedule_->after_forward(0, will_backward, /*keep=*/will_backward));
  if (!schedule_->in_forward()) {
    return;  // A recomputation.
  }
  run(schedule_->end_forward(will_backward));
  if (!forward_agreed_ && will_backward) {
    or_recover([&] {
      if (all_ranks_agree(hash_of(schedule_->recorded_forward()), "control/forward_order")) {
        schedule_->adopt_forward();
      }
    });
    forward_agreed_ = true;
  }
}

void ShardEngine::before_forward(int unit) {
  if (is_in_backward()) {
    ensure_backward();
  } else if (schedule_->in_backward()) {
    recover();
  }
  HOPSHARD_CHECK(!is_joined_ || schedule_->in_forward(), ScheduleError, "unit '",
                 store_->unit_name(unit),
                 "' ran by itself inside `with hopshard.join(model):`, where only forwards of the "
                 "whole model count");
  const Actions actions = schedule_->before_forward(unit);
  HOPSHARD_CHECK(!is_joined_ || schedule_->num_deviations() == joined_deviations_, ScheduleError,
                 "inside `with hopshard.join(model):` unit '", store_->unit_name(unit),
                 "' ran outside the order of the units, which ranks that have no forward left go "
                 "by: it is the one of the first training forward, before that the declared one");
  run(actions);
  if (!is_in_backward()) {
    begin_span("forward ", unit);
  }
}

void ShardEngine::after_forward(int unit, const std::vector<at::Tensor>& outputs) {
  if (!is_in_backward()) {
    timeline_.end_span(TimelineLane::kCompute);
  }
  bool keeps_alias = false;
  for (const at::Tensor& output : outputs) {
    for (const int buffer : store_->buffers_of(unit)) {
      keeps_alias =
          keeps_alias || store_->buffers()[static_cast<std::size_t>(buffer)].flat->aliases(output);
    }
  }
  watch_outputs(unit, outputs);
  run(schedule_->after_forward(unit, any_needs_backward(outputs), keeps_alias));
}

void ShardEngine::abandon_forward() {
  if (is_in_backward()) {
    return;
  }
  if (is_joined_ && schedule_->in_forward()) {
    try {  // The others finish this forward; then they hear of the error.
      run(schedule_->end_forward(/*will_backward=*/false));
    } catch (const Error& error) {
      HOPSHARD_LOG(kDebug, "a forward that failed was not finished: ", error.what());
    }
  }
  recover();
}

bool ShardEngine::any_needs_backward(const std::vector<at::Tensor>& outputs) const {
  return at::GradMode::is_enabled() &&
         std::any_of(outputs.begin(), outputs.end(),
                     [](const at::Tensor& output) { return output.requires_grad(); });
}

void ShardEngine::watch_outputs(int unit, const std::vector<at::Tensor>& outputs) {
  if (!at::GradMode::is_enabled()) {
    return;
  }
  for (const at::Tensor& output : outputs) {
    if (output.requires_grad() && !output.is_leaf()) {
      watch_output(output, [this, alive = alive_, unit] {
        if (*alive) {
          ensure_backward();
          timeline_.end_span(TimelineLane::kCompute);
          run(schedule_->before_backward(unit));
          begin_span("backward ", unit);
        }
      });
    }
  }
}

void ShardEngine::ensure_backward() {
  if (schedule_->in_backward() && !backward_token_.expired()) {
    return;
  }
  if (schedule_->in_backward()) {
    recover();  // Autograd dropped the last backward without finishing it.
  }
  or_recover([&] {
    if (reducer_->is_hopping()) {
      second_hop();  // The last backward ended in an exception.
    }
    const Timer timer(reduce_seconds_);
    reducer_->begin_pass(/*is_last=*/!hold_second_hop_ &&
                         num_passes_ + 1 >= options_.backward_passes_per_step);
  });
  reconcile_gradients();
  pass_had_gradient_ = false;
  is_finished_ = false;
  for (std::size_t unit = 0; unit < num_missing_.size(); ++unit) {
    num_missing_[unit] = 0;
  }
  for (std::size_t i = 0; i < arrived_.size(); ++i) {
    const ParameterPlace& place = store_->parameters()[i];
    arrived_[i] = false;
    if (place.is_trainable) {
      ++num_missing_[static_cast<std::size_t>(place.unit)];
    }
    if (handle_installed_[i]) {  // Else autograd would add to the handle.
      place.parameter.mutable_grad().reset();
    }
  }
  schedule_->begin_backward(/*keep=*/at::GradMode::is_enabled());
  auto token = std::make_shared<BackwardToken>();
  backward_token_ = token;
  call_at_end_of_backward([this, alive = alive_, token = std::move(token)] {
    if (*alive) {
      end_backward();
    }
  });
}

void ShardEngine::end_backward() {
  timeline_.end_span(TimelineLane::kCompute);
  run(schedule_->end_backward());
  if (pass_had_gradient_) {
    if (!backward_agreed_) {
      if (all_ranks_agree(hash_of(schedule_->recorded_backward()), "control/backward_order")) {
        schedule_->adopt_backward();
      }
      pool_.trim();  // The first step may have held more than its order needs.
      backward_agreed_ = true;
      first_deviations_ = schedule_->num_deviations();
    } else if (schedule_->num_deviations() > first_deviations_ && !deviation_logged_) {
      deviation_logged_ = true;
      HOPSHARD_LOG(kInfo,
                   "units ran in another order than in the first step; what the order does "
                   "not hold is gathered on demand and reduced at the end of the step");
    }
    if (!hold_second_hop_ && ++num_passes_ >= options_.backward_passes_per_step) {
      num_passes_ = 0;
      second_hop();
    }
  } else if (reducer_->is_hopping()) {
    second_hop();  // It passed reductions of the plan, but was no pass (torch.autograd.grad).
  }
  install_handles();
}

void ShardEngine::second_hop() {
  const Timer timer(second_hop_seconds_);
  reducer_->second_hop();
}

bool ShardEngine::all_ranks_agree(std::int64_t value, const std::string& tag) {
  const at::NoGradGuard no_grad;
  at::Tensor ends = at::tensor({value, -value}, at::TensorOptions().dtype(at::kLong));
  groups_.world->all_reduce(ends, ReduceOp::kMax, {.timeout = {}, .tag = tag})->wait();
  const auto* const data = ends.const_data_ptr<std::int64_t>();
  return data[0] == -data[1];
}

// The user's script may set p.grad to None, replace it, or leave our handle there.
void ShardEngine::reconcile_gradients() {
  for (std::size_t i = 0; i < handles_.size(); ++i) {
    const ParameterPlace& place = store_->parameters()[i];
    const at::Tensor& grad = place.parameter.grad();
    if (!place.is_trainable) {
      HOPSHARD_CHECK(!grad.defined(), ConfigError, "parameter '", place.name,
                     "' was frozen when it was wrapped and has a gradient now; set requires_grad "
                     "before hopshard.DistributedModel(module)");
    } else if (!grad.defined()) {
      if (handle_installed_[i]) {
        reducer_->zero(static_cast<int>(i));
        handle_installed_[i] = false;
      }
    } else if (!handles_[i].defined() || !grad.is_same(handles_[i])) {
      set_gradient(static_cast<int>(i), at::Tensor(grad));
    }
  }
}

void ShardEngine::install_handles() {
  for (std::size_t i = 0; i < handles_.size(); ++i) {
    if (handles_[i].defined() && reducer_->has_gradient(static_cast<int>(i))) {
      store_->parameters()[i].parameter.mutable_grad() = handles_[i];
      handle_installed_[i] = true;
    }
  }
}

bool ShardEngine::finish_gradients() {
  const at::NoGradGuard no_grad;
  HOPSHARD_CHECK(!is_in_backward(), ScheduleError,
                 "gradients are not finished inside a backward pass; step after it");
  if (schedule_->in_backward()) {
    recover();
  }
  reconcile_gradients();
  if (is_finished_) {
    return false;
  }

  const int num_units = store_->num_units();
  const auto num_parameters = static_cast<int>(store_->parameters().size());
  auto* const data = control_message_.mutable_data_ptr<std::int64_t>();
  auto* const leftover = data + kControlHeader;
  auto* const has_gradient = leftover + num_units;
  data[0] = order_.hash();
  data[1] = -order_.hash();
  data[2] = reducer_->is_open() ? 1 : 0;
  for (int unit = 0; unit < num_units; ++unit) {
    leftover[unit] = reducer_->has_leftover(unit) ? 1 : 0;
  }
  for (int i = 0; i < num_parameters; ++i) {
    has_gradient[i] = reducer_->has_gradient(i) ? 1 : 0;
  }
  groups_.world
      ->all_reduce(control_message_, ReduceOp::kMax, {.timeout = {}, .tag = "control/step"})
      ->wait();
  if (data[0] != -data[1]) {
    std::vector<std::string> names;
    for (int unit = 0; unit < num_units; ++unit) {
      names.push_back(store_->unit_name(unit));
    }
    order_.explain(*groups_.world, names);
  }
  order_.clear();

  bool open = data[2] != 0;
  for (int unit = 0; unit < num_units; ++unit) {
    if (leftover[unit] != 0) {
      const Timer timer(reduce_seconds_);
      reducer_->reduce(unit);
      open = true;
    }
  }
  if (open) {
    second_hop();
  }
  for (int i = 0; i < num_parameters; ++i) {
    if (has_gradient[i] != 0) {
      reducer_->set_has_gradient(i);
    }
  }
  install_handles();
  is_finished_ = true;
  timeline_.drop_spans(TimelineLane::kStep);
  timeline_.begin_span(TimelineLane::kStep, "optimizer");
  return true;
}

void ShardEngine::zero_gradients() {
  if (schedule_->in_backward() && !is_in_backward()) {
    recover();  // The last backward ended in an exception.
  }
  reducer_->zero();
  num_passes_ = 0;
  is_finished_ = false;
  for (std::size_t i = 0; i < handles_.size(); ++i) {
    if (store_->parameters()[i].is_trainable) {
      store_->parameters()[i].parameter.mutable_grad().reset();
      handle_installed_[i] = false;
    }
  }
}

void ShardEngine::set_gradient(int parameter, const at::Tensor& full) {
  const auto index = static_cast<std::size_t>(parameter);
  reducer_->set_gradient(parameter, full);
  store_->parameters().at(index).parameter.mutable_grad() = handles_.at(index);
  handle_installed_.at(index) = true;
}

void ShardEngine::set_gradient_handles(std::vector<at::Tensor> handles) {
  HOPSHARD_CHECK(handles.size() == handles_.size(), InvalidArgument, handles.size(),
                 " gradient handles for ", handles_.size(), " parameters");
  handles_ = std::move(handles);
}

void ShardEngine::end_step(bool stepped, bool shards_are_written) {
  timeline_.end_span(TimelineLane::kStep);
  num_passes_ = 0;
  if (stepped) {
    follow_masters(shards_are_written);
  }
}

void ShardEngine::weights_changed() { follow_masters(/*shards_are_written=*/false); }

void ShardEngine::check_weights_may_change() {
  for (int unit = 0; unit < store_->num_units(); ++unit) {
    HOPSHARD_CHECK(!schedule_->is_pinned(unit), ShardedError,
                   "weights change (an optimizer step, or an average that takes their place) "
                   "inside `with hopshard.unshard(module):`; leave it first");
    if (schedule_->is_gathered(unit)) {
      try {
        store_->check_unchanged(unit);
      } catch (const ShardedError&) {
        recover(/*weights_changed=*/true);  // The copy is let go, so the next one is right.
        throw;
      }
    }
  }
}

void ShardEngine::follow_masters(bool shards_are_written) {
  check_weights_may_change();
  store_->refresh_shards(/*with_arenas=*/!shards_are_written);
  recover(/*weights_changed=*/true);
  store_->bump_versions();
}

void ShardEngine::begin_join() {
  HOPSHARD_CHECK(!is_joined_, ScheduleError, "hopshard.join(model) inside hopshard.join(model)");
  is_joined_ = true;
  joined_deviations_ = schedule_->num_deviations();
}

void ShardEngine::end_join(bool failed) {
  if (!std::exchange(is_joined_, false)) {
    return;  // Another rank's error has ended it.
  }
  if (failed) {
    try {
      meet_joined(/*runs=*/false, failed);
    } catch (const Error& error) {  // Peers may be gone. What this rank failed by says more.
      HOPSHARD_LOG(kDebug, "the other ranks were not told that this one failed: ", error.what());
    }
    return;
  }
  while (meet_joined(/*runs=*/false, failed)) {
    // As a rank that skips every unit.
    run(schedule_->begin_forward(/*may_backward=*/false));
    run(schedule_->before_forward(0));
    run(schedule_->after_forward(0, /*will_backward=*/false, /*keep=*/false));
    run(schedule_->end_forward(/*will_backward=*/false));
  }
}

/// Returns whether any rank runs another forward.
bool ShardEngine::meet_joined(bool runs, bool failed) {
  const at::NoGradGuard no_grad;
  const c10::InferenceMode off(false);  // Generation runs in it; the transport does not.
  const int global_rank = groups_.world->rank();
  at::Tensor flags = at::tensor({std::int64_t{runs}, std::int64_t{failed ? global_rank + 1 : 0}},
                                at::TensorOptions().dtype(at::kLong));
  // Over the world, so that all ranks go on with the same units gathered.
  groups_.world->all_reduce(flags, ReduceOp::kMax, {.timeout = {}, .tag = "control/join"})->wait();
  const auto* const data = flags.const_data_ptr<std::int64_t>();
  is_joined_ = is_joined_ && data[1] == 0;
  HOPSHARD_CHECK(failed || data[1] == 0, CommError, "global rank ", data[1] - 1,
                 " left `with hopshard.join(model):` with an error; see that rank's own message");
  return data[0] != 0;
}

void ShardEngine::pin(int unit) {
  HOPSHARD_CHECK(!is_joined_, ScheduleError,
                 "`with hopshard.unshard(module):` or state_dict() inside `with "
                 "hopshard.join(model):`; leave the join first");
  try {
    run(schedule_->pin(unit));
  } catch (...) {
    static_cast<void>(schedule_->unpin(unit));  // Its gather failed: there is nothing to let go.
    throw;
  }
}

void ShardEngine::unpin(int unit, bool write_back) {
  std::exception_ptr refused;
  bool is_discarded = false;
  if (write_back) {
    forget_secondary(unit);
    try {
      store_->write_back(unit);
    } catch (const ConfigError&) {
      refused = std::current_exception();
    }
    for (const ParameterPlace& place : store_->parameters()) {
      if (place.unit == unit) {
        place.parameter.unsafeGetTensorImpl()->bump_version();
      }
    }
  } else {
    try {
      store_->check_unchanged(unit);
    } catch (const ShardedError&) {
      is_discarded = true;
    }
  }
  store_->accept_changes(unit);
  run(schedule_->unpin(unit));
  if (is_discarded && schedule_->is_gathered(unit)) {  // Others still use it: as it was.
    or_recover([&] {
      store_->release(unit);
      carry_out({.kind = ActionKind::kGather, .unit = unit});
    });
  }
  if (refused) {
    std::rethrow_exception(refused);
  }
}

void ShardEngine::write_parameter(int parameter, const at::Tensor& full) {
  const at::NoGradGuard no_grad;
  store_->write_parameter(parameter, full);
  const ParameterPlace& place = store_->parameters()[static_cast<std::size_t>(parameter)];
  forget_secondary(place.unit);
  const ShardedBuffer& buffer = store_->buffers()[static_cast<std::size_t>(place.buffer)];
  place.parameter.unsafeGetTensorImpl()->bump_version();
  if (buffer.flat->is_attached()) {
    const_cast<at::Tensor&>(buffer.flat->view(place.position)).copy_(full);
    buffer.flat->accept_changes();
  }
}

EngineStatistics ShardEngine::statistics() const {
  EngineStatistics statistics;
  statistics.gather_seconds = gather_seconds_;
  statistics.reduce_seconds = reduce_seconds_;
  statistics.second_hop_seconds = second_hop_seconds_;
  statistics.gathers = timeline_.seconds(TimelineLane::kGather);
  statistics.first_hops = timeline_.seconds(TimelineLane::kReduce);
  statistics.second_hops = timeline_.seconds(TimelineLane::kSecondHop);
  statistics.persistent_bytes = store_->persistent_bytes() + reducer_->persistent_bytes();
  statistics.pool_bytes = pool_.taken_bytes() + pool_.idle_bytes();
  statistics.peak_bytes = statistics.persistent_bytes + pool_.peak_bytes();
  statistics.pool_allocations = pool_.num_allocations();
  statistics.num_deviations = schedule_->num_deviations() - first_deviations_;
  return statistics;
}

}  // namespace hopshard
