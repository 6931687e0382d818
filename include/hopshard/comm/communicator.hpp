// A Communicator moves tensors between the ranks of one Group. Backends implement the
// private do_*() functions; callers see only the checked public ones. Next: registry.hpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "hopshard/comm/group.hpp"
#include "hopshard/comm/work.hpp"
#include "hopshard/topology/link_cost.hpp"

namespace hopshard {

enum class ReduceOp { kSum, kMax };  // Means are sums scaled by us: see two_hop_sync.hpp.

/// Per-call settings. A zero timeout means the communicator's default.
struct CommOptions {
  std::chrono::milliseconds timeout{0};
  std::string tag;  ///< Shown in traces and errors, e.g. "unshard/h.3".
  /// reduce_scatter only: output = output op (the reduced slot), e.g. to sum over micro-steps.
  bool accumulate = false;
};

class Communicator;
using CommunicatorPtr = std::shared_ptr<Communicator>;

/// Collective operations over one group of ranks.
///
/// Collective: every rank of `group()` makes the same calls in the same order.
/// Tensors: contiguous, on one device; `n` below counts elements, not bytes.
/// Lifetime: keep inputs unchanged and outputs alive until `Work::wait()`.
/// Progress: a call returns at once; it goes on while its ranks wait for other operations, of any
///   communicator, or compute. Works may be waited for in any order.
/// Threads: one at a time per communicator; separate communicators are free.
/// Errors: bad arguments throw InvalidArgument before any byte is sent.
/// Size 1: every operation is the identity and reaches no backend.
/// Sums: bf16 and fp16 are added in fp32 and rounded once, at least within one level of a
/// hierarchy. Determinism: sums are taken in the order of the group's ranks on backends that say
/// so.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  [[nodiscard]] const Group& group() const noexcept { return group_; }
  [[nodiscard]] int rank() const noexcept { return group_.rank; }
  [[nodiscard]] int size() const noexcept { return group_.size(); }
  [[nodiscard]] virtual std::string_view backend() const noexcept = 0;

  /// Puts every rank's input at its slot: output[slot_of(i) * n ...] = input of rank i.
  /// @param output [n * size()], same dtype as `input`.
  /// @param input  [n]; may be this rank's slot of `output` (in place).
  /// Wire: each rank receives (size() - 1) * n elements.
  [[nodiscard]] WorkPtr all_gather(at::Tensor output, at::Tensor input,
                                   const CommOptions& options = {});

  /// Reduces the ranks' inputs element by element; each rank keeps its slot of the result.
  /// @param output [n]; may be this rank's slot of `input` (in place), unless it accumulates.
  /// @param input  [n * size()]; holds no defined value afterwards, but for the output.
  /// Wire: each rank receives (size() - 1) * n elements.
  [[nodiscard]] WorkPtr reduce_scatter(at::Tensor output, at::Tensor input,
                                       ReduceOp op = ReduceOp::kSum,
                                       const CommOptions& options = {});

  /// Reduces `tensor` [n] over the ranks, in place; all ranks get bit-equal results.
  [[nodiscard]] WorkPtr all_reduce(at::Tensor tensor, ReduceOp op = ReduceOp::kSum,
                                   const CommOptions& options = {});

  /// Copies group rank `root`'s `tensor` [n] to all ranks, in place.
  [[nodiscard]] WorkPtr broadcast(at::Tensor tensor, int root, const CommOptions& options = {});

  /// Returns when every rank of the group has called it.
  void barrier(const CommOptions& options = {});

  /// Between these two, operations may be held back and launched as one; `group_end` launches them.
  virtual void group_begin() {}
  virtual void group_end() {}

  /// The communicator of a part of this group, by the same backend. Collective: all members of the
  /// part, in the same order; the other ranks need not call it.
  /// @param part  its ranks are ranks of this group; `part.rank` is this rank's place among them.
  /// @throws InvalidArgument, CommError, TimeoutError
  [[nodiscard]] CommunicatorPtr split(Group part);

  /// Zero-filled memory (uint8) [num_bytes] on the backend's device, which it moves fastest;
  /// aligned to 128 bytes or better. Not collective. Lives as long as the tensor and its views do.
  /// @throws InvalidArgument  negative; Error: out of memory.
  [[nodiscard]] at::Tensor allocate(std::int64_t num_bytes);

  /// Prepares memory of the caller's own, e.g. pins or registers it with the network card; a hint.
  /// Keep it alive as long as the communicator and all split from it. Not collective.
  void register_memory(const at::Tensor& memory);

  /// How a call is carried out where there is a choice; what counts bytes asks.
  /// @param num_bytes  of the whole buffer.
  [[nodiscard]] virtual Algorithm algorithm(CollectiveOp /*op*/, std::int64_t /*num_bytes*/) const {
    return Algorithm::kFlat;
  }

  /// Wakes every rank of the group that waits, with CommError. Idempotent; any thread may call it.
  virtual void abort(std::string_view reason) = 0;

 protected:
  explicit Communicator(Group group);

  /// Ordinary memory, unless a backend has better. `num_bytes` >= 0.
  virtual at::Tensor do_allocate(std::int64_t num_bytes);
  virtual void do_register_memory(const at::Tensor& memory);

 private:
  virtual WorkPtr do_all_gather(at::Tensor output, at::Tensor input,
                                const CommOptions& options) = 0;
  virtual WorkPtr do_reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                                    const CommOptions& options) = 0;
  virtual WorkPtr do_all_reduce(at::Tensor tensor, ReduceOp op, const CommOptions& options) = 0;
  virtual WorkPtr do_broadcast(at::Tensor tensor, int root, const CommOptions& options) = 0;
  virtual void do_barrier(const CommOptions& options) = 0;
  virtual CommunicatorPtr do_split(Group part) = 0;

  Group group_;
};

}  // namespace hopshard
