// The `ofi` backend runs over libfabric: `efa` between nodes on AWS, `tcp` elsewhere. Only needed
// to choose other settings than the environment's; else see registry.hpp.
#pragma once

#include <string>
#include <vector>

#include "hopshard/comm/registry.hpp"

namespace hopshard {

/// Which network cards to use, and how.
struct OfiOptions {
  /// As fi_info names it, without utility layers: "efa", "tcp", "net", "shm". Empty or "auto": efa
  /// if there is one, else tcp.
  std::string provider;
  /// Interface names or addresses, one card each (the same one twice is legal); large messages are
  /// spread over them. Empty: all EFA cards; else FI_TCP_IFACE, or the first that is no loopback.
  std::vector<std::string> interfaces;
  /// Sockets on a machine with EFA devices are otherwise a ConfigError: training would go on, at a
  /// small part of its speed.
  bool allow_tcp = false;
  /// Whether data is written into the peers' memory. False: tagged messages carry it, as where the
  /// provider cannot write; for tests and comparisons.
  bool remote_writes = true;
  /// Ranks with equal names share a node, which decides between algorithms. Empty:
  /// HOPSHARD_NODE_ID, else the host name.
  std::string node;
};

/// HOPSHARD_OFI_PROVIDER, HOPSHARD_OFI_INTERFACE and HOPSHARD_OFI_ALLOW_TCP.
[[nodiscard]] OfiOptions ofi_options_from_env();

/// What connect_backend("ofi", options) does with the environment's settings. Collective: the
/// group.
///
/// CPU tensors only. One thread makes progress for the communicator and all split from it.
/// Sums: up to 16 KiB, and where ranks are alone on their nodes, in the order of the group's ranks;
/// else in ring order, bf16 and fp16 partial sums travelling in fp32. Each element is summed once,
/// so all ranks get bit-equal results.
/// Scratch memory: reduce_scatter and all_reduce up to the size of the whole buffer (in a ring of
/// bf16 or fp16 twice that), kept for the next call.
/// @throws ConfigError  no provider fits, or an EFA machine would use sockets; InvalidArgument,
///                      CommError, TimeoutError.
[[nodiscard]] CommunicatorPtr connect_ofi(const ConnectOptions& options, const OfiOptions& ofi);

}  // namespace hopshard
