// Two-hop gradient synchronisation (MiCS, arXiv 2205.00119 section 3.3; D5).
//
//   hop 1, every micro-step   reduce-scatter of a unit's flat gradient inside the sharding group,
//                             added to this rank's shard: (p-1)/p * M bytes per rank
//   hop 2, once per step      all-reduce of the shards over the replication group:
//                             2 * (r-1)/r * M/p bytes per rank, in buckets across units that
//                             start while the last backward goes on
//
// The mean over the world is applied once, by whoever fills the flat gradient.
// Next: runtime/shard_engine.hpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "hopshard/comm/communicator.hpp"

namespace hopshard {

/// Hop 1. Collective over `sharding`; both tensors are in use until the work is done.
/// @param flat        [p * n]; its contents are lost.
/// @param shard       [n]; becomes the sum or has it added.
/// @param accumulate  add; else the shard holds nothing yet.
[[nodiscard]] WorkPtr reduce_into_shard(Communicator& sharding, const at::Tensor& flat,
                                        const at::Tensor& shard, bool accumulate,
                                        const std::string& tag);

/// Hop 2. Collective over `replication`; all replicas end with bit-equal shards. In use until the
/// works are done.
/// @param shards       [n], summed in place.
/// @param bucket_bytes the most that one all-reduce moves.
[[nodiscard]] std::vector<WorkPtr> sum_over_replicas(Communicator& replication,
                                                     const at::Tensor& shards,
                                                     std::int64_t bucket_bytes,
                                                     const std::string& tag);

}  // namespace hopshard
