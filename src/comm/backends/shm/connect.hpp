// Makes the shm communicator of a group, and settles with the other ranks what this host allows.
#pragma once

#include "hopshard/comm/registry.hpp"

namespace hopshard::detail::shm {

/// What to do without, as if this host refused it; for tests. Must be the same on all ranks.
struct Restrictions {
  bool no_memory_files = false;    ///< memfd through /proc: then POSIX shared memory, by copies.
  bool no_process_memory = false;  ///< process_vm_readv: then private buffers are staged.
  bool no_own_process = false;     ///< Ranks that are threads treat each other as processes.
  bool no_pid = false;             ///< pids and pidfd, as in other pid namespaces.
};

/// Collective. @throws ConfigError, CommError, TimeoutError, InvalidArgument
[[nodiscard]] CommunicatorPtr connect(const ConnectOptions& options,
                                      const Restrictions& restrictions);

/// Why no memory can be shared here; nothing if it can.
[[nodiscard]] std::optional<std::string> find_obstacle();

}  // namespace hopshard::detail::shm
