// Which rank this process is, and where the ranks meet: what `hopshard run` and torchrun leave in
// the environment. Without a launcher the world is this process alone. Next: train_gpt2.cpp.
#pragma once

#include "hopshard/comm/store.hpp"

namespace example {

struct Launch {
  int rank = 0;
  int size = 1;
  int ranks_per_node = 1;
  hopshard::StorePtr store;  ///< Of all ranks; its keys are fresh.
};

/// Connects to the launcher's store, or to one that rank 0 serves until it ends.
/// @throws hopshard::ConfigError  a variable is missing or not a number; torch's own error: nobody
///                                answers within HOPSHARD_TIMEOUT_S.
[[nodiscard]] Launch join_launch();

/// Lets SIGTERM, Ctrl-C and crashes end this process as usual. Debian's libfabric loads PSM
/// libraries that take these signals over before main begins, and a rank that a launcher stops
/// while it ends already would hang in them.
void restore_signals();

}  // namespace example
