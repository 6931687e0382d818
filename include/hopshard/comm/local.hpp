// The `local` backend: ranks are threads of one process and read each other's memory. It is the
// reference of the conformance suite: sums in the order of the group's ranks, bf16 and fp16
// accumulated in fp32, every disagreement found and named. CPU tensors only. Next: recording.hpp.
#pragma once

#include <chrono>
#include <memory>
#include <string_view>

#include "hopshard/comm/communicator.hpp"

namespace hopshard {

/// Where the rank threads of one process meet.
///
/// Each rank asks for its own communicator of a group; the members are matched by the group's
/// name and ranks, the i-th request of one rank with the i-th of the others. Calls are matched by
/// their place in each rank's sequence. A call never blocks: whoever arrives last moves the data
/// of all, so works may complete in any order. The barrier blocks.
///
/// Threads: all members may be called from any thread.
/// Lifetime: communicators stay valid after the hub is gone.
class LocalHub {
 public:
  static constexpr std::chrono::milliseconds kDefaultTimeout{60'000};

  /// @param world_size  ranks are 0..world_size-1.
  /// @param timeout     the time limit of waits that name none.
  /// @throws InvalidArgument
  explicit LocalHub(int world_size, std::chrono::milliseconds timeout = kDefaultTimeout);
  ~LocalHub();
  LocalHub(const LocalHub&) = delete;
  LocalHub& operator=(const LocalHub&) = delete;

  [[nodiscard]] int world_size() const noexcept;

  /// The calling rank's communicator of `group`. Does not wait for the other ranks.
  /// @throws InvalidArgument  bad group, or the members disagree on its slots.
  [[nodiscard]] CommunicatorPtr communicator(Group group);

  /// Wakes all waiting ranks of all groups with CommError; later calls fail too. Idempotent.
  void abort(std::string_view reason);

  /// Says that `global_rank` is gone: everything that needs it fails at once, naming it.
  void rank_failed(int global_rank, std::string_view reason);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace hopshard
