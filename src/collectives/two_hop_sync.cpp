#include "hopshard/collectives/two_hop_sync.hpp"

#include <algorithm>
#include <vector>

#include "hopshard/core/error.hpp"

namespace hopshard {

WorkPtr reduce_into_shard(Communicator& sharding, const at::Tensor& flat, const at::Tensor& shard,
                          bool accumulate, const std::string& tag) {
  HOPSHARD_CHECK(flat.numel() == shard.numel() * sharding.size(), InvalidArgument, "hop 1 of ", tag,
                 " reduces ", flat.numel(), " elements over ", sharding.size(),
                 " ranks into a shard of ", shard.numel());
  return sharding.reduce_scatter(shard, flat, ReduceOp::kSum,
                                 {.timeout = {}, .tag = tag, .accumulate = accumulate});
}

std::vector<WorkPtr> sum_over_replicas(Communicator& replication, const at::Tensor& shards,
                                       std::int64_t bucket_bytes, const std::string& tag) {
  HOPSHARD_CHECK(bucket_bytes > 0, InvalidArgument, "a bucket of ", bucket_bytes, " bytes");
  const std::int64_t bucket_numel = std::max<std::int64_t>(1, bucket_bytes / shards.element_size());
  std::vector<WorkPtr> in_flight;
  replication.group_begin();
  for (std::int64_t begin = 0; begin < shards.numel(); begin += bucket_numel) {
    const std::int64_t numel = std::min(bucket_numel, shards.numel() - begin);
    in_flight.push_back(replication.all_reduce(shards.narrow(0, begin, numel), ReduceOp::kSum,
                                               {.timeout = {}, .tag = tag}));
  }
  replication.group_end();
  return in_flight;
}

}  // namespace hopshard
