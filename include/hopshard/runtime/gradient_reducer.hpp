// From gradients that autograd leaves in param.grad to sums in the shard arenas (D5).
//
// [Note: closed and open sums]
// Hop 1 adds a unit's gradient to this rank's shard on every micro-step. After hop 2 the shard
// holds the world's mean and is closed: a sum of one sharding group may not be added to it, or it
// would be counted once instead of once per replica. A backward that comes later (no zero_grad)
// opens a second sum, which its own hop 2 adds to the first. With one replica there is no hop 2
// and one sum is enough.
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
  GradientReducer(ShardStore& store, CommunicatorPtr sharding, CommunicatorPtr replication,
                  BufferPool& pool, double scale, std::int64_t bucket_bytes);
  ~GradientReducer();

  /// Moves the parameter's `grad` into its unit's flat gradient and clears it.
  void take(int parameter);
  /// Issues hop 1, collective over the sharding group; zeros where nothing was taken. It ends by
  /// itself while the backward goes on; whatever reads the sums waits for it.
  void reduce(int unit);
  /// Waits for all that were issued.
  void finish_reductions();
  /// Gradients were taken that no reduction has carried yet.
  [[nodiscard]] bool has_leftover(int unit) const;

  /// Hop 2, collective over the replication group.
  void second_hop();
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
    at::Tensor flat;  // Undefined: no gradient since the last reduction.
  };
  struct Reduction {
    WorkPtr work;
    PoolBlock block;  // Its flat gradient.
  };
  void finish_oldest();
  void allocate(Sum& sum) const;
  void define(Sum& sum, int buffer) const;
  void define_all(Sum& sum) const;
  Pending& pending_flat(int buffer);
  void drop(Pending& pending);
  Sum& target() { return is_closed_ && replication_->size() > 1 ? second_ : first_; }

  ShardStore& store_;
  CommunicatorPtr sharding_;
  CommunicatorPtr replication_;
  BufferPool& pool_;
  double scale_;
  std::int64_t bucket_bytes_;
  std::vector<Pending> pending_;  // By buffer.
  std::deque<Reduction> in_flight_;
  Sum first_;
  Sum second_;
  bool is_open_ = false;
  bool is_closed_ = false;          // first_ has seen hop 2.
  std::vector<bool> has_gradient_;  // By parameter.
  std::vector<bool> was_taken_;     // By parameter: since its unit's last reduction.
};

}  // namespace hopshard
