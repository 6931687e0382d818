// Carries a model's schedule out: events of modules and of autograd go to the Schedule, its
// actions to ShardStore and GradientReducer. Composes them, decides nothing. Knows no Python.
// Next: python/hopshard/model.py, which reports the module events.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hopshard/comm/process_groups.hpp"
#include "hopshard/runtime/buffer_pool.hpp"
#include "hopshard/runtime/grad_hooks.hpp"
#include "hopshard/runtime/gradient_reducer.hpp"
#include "hopshard/runtime/order_check.hpp"
#include "hopshard/runtime/schedule.hpp"
#include "hopshard/runtime/shard_store.hpp"
#include "hopshard/runtime/timeline.hpp"

namespace hopshard {

struct EngineOptions {
  int backward_passes_per_step = 1;  ///< Hop 2 follows every so many.
  std::int64_t second_hop_bucket_bytes = std::int64_t{64} << 20;
  int prefetch_depth = 1;             ///< Units gathered ahead of their use.
  bool reshard_after_forward = true;  ///< False: gathered until the end of the backward.
  bool fills_idle_memory = false;     ///< With NaN: BufferPool.
  /// What travels of gradients (GradientReducer): 16 bit, or Undefined: fp32.
  at::ScalarType reduce_dtype = at::ScalarType::Undefined;
};

/// Wall time and memory since construction, of this rank.
struct EngineStatistics {
  double gather_seconds = 0;  ///< That the computation waited for gathers; what is hidden is free.
  double reduce_seconds = 0;
  double second_hop_seconds = 0;
  LaneSeconds gathers;  ///< Without what it costs to issue them.
  LaneSeconds first_hops;
  LaneSeconds second_hops;
  std::int64_t persistent_bytes = 0;  ///< Shards, masters and gradient sums.
  std::int64_t pool_bytes = 0;        ///< Gather and gradient buffers, idle ones included.
  std::int64_t peak_bytes = 0;        ///< Largest persistent + pool so far.
  std::int64_t pool_allocations = 0;  ///< Constant in a steady step.
  std::int64_t num_deviations = 0;    ///< Units outside the order of the first step.
};

/// One per model and rank.
///
/// Collective: all ranks build it with the same units and report the same events; a rank may skip
/// a unit's forward. Threads: one at a time (a backward may run on another thread).
/// Errors: ScheduleError, CommError, TimeoutError, ShardedError. After an exception in the user's
/// forward or backward the next iteration works.
class ShardEngine {
 public:
  /// Collective. Parameters become placeholders; rank 0's values count.
  ShardEngine(const std::vector<UnitSpec>& units, ProcessGroups groups, EngineOptions options);
  ~ShardEngine();
  ShardEngine(const ShardEngine&) = delete;
  ShardEngine& operator=(const ShardEngine&) = delete;

  // Module events. Unit 0 is the root.
  void before_root_forward();
  void after_root_forward(const std::vector<at::Tensor>& outputs);
  void before_forward(int unit);
  void after_forward(int unit, const std::vector<at::Tensor>& outputs);
  /// A forward ended in an exception: lets everything go, tells nobody.
  void abandon_forward();

  /// While held, a backward stops after hop 1 and does not count as a pass of the step.
  void hold_second_hop(bool hold) noexcept { hold_second_hop_ = hold; }

  // Gradients, for optimizers.
  /// Collective over the world: hops that any rank has outstanding, agreement on which parameters
  /// have a gradient, check of the order of collectives. Writes no weight and no state.
  /// Returns false, without a collective, if nothing happened since the last call.
  /// @throws ScheduleError
  bool finish_gradients();
  void zero_gradients();
  void set_loss_scale(double scale) noexcept { reducer_->set_loss_scale(scale); }
  /// Replaces a gradient by a full tensor that is equal on all ranks. Not collective.
  void set_gradient(int parameter, const at::Tensor& full);
  /// What `param.grad` shows after a backward: one tensor per parameter, undefined for frozen
  /// ones. A binding makes them; see python/hopshard/gradients.py.
  void set_gradient_handles(std::vector<at::Tensor> handles);
  [[nodiscard]] bool has_gradient(int parameter) const { return reducer_->has_gradient(parameter); }
  [[nodiscard]] const std::vector<at::Tensor>& gradient_arenas() { return reducer_->arenas(); }

