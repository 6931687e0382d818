// What every backend must do when something is wrong: a typed error on every rank that says what
// happened, and never a hang.
#include <ATen/ops/empty.h>

#include <array>

#include "backends.hpp"
#include "hopshard/core/error.hpp"

namespace hopshard::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::Message;

class Failures : public ::testing::TestWithParam<Backend> {
 protected:
  static CommunicatorPtr make(ThreadWorld& world, const Group& group) {
    return GetParam().make(world, group);
  }
};

TEST_P(Failures, DifferentOperationsNameWhatEachRankIssued) {
  run_ranks(4, [&](int rank, ThreadWorld& threads) {
    const CommunicatorPtr world = make(threads, world_of(4, rank));
    const auto issue = [&] {
      const at::Tensor tensor = floats(40);
      if (rank == 1) {
        world->all_reduce(tensor, ReduceOp::kSum, {.timeout = {}, .tag = "norm"})->wait();
      } else {
        world->all_gather(tensor, floats(10), {.timeout = {}, .tag = "unshard/h.3"})->wait();
      }
    };
    if (GetParam().is_composite) {
      EXPECT_THROW(issue(), Error);
      return;
    }
    expect_error<ScheduleError>(
        issue, {"in group 'world'", detail::concatenate("on rank ", rank),
                "global rank 0: all_gather 'unshard/h.3' of 10 Float",
                "global rank 1: all_reduce 'norm' of 40 Float (sum)",
                "global rank 2: all_gather 'unshard/h.3' of 10 Float", "same order"});
    if (GetParam().is_reference) {
      // Everybody used up the same call, so the group is still in step.
      world->barrier();
    }
  });
}

TEST_P(Failures, DifferentTagsSizesDtypesRootsAndReductionsAreFound) {
  if (GetParam().is_composite) {
    return;  // Its parts find them: their own tests.
  }
  run_ranks(2, [&](int rank, ThreadWorld& threads) {
    const bool odd = rank == 1;
    int number = 0;
    // A new group each time: only the reference survives a disagreement.
    const auto expect_found = [&](auto call, const std::vector<std::string>& words) {
      Group group = world_of(2, rank);
      group.name = detail::concatenate("world", number++);
      const CommunicatorPtr world = make(threads, group);
      expect_error<ScheduleError>([&] { call(*world); }, words);
    };
    expect_found([&](auto& world) { world.barrier({.timeout = {}, .tag = odd ? "b" : "a"}); },
                 {"global rank 0: barrier 'a'; global rank 1: barrier 'b'"});
    expect_found([&](auto& world) { world.all_reduce(floats(odd ? 5 : 4))->wait(); },
                 {"of 4 Float", "of 5 Float"});
    expect_found(
        [&](auto& world) {
          world.all_reduce(floats(4).to(odd ? at::kDouble : at::kFloat))->wait();
        },
        {"of 4 Float", "of 4 Double"});
    expect_found([&](auto& world) { world.broadcast(floats(4), odd ? 1 : 0)->wait(); },
                 {"from root 0", "from root 1"});
    expect_found(
        [&](auto& world) {
          world.all_reduce(floats(4), odd ? ReduceOp::kMax : ReduceOp::kSum)->wait();
        },
        {"(sum)", "(max)"});
  });
}

