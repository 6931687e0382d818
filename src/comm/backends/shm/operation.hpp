// One rank's part in one collective, and the loops that move its data once all ranks are there.
// When they may run is decided in shared_group.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "control_block.hpp"
#include "hopshard/comm/communicator.hpp"
#include "memory.hpp"

namespace hopshard::detail::shm {

struct Operation {
  enum class State { kPending, kDone, kFailed };

  CallRecord record;
  std::string tag;  ///< Whole; the record may hold less.
  bool accumulate = false;
  at::Tensor output;  ///< Or the one tensor of an in-place operation.
  at::Tensor input;

  // The bytes that move. A chunk of a larger operation moves a piece of every part.
  char* output_data = nullptr;
  const char* input_data = nullptr;
  std::size_t part_bytes = 0;   ///< Of one rank's part, in this chunk.
  std::size_t part_stride = 0;  ///< From one slot to the next in the whole buffer.
  std::size_t element_bytes = 1;

  std::uint64_t sequence = 0;
  bool is_inline = true;
  /// A copy that peers can reach, of a buffer that they cannot.
  at::Tensor staging{};

  std::atomic<State> state{State::kPending};
  Failure::Kind failure_kind = Failure::Kind::kComm;
  std::string failure_text{};  ///< Written before `state` becomes kFailed.

  [[nodiscard]] at::ScalarType dtype() const { return static_cast<at::ScalarType>(record.dtype); }
  [[nodiscard]] ReduceOp reduce_op() const { return static_cast<ReduceOp>(record.reduce_op); }
  [[nodiscard]] bool is_root(int member) const { return record.root == member; }
  /// What this rank has to show to its peers.
  [[nodiscard]] const char* shown_data() const {
    return record.kind == Kind::kAllReduce || record.kind == Kind::kBroadcast ? output_data
                                                                              : input_data;
  }
  /// Its size inline, where the slots lie next to each other.
  [[nodiscard]] std::size_t shown_bytes(const Group& group) const;
  /// Its size where it is, from the first byte to the last.
  [[nodiscard]] std::size_t span_bytes(const Group& group) const;
};

/// Where a member's shown bytes are, from this process.
struct PeerBuffer {
  char* data = nullptr;  ///< Null: in the private memory of `pid`, at `address`.
  std::int64_t pid = 0;
  std::uint64_t address = 0;
  std::size_t slot_stride = 0;               ///< reduce_scatter: from one slot to the next.
  std::shared_ptr<const Mapping> mapping{};  ///< Keeps `data`.
};

/// Copies what peers need behind the post.
void show_inline(const Operation& operation, const Group& group, char* to);

/// Does this rank's share of the work. @throws CommError
void move_data(const Operation& operation, const Group& group,
               const std::vector<PeerBuffer>& peers);

}  // namespace hopshard::detail::shm
