#include "hopshard/collectives/two_hop_sync.hpp"

#include <ATen/ops/mul.h>

#include <algorithm>
#include <vector>

#include "hopshard/core/error.hpp"

namespace hopshard {

void reduce_into_shard(Communicator& sharding, const at::Tensor& flat, const at::Tensor& shard,
                       double scale, bool overwrite, const std::string& tag) {
  HOPSHARD_CHECK(flat.numel() == shard.numel() * sharding.size(), InvalidArgument, "hop 1 of ", tag,
                 " reduces ", flat.numel(), " elements over ", sharding.size(),
                 " ranks into a shard of ", shard.numel());
  const at::Tensor sum = flat.narrow(0, sharding.group().my_slot() * shard.numel(), shard.numel());
  sharding.reduce_scatter(sum, flat, ReduceOp::kSum, {.timeout = {}, .tag = tag})->wait();
  if (overwrite) {
    at::mul_out(const_cast<at::Tensor&>(shard), sum, at::Scalar(scale));
  } else {
    shard.add_(sum, scale);
  }
}

void sum_over_replicas(Communicator& replication, const at::Tensor& shards,
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
  for (const WorkPtr& work : in_flight) {
    work->wait();
  }
}

}  // namespace hopshard