  /// After an optimizer step: shards follow the masters, gathered copies are dropped, the count of
  /// backward passes starts again.
  /// @param stepped             false if the weights did not change.
  /// @param shards_are_written  those of ShardStore::shard_arenas() follow the masters already.
  void end_step(bool stepped, bool shards_are_written = false);
  /// The masters were written by somebody else than an optimizer (an average of weights).
  void weights_changed();
  /// Before somebody writes masters. Not collective.
  /// @throws ShardedError  inside `unshard`, or a gathered parameter was changed in place.
  void check_weights_may_change();

  // Forwards of which ranks run different numbers, without a backward.
  /// From here on each of the root's forwards is announced to the world.
  void begin_join();
  /// Collective over the world: takes part in the forwards of those that still run some.
  /// @param failed  this rank runs no more because of an error, which ends the others too.
  /// @throws CommError  on the other ranks then, naming the one that failed.
  void end_join(bool failed);

  // Whole parameters.
  /// Collective over the sharding group: gathers until unpin.
  void pin(int unit);
  void unpin(int unit, bool write_back);
  /// Sets this rank's part of a parameter; `full` is the same on all ranks. Not collective.
  void write_parameter(int parameter, const at::Tensor& full);

  [[nodiscard]] const ShardStore& store() const noexcept { return *store_; }
  [[nodiscard]] ShardStore& store() noexcept { return *store_; }
  [[nodiscard]] const Schedule& schedule() const noexcept { return *schedule_; }
  [[nodiscard]] const ProcessGroups& groups() const noexcept { return groups_; }
  [[nodiscard]] EngineStatistics statistics() const;
  [[nodiscard]] Timeline& timeline() noexcept { return timeline_; }

 private:
  struct BackwardToken {};

  void run(const Actions& actions);
  void carry_out(const Action& action);
  void recover(bool weights_changed = false);
  void abandon_collectives();
  void forget_secondary(int unit);
  /// Runs what may fail, after which nothing must stay gathered.
  void or_recover(const std::function<void()>& body);
  void ensure_backward();
  void end_backward();
  void watch_outputs(int unit, const std::vector<at::Tensor>& outputs);
  bool any_needs_backward(const std::vector<at::Tensor>& outputs) const;
  void reconcile_gradients();
  void install_handles();
  bool all_ranks_agree(std::int64_t value, const std::string& tag);
  void second_hop();
  bool meet_joined(bool runs, bool failed);
  void follow_masters(bool shards_are_written);
  void begin_span(const char* what, int unit);

  ProcessGroups groups_;
  EngineOptions options_;
  BufferPool pool_;
  Timeline timeline_;
  std::unique_ptr<ShardStore> store_;
  std::unique_ptr<Schedule> schedule_;
  std::unique_ptr<GradientReducer> reducer_;
  ParameterHooks hooks_;
  OrderCheck order_;
  at::Tensor control_message_;  // Of a step; kept, so that a steady step allocates nothing.
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // Hooks outlive the engine.
  std::weak_ptr<BackwardToken> backward_token_;  // Expires when autograd drops the backward.
  std::vector<int> num_missing_;                 // By unit: gradients until complete.
  std::vector<bool> arrived_;                    // By parameter, since its unit was complete.
  std::vector<at::Tensor> handles_;
  std::vector<bool> handle_installed_;  // By parameter: param.grad shows the handle.
  int num_passes_ = 0;                  // Backward passes of this step.
  bool pass_had_gradient_ = false;
  bool hold_second_hop_ = false;
  bool is_joined_ = false;
  std::int64_t joined_deviations_ = 0;  // Before the join.
  bool is_finished_ = false;            // No backward since finish_gradients().
  bool forward_agreed_ = false;
  bool backward_agreed_ = false;
  bool deviation_logged_ = false;
  std::int64_t first_deviations_ = 0;  // Those of the first step, which learns the order.
  double gather_seconds_ = 0;
  double reduce_seconds_ = 0;
  double second_hop_seconds_ = 0;
};

}  // namespace hopshard
