// The numbers of the `recording` backend against its formulas.
#include "hopshard/comm/recording.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <numeric>

#include "hopshard/core/error.hpp"

namespace hopshard {
namespace {

Group group_of(int size, int rank, std::vector<int> slots = {}) {
  Group group{"sharding[0-" + std::to_string(size - 1) + "]",
              std::vector<int>(static_cast<std::size_t>(size)), rank, std::move(slots)};
  std::iota(group.ranks.begin(), group.ranks.end(), 0);
  return group;
}

TEST(Recording, CountsCallsAndBytesByGroupOpAndKind) {
  const auto meter = std::make_shared<Meter>();
  const auto log = std::make_shared<CallLog>();
  const CommunicatorPtr comm =
      make_recording_communicator(nullptr, group_of(4, 0), meter, /*ranks_per_node=*/2, log);
  const CommOptions unshard{.timeout = {}, .tag = "unshard/h.3"};
  comm->all_gather(at::zeros({40}), at::zeros({10}), unshard)->wait();
  comm->all_gather(at::zeros({80}), at::zeros({20}), unshard)->wait();
  comm->reduce_scatter(at::zeros({10}), at::zeros({40}), ReduceOp::kSum,
                       {.timeout = {}, .tag = "hop1/h.3"})
      ->wait();
  comm->all_reduce(at::zeros({10}))->wait();
  comm->barrier();

  EXPECT_EQ(meter->value("comm/sharding/all_gather/unshard/calls"), 2);
  EXPECT_EQ(meter->value("comm/sharding/all_gather/unshard/bytes"), 120 * 4);
  // (s - 1) * b / s for b = 160 and 320 bytes; rank 0's next member is on its own node.
  EXPECT_EQ(meter->value("comm/sharding/all_gather/unshard/sent_intra_node_bytes"), 120 + 240);
  EXPECT_EQ(meter->value("comm/sharding/reduce_scatter/hop1/sent_intra_node_bytes"), 120);
  EXPECT_EQ(meter->value("comm/sharding/all_reduce/untagged/sent_intra_node_bytes"),
            2 * 3 * 40 / 4);
  EXPECT_EQ(meter->value("comm/sent_intra_node_bytes"), 120 + 240 + 120 + 60);
  EXPECT_EQ(meter->value("comm/sent_inter_node_bytes"), 0);

  EXPECT_EQ(comm_total(*meter, "calls"), 5);
  EXPECT_EQ(comm_total(*meter, "calls", {"sharding", "all_gather", "unshard"}), 2);
  EXPECT_EQ(comm_total(*meter, "calls", {"", "barrier", ""}), 1);
  EXPECT_EQ(comm_total(*meter, "bytes", {"world", "", ""}), 0);

  const auto calls = log->calls();
  ASSERT_EQ(calls.size(), 5u);
  EXPECT_EQ(calls[0].op, "all_gather");
  EXPECT_EQ(calls[0].tag, "unshard/h.3");
  EXPECT_EQ(calls[0].numel, 40);
  EXPECT_EQ(calls[0].dtype, at::kFloat);
  EXPECT_EQ(calls[0].group, "sharding[0-3]");
  EXPECT_EQ(calls[2].op, "reduce_scatter");
  EXPECT_EQ(calls[4].op, "barrier");
  log->clear();
  EXPECT_TRUE(log->calls().empty());
}

TEST(Recording, ARingCrossesEachNodeBoundaryOnce) {
  // 4 ranks on 2 nodes: only ranks 1 and 3 send to another node.
  for (int rank = 0; rank < 4; ++rank) {
    const auto meter = std::make_shared<Meter>();
    const CommunicatorPtr comm = make_recording_communicator(nullptr, group_of(4, rank), meter, 2);
    comm->all_gather(at::zeros({40}), at::zeros({10}))->wait();
    comm->broadcast(at::zeros({10}), /*root=*/2)->wait();
    const std::int64_t expected = 120 + (rank == 1 ? 0 : 40);  // Rank 1 is in front of the root.
    const bool crosses = rank % 2 == 1;
    EXPECT_EQ(meter->value("comm/sent_inter_node_bytes"), crosses ? expected : 0) << rank;
    EXPECT_EQ(meter->value("comm/sent_intra_node_bytes"), crosses ? 0 : expected) << rank;
  }
}

TEST(Recording, AloneItStandsForAWorldOfEqualRanks) {
  const auto meter = std::make_shared<Meter>();
  const int size = 2048;
  const CommunicatorPtr comm =
      make_recording_communicator(nullptr, group_of(size, 5), meter, /*ranks_per_node=*/8);
  const at::Tensor part = at::full({3}, 2.0);
  const at::Tensor whole = at::zeros({3 * size});
  comm->all_gather(whole, part)->wait();
  EXPECT_TRUE(whole.equal(at::full({3 * size}, 2.0)));
  comm->reduce_scatter(part, whole)->wait();
  EXPECT_TRUE(part.equal(at::full({3}, 2.0 * size)));
  comm->reduce_scatter(part, whole, ReduceOp::kMax)->wait();
  EXPECT_TRUE(part.equal(at::full({3}, 2.0)));
  comm->all_reduce(part)->wait();
  EXPECT_TRUE(part.equal(at::full({3}, 2.0 * size)));
  comm->all_reduce(part, ReduceOp::kMax)->wait();
  EXPECT_TRUE(part.equal(at::full({3}, 2.0 * size)));
  comm->broadcast(part, 7)->wait();
  comm->barrier();
  EXPECT_EQ(comm_total(*meter, "calls"), 7);
}

TEST(Recording, AloneItReadsItsOwnSlot) {
  const CommunicatorPtr comm = make_recording_communicator(
      nullptr, group_of(3, 0, {2, 0, 1}), std::make_shared<Meter>(), /*ranks_per_node=*/1);
  const at::Tensor whole = at::zeros({6});
  whole.narrow(0, 4, 2).fill_(5.0);
  const at::Tensor mine = whole.narrow(0, 4, 2);
  comm->reduce_scatter(mine, whole)->wait();
  EXPECT_TRUE(mine.equal(at::full({2}, 15.0)));
}

TEST(Recording, RefusesBadArguments) {
  const auto meter = std::make_shared<Meter>();
  EXPECT_THROW((void)make_recording_communicator(nullptr, group_of(2, 0), nullptr, 2),
               InvalidArgument);
  EXPECT_THROW((void)make_recording_communicator(nullptr, group_of(2, 0), meter, 0),
               InvalidArgument);
  const CommunicatorPtr other = make_recording_communicator(nullptr, group_of(3, 0), meter, 1);
  EXPECT_THROW((void)make_recording_communicator(other, group_of(2, 0), meter, 2), InvalidArgument);
}

}  // namespace
}  // namespace hopshard
