// Communicators over a communicator, for tests: what must hold when ranks are late, fail or hang,
// and when a collective reads and writes its buffers as late as on a GPU.
// Counting and tracing live in recording.hpp.
#pragma once

#include <chrono>
#include <cstdint>

#include "hopshard/comm/communicator.hpp"

namespace hopshard {

/// What to inject. Calls are counted from 0 over all operations of this communicator.
struct DelayedOptions {
  std::uint64_t seed = 0;                  ///< Mixed with the global rank.
  std::chrono::microseconds max_delay{0};  ///< Uniform, before each call and each wait.
  std::int64_t fail_at_call = -1;          ///< Throws CommError instead of issuing this call.
  std::int64_t hang_at_call = -1;          ///< Blocks instead of issuing it, until abort() …
  std::chrono::milliseconds hang_limit{60'000};  ///< … or for this long; then throws CommError.
};

/// `inner` with delays and faults. Operations of a group of one rank are not touched.
/// @throws InvalidArgument  null, or negative times.
[[nodiscard]] CommunicatorPtr make_delayed_communicator(CommunicatorPtr inner,
                                                        DelayedOptions options);

struct SimulatedOptions {
  std::uint64_t seed = 0;                  ///< Mixed with the global rank.
  std::chrono::microseconds max_delay{0};  ///< Uniform, before each collective on its stream.
};

/// `inner` on a stream of its own: a call only submits. Until Work::wait() its outputs are NaN;
/// inputs are read late, and those without a defined value afterwards become NaN. Finds waits that
/// are missing and memory that is given away too early. The stream ends after its last task.
/// Operations of a group of one rank are not touched. Splits are simulated too.
/// @throws InvalidArgument  null, or a negative delay.
[[nodiscard]] CommunicatorPtr make_simulated_communicator(CommunicatorPtr inner,
                                                          SimulatedOptions options);

}  // namespace hopshard