TEST_P(Failures, AWaitEndsAtItsTimeLimitAndNamesTheMissing) {
  run_ranks(4, [&](int rank, ThreadWorld& threads) {
    const CommunicatorPtr world = make(threads, world_of(4, rank));
    const CommOptions options{.timeout = milliseconds(rank == 0 ? 100 : 20'000), .tag = "late"};
    const auto issue = [&] { world->all_reduce(floats(4), ReduceOp::kSum, options)->wait(); };
    if (rank == 3) {
      std::this_thread::sleep_for(milliseconds(1500));
      expect_error<CommError>(issue, {"in group 'world'"});
      return;
    }
    if (rank == 0) {
      std::vector<std::string> words = {"all_reduce 'late' in group 'world' on rank", "100 ms"};
      if (!GetParam().is_composite) {
        words.emplace_back("global rank 3 did not arrive");
      }
      expect_error<TimeoutError>(issue, words);
    } else {
      expect_error<CommError>(issue, {"all_reduce 'late' in group 'world' on rank"});
    }
    expect_error<CommError>([&] { world->barrier(); }, {"unusable"});
  });
}

TEST_P(Failures, AbortWakesEverybody) {
  run_ranks(4, [&](int rank, ThreadWorld& threads) {
    const CommunicatorPtr world = make(threads, world_of(4, rank));
    if (rank == 3) {
      std::this_thread::sleep_for(milliseconds(30));
      world->abort("the user pressed Ctrl-C");
      world->abort("and again");
    }
    expect_error<CommError>([&] { world->all_reduce(floats(4))->wait(); },
                            {"aborted by global rank 3", "the user pressed Ctrl-C"});
  });
}

TEST_P(Failures, ADeadRankEndsTheOthersAtOnce) {
  const auto start = std::chrono::steady_clock::now();
  std::array<std::string, 4> texts;
  EXPECT_THROW(run_ranks(4,
                         [&](int rank, ThreadWorld& threads) {
                           const CommunicatorPtr world = make(threads, world_of(4, rank));
                           world->barrier();
                           if (rank == 1) {
                             throw std::runtime_error("out of memory");
                           }
                           try {
                             world->all_reduce(floats(4))->wait();
                           } catch (const CommError& error) {
                             texts[static_cast<std::size_t>(rank)] = error.what();
                           }
                         }),
               std::runtime_error);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  // Either the news of the failure or the end of its communicator comes first; both name it.
  for (const std::size_t rank : {std::size_t{0}, std::size_t{2}, std::size_t{3}}) {
    EXPECT_NE(texts[rank].find("global rank 1"), std::string::npos) << texts[rank];
  }
}

TEST_P(Failures, ARankThatLeavesEarlyIsNamed) {
  run_ranks(2, [&](int rank, ThreadWorld& threads) {
    CommunicatorPtr world = make(threads, world_of(2, rank));
    world->barrier();
    if (rank == 0) {
      world.reset();
      return;
    }
    expect_error<CommError>([&] { world->barrier(); }, {"global rank 0 left the group"});
  });
}

TEST_P(Failures, ErrorsInOneGroupLeaveOthersAlone) {
  run_ranks(2, [&](int rank, ThreadWorld& threads) {
    const CommunicatorPtr world = make(threads, world_of(2, rank));
    Group other_group = world_of(2, rank);
    other_group.name = "other";
    const CommunicatorPtr other = make(threads, other_group);
    other->barrier();
    other->abort("only this one");
    EXPECT_THROW(other->barrier(), CommError);
    world->barrier();
  });
}

TEST_P(Failures, ADroppedWorkThatFailsOnlyLogs) {
  run_ranks(2, [&](int rank, ThreadWorld& threads) {
    const CommunicatorPtr world = make(threads, world_of(2, rank));
    if (rank == 0) {
      const WorkPtr dropped =
          world->all_reduce(floats(4), ReduceOp::kSum, {.timeout = milliseconds(20), .tag = "x"});
    }
  });
}

TEST_P(Failures, AnUnwindingRankWaitsForNobody) {
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THROW(run_ranks(2,
                         [&](int rank, ThreadWorld& threads) {
                           const CommunicatorPtr world = make(threads, world_of(2, rank));
                           if (rank == 1) {
                             std::this_thread::sleep_for(milliseconds(100));
                             expect_error<CommError>([&] { world->barrier(); }, {"global rank 0"});
                             return;
                           }
                           const WorkPtr pending = world->all_reduce(floats(4));
                           throw std::runtime_error("something else broke");
                         }),
               std::runtime_error);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

TEST_P(Failures, BadArgumentsAreRefusedBeforeAnythingMoves) {
  run_ranks(2, [&](int rank, ThreadWorld& threads) {
    const CommunicatorPtr world = make(threads, world_of(2, rank, {1, 0}));
    const CommOptions options{.timeout = {}, .tag = "unshard/h.3"};
    const std::string who =
        detail::concatenate("all_gather 'unshard/h.3' in group 'world' on rank ", rank,
                            " of 2 (global rank ", rank, ")");
    const at::Tensor whole = floats(20);
    const auto gather = [&](const at::Tensor& output, const at::Tensor& input) {
      return [&, output, input] { world->all_gather(output, input, options)->wait(); };
    };
    expect_error<InvalidArgument>(gather(whole, floats(9)), {who, "20", "9 * 2 = 18"});
    expect_error<InvalidArgument>(gather(whole, floats(10).to(at::kHalf)), {who, "Half", "Float"});
    expect_error<InvalidArgument>(gather(whole, at::Tensor()), {who, "input", "undefined"});
    expect_error<InvalidArgument>(gather(whole, floats(20).view({10, 2}).select(1, 0)),
                                  {who, "not contiguous"});
    expect_error<InvalidArgument>(gather(whole, whole.narrow(0, rank * 10, 10)),
                                  {who, "overlaps", "slot"});
    expect_error<InvalidArgument>(gather(whole, whole.narrow(0, 5, 10)),
                                  {who, "20 bytes after it"});
    expect_error<InvalidArgument>(
        gather(at::empty({4}, at::kComplexFloat), at::empty({2}, at::kComplexFloat)),
        {who, "ComplexFloat", "legal are Bool, Byte", "torch.uint8"});
    expect_error<InvalidArgument>(
        [&] { world->reduce_scatter(floats(9), whole)->wait(); },
        {"reduce_scatter (no tag)", "the input has 20 elements", "9 * 2 = 18"});
    expect_error<InvalidArgument>([&] { world->all_reduce(floats(4).to(at::kBool))->wait(); },
                                  {"all_reduce", "Bool", "uint8"});
    expect_error<InvalidArgument>([&] { world->broadcast(floats(4), 2)->wait(); },
                                  {"broadcast", "root 2", "0..1"});
    expect_error<InvalidArgument>([&] { world->barrier({.timeout = milliseconds(-1), .tag = ""}); },
                                  {"barrier", "-1 ms is negative"});
    world->barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Conformance, Failures, ::testing::ValuesIn(conforming_backends()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace hopshard::testing
