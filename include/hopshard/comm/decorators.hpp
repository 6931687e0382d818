// Communicators over a communicator, for tests: what must hold when ranks are late, fail or hang.
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

}  // namespace hopshard
