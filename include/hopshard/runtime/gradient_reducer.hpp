// From gradients that autograd leaves in param.grad to sums in the shard arenas (D5).
//
// [Note: closed and open sums]
// Hop 1 adds a unit's gradient to this rank's shard on every micro-step. After hop 2 the shard
// holds the world's mean and is closed: a sum of one sharding group may not be added to it, or it
// would be counted once instead of once per replica. A backward that comes later (no zero_grad)
// opens a second sum, which its own hop 2 adds to the first. With one replica there is no hop 2
// and one sum is enough.
//
// [Note: early hops]
// In the last backward of a step the shards of reduced units are collected into buckets, and a full
// bucket's hop 2 is issued while the backward goes on. Where a bucket ends, and between which other
// collectives it is issued, depends on the order of the reductions alone, so it is the same on all
// ranks. A begun hop 2 must be completed before anything else is added to the sum.
//
// [Note: a narrow wire]
// With a reduce dtype, what travels is rounded to it; sums are fp32, in the transport and in the
// arenas. What a group of one rank would reduce does not travel and is not rounded.
// Next: shard_engine.hpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "hopshard/comm/communicator.hpp"
#include "hopshard/runtime/buffer_pool.hpp"
#include "hopshard/runtime/shard_store.hpp"

namespace hopshard {

/// Threads: one at a time. Parameters are indexed as in ShardStore::parameters().
class GradientReducer {
 public:
  /// @param scale         applied to each gradient as it is taken: 1 / n for the world's mean.
  /// @param bucket_bytes  the most that one all-reduce of hop 2 moves.
  /// @param timeline      null, or where both hops are watched.
  /// @param reduce_dtype  16 bit: what travels of fp32 sums; see the note. Undefined: as it is.
  GradientReducer(ShardStore& store, CommunicatorPtr sharding, CommunicatorPtr replication,
                  BufferPool& pool, double scale, std::int64_t bucket_bytes,
                  Timeline* timeline = nullptr,
                  at::ScalarType reduce_dtype = at::ScalarType::Undefined);
  ~GradientReducer();

  /// Losses of the backwards to come are multiplied by `scale`, which the sums must not be. It
  /// stays on what travels as fp16, whose smallest numbers are large.
  void set_loss_scale(double scale) noexcept { loss_scale_ = scale; }

  /// Moves the parameter's `grad` into its unit's flat gradient and clears it.
  void take(int parameter);
  /// Issues hop 1, collective over the sharding group; zeros where nothing was taken. It ends by
  /// itself while the backward goes on; whatever reads the sums waits for it.
  /// @param is_final  the unit is not reduced again in this backward: hop 2 may follow.
  void reduce(int unit, bool is_final = false);
  /// Gradients were taken that no reduction has carried yet.
  [[nodiscard]] bool has_leftover(int unit) const;

  /// A backward begins; waits for the reductions of the one before it.
  /// @param is_last  hop 2 follows it, and may start for units that are done.
  void begin_pass(bool is_last);
  /// As ShardStore::abandon_gathers().
  [[nodiscard]] std::exception_ptr abandon_reductions() noexcept;
  /// Hop 2, or what is left of it; collective over the replication group.
  void second_hop();
  /// Hop 2 has begun for some units: second_hop() must follow, whatever became of the backward.
  [[nodiscard]] bool is_hopping() const noexcept;
  /// Sums of hop 1 wait for hop 2.
  [[nodiscard]] bool is_open() const noexcept { return is_open_; }

  /// Forgets all gradients.
  void zero();
  void zero(int parameter);
  /// Some rank had a gradient since zero(): exact after the step's agreement, this rank's
  /// knowledge before it.
  [[nodiscard]] bool has_gradient(int parameter) const {
    return has_gradient_.at(static_cast<std::size_t>(parameter));
  }
  void set_has_gradient(int parameter) {
    has_gradient_.at(static_cast<std::size_t>(parameter)) = true;
  }
  /// Replaces a parameter's gradient by a full tensor that is equal on all ranks.
  void set_gradient(int parameter, const at::Tensor& full);

  /// Gradient arenas, laid out like ShardStore::arenas(); the world's mean after hop 2.
  [[nodiscard]] const std::vector<at::Tensor>& arenas();
  [[nodiscard]] std::int64_t persistent_bytes() const;

 private:
  struct Sum {
    std::vector<at::Tensor> arenas;  // Empty until used.
    std::vector<bool> holds;         // By buffer: defined; else the range reads as zero.
  };
  struct Pending {
    PoolBlock block;
    at::Tensor flat;  // Undefined: no gradient since the last reduction. Else what was taken has
                      // values, and nothing else.
  };
  /// What a wide tensor sends, or gets, in the reduce dtype.
  struct Narrow {
    PoolBlock block;
    at::Tensor values;
    at::Tensor wide;
    double scale = 1;  // Of the values; the wide tensor has none.
  };
  struct Reduction {
    WorkPtr work;
    PoolBlock block;  // Its flat gradient.
    int buffer = 0;
    bool is_final = false;
    Narrow narrow;  // Defined: what is to be added to the sum, or becomes it.
    bool accumulates = false;
  };
  struct SecondHop {
    std::vector<WorkPtr> works;
    Narrow narrow;  // Defined: what becomes the sum.
  };
  struct Range {
    int arena = 0;
    std::int64_t begin = 0;
    std::int64_t end = 0;
  };
  using Bucket = std::vector<Range>;
  void finish_oldest();
  void finish_reductions();
  void collect(int buffer);
  void issue_bucket();
  [[nodiscard]] at::ScalarType dtype_on_wire(const Communicator& group, at::ScalarType wide) const;
  [[nodiscard]] double wire_scale(at::ScalarType dtype) const;
  Narrow make_narrow(const at::Tensor& wide);
  void end_narrow(const Narrow& narrow, bool accumulates);
  void forget_hops();
  void settle();
  void allocate(Sum& sum) const;
  void define(Sum& sum, int buffer) const;
  void define_all(Sum& sum) const;
  Pending& pending_flat(int buffer);
  void fill_gaps(int buffer, const at::Tensor& flat) const;
  void drop(Pending& pending);
  Sum& target() { return is_closed_ && replication_->size() > 1 ? second_ : first_; }

  ShardStore& store_;
  CommunicatorPtr sharding_;
  CommunicatorPtr replication_;
  BufferPool& pool_;
  double scale_;
  double loss_scale_ = 1;
  at::ScalarType reduce_dtype_;
  std::int64_t bucket_bytes_;
  Timeline* timeline_;
  std::int64_t early_bucket_bytes_ = 0;
  std::vector<std::vector<int>> members_;  // Parameters by buffer, in the order of its layout.
  std::vector<Pending> pending_;           // By buffer.
  std::deque<Reduction> in_flight_;
  // Of hop 2, in the pass that it follows.
  bool hops_early_ = false;
  std::vector<bool> is_collected_;  // By buffer: in a bucket.
  Bucket bucket_;
  std::int64_t filled_bytes_ = 0;
  std::deque<SecondHop> second_hops_;
  Sum first_;
  Sum second_;
  bool is_open_ = false;
  bool is_closed_ = false;          // first_ has seen hop 2.
  std::vector<bool> has_gradient_;  // By parameter.
  std::vector<bool> was_taken_;     // By parameter: since its unit's last reduction.
};

}  // namespace hopshard
