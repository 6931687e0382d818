// The `nccl` backend moves the memory of NVIDIA GPUs over NCCL, with communicators of its own that
// are bootstrapped through a Store; torch's process groups are not involved. Next: registry.hpp.
#pragma once

#include <chrono>

#include "hopshard/comm/communicator.hpp"
#include "hopshard/comm/registry.hpp"

namespace hopshard {

struct NcclOptions {
  /// Every rank writes each call to the store, and all compare: a disagreement ends the group at
  /// once, not at its time limit. For debugging; one store entry per call and rank stays behind.
  bool check_calls = false;
  /// Leave bf16 and fp16 sums to NCCL, which rounds after every addition (its symmetric kernels
  /// aside), so a sum of p ranks is rounded p - 1 times. Otherwise they travel as fp32: the
  /// contract's sums, for twice the bytes.
  bool native_low_precision_sums = false;
  /// How often a communicator asks NCCL for errors and the store for news of its peers.
  std::chrono::milliseconds watch_interval{1000};
};

/// Connects `connect.group` on the GPU that is current in the calling thread. Collective: the
/// group. The registry's entry is this with the default options.
///
/// Order: NCCL communicators are built in slot order, so a gather lands in place on the wire.
/// Streams: operations run on a stream of the communicator's own, after the work that is queued on
///   the caller's current stream at the call; Work::wait() makes the current stream wait and does
///   not block the host. barrier() and test() look from the host.
/// First calls: NCCL may connect ranks when they first need it; such a call waits for its peers.
/// Several communicators on one GPU: launches are ordered by one lock per device, which a group
///   (group_begin) holds once. All ranks must issue in one order over all their communicators, and
///   a process with several threads needs NCCL_LAUNCH_ORDER_IMPLICIT=1 (CUDA 12.3, NCCL 2.26).
/// Sums: of fp32 and fp64 in an order of NCCL's choice, the same on all ranks; see NcclOptions for
///   bf16 and fp16. A maximum with NaN is what NCCL makes of it.
/// Memory: allocate() returns GPU memory by ncclMemAlloc, register_memory() registers with this
///   communicator and those split from it; all ranks should register alike (NCCL 2.19).
/// split(): over the parent's ranks, all of them, by ncclCommSplit with resources of its own; for
///   a smaller part, whose outsiders need not call, with a new id through the store.
/// Failures: what goes wrong on one rank reaches the others through the store, and every rank
///   aborts its NCCL communicator. At a time limit the ranks tell each other what they issued: the
///   error names who is missing, who is silent, and operations that differ.
/// End: destroying a communicator waits for its operations and, for a few seconds, for its peers;
///   destroy in one order on all ranks.
///
/// @throws ConfigError  no GPU, no NCCL, or one too old; see connect_backend for the others.
[[nodiscard]] CommunicatorPtr make_nccl_communicator(const ConnectOptions& connect,
                                                     const NcclOptions& options = {});

}  // namespace hopshard
