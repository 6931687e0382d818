// What goes wrong with NCCL, on demand: late, failing and hanging ranks, old libraries, and ends.
// That data arrives right is the conformance suite's.
#include "comm/backends/nccl/nccl_communicator.hpp"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <atomic>

#include "hopshard/core/error.hpp"
#include "support/fake_nccl.hpp"
#include "support/thread_world.hpp"

namespace hopshard::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Calls = std::vector<std::string>;

/// Ranks as threads, each with a NCCL and a device of its own.
class World {
 public:
  explicit World(std::size_t size) : faults(size), nccl_(size), devices_(size) {}

  std::vector<FakeNcclFaults> faults;
  NcclOptions options{
      .check_calls = false, .native_low_precision_sums = false, .watch_interval = milliseconds(2)};
  milliseconds timeout = seconds(20);
  bool has_streams = false;

  [[nodiscard]] FakeNccl& nccl(int rank) { return *nccl_[index(rank)]; }
  [[nodiscard]] FakeDevice& device(int rank) { return *devices_[index(rank)]; }

  CommunicatorPtr connect(ThreadWorld& threads, const Group& group) {
    const int rank = group.global_rank();
    nccl_[index(rank)] = std::make_shared<FakeNccl>(faults[index(rank)]);
    devices_[index(rank)] = std::make_shared<FakeDevice>(has_streams);
    return hopshard::detail::connect_nccl(nccl_[index(rank)], devices_[index(rank)],
                                          {.store = make_prefix_store(threads.store(), group.name),
                                           .group = group,
                                           .timeout = timeout},
                                          options);
  }

  void expect_no_misuse() {
    for (const auto& nccl : nccl_) {
      EXPECT_EQ(nccl ? nccl->misuses() : Calls{}, Calls{});
    }
  }

 private:
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  std::vector<std::shared_ptr<FakeNccl>> nccl_;
  std::vector<std::shared_ptr<FakeDevice>> devices_;
};

/// The text of the ErrorType that `call` throws.
template <typename ErrorType, typename Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const ErrorType& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another error than expected: " << error.what();
    return {};
  }
  ADD_FAILURE() << "no error";
  return {};
}

void expect_words(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    EXPECT_NE(text.find(word), std::string::npos) << "no \"" << word << "\" in: " << text;
  }
}

at::Tensor ones(std::int64_t numel, at::ScalarType dtype = at::kFloat) {
  return at::full({numel}, 1, at::TensorOptions().dtype(dtype));
}

bool all_equal(const at::Tensor& tensor, double value) {
  return tensor.eq(value).all().item().toBool();
}

// ---- connecting

TEST(NcclConnect, WaitsWhileNcclIsBusyAndNeverCallsABusyCommunicator) {
  World world(3);
  for (FakeNcclFaults& faults : world.faults) {
    faults.num_busy_looks = 300;
  }
  run_ranks(3, [&](int rank, ThreadWorld& threads) {
    const CommunicatorPtr everyone = world.connect(threads, world_of(3, rank));
    const at::Tensor tensor = ones(4);
    everyone->all_reduce(tensor)->wait();
    EXPECT_TRUE(all_equal(tensor, 3));
  });
  world.expect_no_misuse();
}

TEST(NcclConnect, AFailureOnOneRankEndsTheOthersAtOnceAndIsNamed) {
  World world(3);
  world.faults[1].results["comm_init_rank_config"] = ncclUnhandledCudaError;
  const auto start = std::chrono::steady_clock::now();
  run_ranks(3, [&](int rank, ThreadWorld& threads) {
    const std::string text =
        error_of<CommError>([&] { static_cast<void>(world.connect(threads, world_of(3, rank))); });
    expect_words(text, {"nccl connect (no tag) in group 'world' on rank", "unhandled cuda error",
                        "the fake's last words"});
    if (rank != 1) {
      expect_words(text, {"global rank 1: NCCL could not connect"});
      EXPECT_EQ(world.nccl(rank).count("comm_abort"),
                world.nccl(rank).count("comm_init_rank_config"));
    }
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(10));
  world.expect_no_misuse();
}

TEST(NcclConnect, AMissingRankIsNamedAtTheTimeLimitAndTheRestIsFreed) {
  World world(3);
  world.timeout = milliseconds(100);
  run_ranks(3, [&](int rank, ThreadWorld& threads) {
    if (rank == 2) {
      return;
    }
    const std::string text =
        error_of<CommError>([&] { static_cast<void>(world.connect(threads, world_of(3, rank))); });
    expect_words(text, {"global rank 2 did not arrive within the 100 ms"});
    EXPECT_EQ(world.nccl(rank).count("comm_abort"), 1);
  });
  world.expect_no_misuse();
}

TEST(NcclConnect, TheRankWithoutAnIdIsNamed) {
  World world(2);
  world.faults[0].results["get_unique_id"] = ncclSystemError;
  run_ranks(2, [&](int rank, ThreadWorld& threads) {
    expect_words(
        error_of<CommError>([&] { static_cast<void>(world.connect(threads, world_of(2, rank))); }),
        {"NCCL made no unique id: unhandled system error", "NCCL_SOCKET_IFNAME"});
  });
}

TEST(NcclConnect, RefusesLibrariesThatAreTooOldOrOfAnotherMajorVersion) {
  for (const auto& [version, text] :
       {std::pair{21703, "NCCL 2.17.3"}, std::pair{2804, "NCCL 2.8.4"},
        std::pair{30100, "NCCL 3.1.0"}}) {
    World world(1);
    world.faults[0].version = version;
    run_ranks(1, [&](int rank, ThreadWorld& threads) {
      expect_words(error_of<ConfigError>(
                       [&] { static_cast<void>(world.connect(threads, world_of(1, rank))); }),
                   {text, "needs 2.18.0 or newer of NCCL 2"});
    });
  }
}

TEST(NcclConnect, RefusesBadOptions) {
  run_ranks(1, [&](int rank, ThreadWorld& threads) {
    World world(1);
    world.timeout = milliseconds(0);
    expect_words(error_of<InvalidArgument>(
                     [&] { static_cast<void>(world.connect(threads, world_of(1, rank))); }),
                 {"time limit must be positive"});
    world.timeout = milliseconds(10);
    world.options.watch_interval = milliseconds(0);
    expect_words(error_of<InvalidArgument>(
                     [&] { static_cast<void>(world.connect(threads, world_of(1, rank))); }),
                 {"watch interval must be positive"});
  });
}

TEST(NcclConnect, AGroupOfOneNeedsNoCommunicator) {
  World world(1);
  run_ranks(1, [&](int rank, ThreadWorld& threads) {
    const CommunicatorPtr alone = world.connect(threads, world_of(1, rank));
    alone->all_reduce(ones(4))->wait();
    alone->barrier();
    alone->split(world_of(1, rank))->barrier();
    EXPECT_EQ(world.nccl(rank).calls(), Calls{});
    alone->abort("nobody is there to hear it");
  });
}

// ---- failing

TEST(NcclFailure, AnErrorThatNcclReportsMeanwhileEndsAllRanks) {
  World world(3);
  world.faults[1].async_error_at = 1;
  run_ranks(3, [&](int rank, ThreadWorld& threads) {
    CommunicatorPtr everyone = world.connect(threads, world_of(3, rank));
    everyone->all_reduce(ones(4))->wait();
    expect_words(
        error_of<CommError>([&] {
          everyone->all_reduce(ones(4), ReduceOp::kSum, {.timeout = {}, .tag = "norm"})->wait();
        }),
        {"nccl all_reduce 'norm' in group 'world' on rank", "global rank 1: NCCL failed",
         "network error", "look at the output of the other ranks first"});
    expect_words(error_of<CommError>([&] { everyone->barrier(); }), {"unusable since"});
    everyone.reset();
    EXPECT_EQ(world.nccl(rank).count("comm_abort"), 1);
    EXPECT_EQ(world.nccl(rank).count("comm_finalize"), 0);
  });
  world.expect_no_misuse();
}

TEST(NcclFailure, AHangEndsAtTheTimeLimitWithOneAbortPerRank) {
  World world(2);
  world.faults[0].hang_at = 1;
  std::atomic<int> num_timeouts = 0;
  run_ranks(2, [&](int rank, ThreadWorld& threads) {
    CommunicatorPtr everyone = world.connect(threads, world_of(2, rank));
    everyone->barrier();
    const WorkPtr first =
        everyone->all_reduce(ones(4), ReduceOp::kSum, {.timeout = milliseconds(150)});
    const WorkPtr second =
        everyone->all_reduce(ones(4), ReduceOp::kSum, {.timeout = milliseconds(150)});
    // A rank whose own limit is not over yet hears of the other's.
    expect_words(error_of<CommError>([&] {
                   try {
                     first->wait();
                   } catch (const TimeoutError&) {
                     ++num_timeouts;
                     throw;
                   }
                 }),
                 {"all ranks arrived, but NCCL did not finish within the 150 ms", "NCCL_DEBUG"});
    EXPECT_THROW(second->wait(), CommError);
    EXPECT_TRUE(second->test());
    everyone->abort("again");
    everyone.reset();
    EXPECT_EQ(world.nccl(rank).count("comm_abort"), 1);
    EXPECT_EQ(world.nccl(rank).count("comm_destroy"), 0);
  });
  EXPECT_GE(num_timeouts, 1);
  world.expect_no_misuse();
}

TEST(NcclFailure, WithoutCheckedCallsRanksFindAtTheTimeLimitThatTheyDiffer) {
  World world(3);
  world.timeout = milliseconds(300);
  run_ranks(3, [&](int rank, ThreadWorld& threads) {
    const CommunicatorPtr everyone = world.connect(threads, world_of(3, rank));
    everyone->barrier();
    const std::string text =
        error_of<ScheduleError>([&] { everyone->all_reduce(ones(rank == 1 ? 5 : 4))->wait(); });
    expect_words(text, {"global rank 0: all_reduce (no tag) of 4 Float (sum)",
                        "global rank 1: all_reduce (no tag) of 5 Float (sum)", "same order"});
  });
  world.expect_no_misuse();
}

TEST(NcclFailure, WithoutCheckedCallsAMissingRankIsNamed) {
  World world(3);
  run_ranks(3, [&](int rank, ThreadWorld& threads) {
    const CommunicatorPtr everyone = world.connect(threads, world_of(3, rank));
    if (rank == 2) {
      std::this_thread::sleep_for(milliseconds(400));
      EXPECT_THROW(everyone->barrier(), CommError);
      return;
    }
    expect_words(error_of<CommError>(
                     [&] { everyone->barrier({.timeout = milliseconds(100), .tag = "end"}); }),
                 {"global rank 2 did not arrive within the 100 ms"});
  });
  world.expect_no_misuse();
}

TEST(NcclFailure, ARankThatSaysNothingAnyMoreIsCalledSilent) {
  World world(2);
  run_ranks(2, [&](int rank, ThreadWorld& threads) {
    if (rank == 0) {
      const CommunicatorPtr everyone = world.connect(threads, world_of(2, rank));
      expect_words(error_of<TimeoutError>(
                       [&] { everyone->barrier({.timeout = milliseconds(100), .tag = ""}); }),
                   {"global rank 1 did not arrive", "gives no sign of life"});
      return;
    }
    // As if killed once connected: nothing of ours answers.
    const std::string value = threads.store()->get("world/id", seconds(20));
    ncclUniqueId id{};
    std::copy(value.begin(), value.end(), id.internal);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.splitShare = 0;
    ncclComm_t comm = nullptr;
    EXPECT_EQ(FakeNccl().comm_init_rank_config(&comm, 2, id, 1, &config), ncclInProgress);
  });
  world.expect_no_misuse();
}

TEST(NcclFailure, ArgumentsThatNcclRefusesDoNoHarm) {
  for (const bool check_calls : {false, true}) {
    World world(2);
    world.options.check_calls = check_calls;
    for (FakeNcclFaults& faults : world.faults) {
      faults.results["broadcast"] = ncclInvalidArgument;
    }
    run_ranks(2, [&](int rank, ThreadWorld& threads) {
      const CommunicatorPtr everyone = world.connect(threads, world_of(2, rank));
      expect_words(error_of<InvalidArgument>([&] { everyone->broadcast(ones(4), 0)->wait(); }),
                   {"nccl broadcast", "NCCL refuses the arguments: invalid argument"});
      const at::Tensor tensor = ones(4);
      everyone->all_reduce(tensor)->wait();
      EXPECT_TRUE(all_equal(tensor, 2));
    });
    world.expect_no_misuse();
  }
}

TEST(NcclFailure, ALaunchThatFailsEndsAllRanks) {
  World world(2);
  world.faults[0].results["all_reduce"] = ncclSystemError;
  run_ranks(2, [&](int rank, ThreadWorld& threads) {
    CommunicatorPtr everyone = world.connect(threads, world_of(2, rank));
    expect_words(error_of<CommError>([&] { everyone->all_reduce(ones(4))->wait(); }),
                 {"global rank 0: NCCL failed: unhandled system error (the fake's last words)"});
    everyone.reset();
    EXPECT_EQ(world.nccl(rank).count("comm_abort"), 1);
  });
  world.expect_no_misuse();
}

TEST(NcclFailure, APartFailsAlone) {
  World world(2);
  run_ranks(2, [&](int rank, ThreadWorld& threads) {
    const CommunicatorPtr everyone = world.connect(threads, world_of(2, rank));
    const CommunicatorPtr part = everyone->split(world_of(2, rank));
    part->abort("only this one");
    EXPECT_THROW(part->barrier(), CommError);
    everyone->barrier();
  });
  world.expect_no_misuse();
}

// ---- ends

TEST(NcclEnd, AHealthyCommunicatorIsFinalizedThenDestroyedNeverAborted) {
  World world(2);
  run_ranks(2, [&](int rank, ThreadWorld& threads) {
    CommunicatorPtr everyone = world.connect(threads, world_of(2, rank));
    const at::Tensor memory = everyone->allocate(64);
    everyone->register_memory(memory);
    everyone->barrier();
    everyone.reset();
    Calls expected = {"comm_init_rank_config", "mem_alloc",     "comm_register", "all_reduce",
                      "comm_deregister",       "comm_finalize", "comm_destroy"};
    if (rank == 0) {
      expected.insert(expected.begin(), "get_unique_id");
    }
    EXPECT_EQ(world.nccl(rank).calls(), expected);
  });
  world.expect_no_misuse();
}

TEST(NcclEnd, WaitsForOperationsThatNobodyWaitedFor) {
  World world(2);
  run_ranks(2, [&](int rank, ThreadWorld& threads) {
    const at::Tensor tensor = ones(4);
    WorkPtr work;
    {
      const CommunicatorPtr everyone = world.connect(threads, world_of(2, rank));
      if (rank == 1) {
        std::this_thread::sleep_for(milliseconds(50));
      }
      work = everyone->all_reduce(tensor);
    }
    EXPECT_TRUE(work->test());
    work->wait();
    EXPECT_TRUE(all_equal(tensor, 2));
    EXPECT_EQ(world.nccl(rank).count("comm_abort"), 0);
  });
  world.expect_no_misuse();
}

// ---- parts, groups, memory

TEST(NcclSplit, TheWholeGroupSplitsByNcclASmallerPartByANewId) {
  World world(3);
  run_ranks(3, [&](int rank, ThreadWorld& threads) {
    const CommunicatorPtr everyone = world.connect(threads, world_of(3, rank));
    Group turned = world_of(3, rank, {2, 0, 1});
    turned.name = "turned";
    const CommunicatorPtr again = everyone->split(turned);
    EXPECT_EQ(world.nccl(rank).count("comm_split"), 1);
    EXPECT_EQ(world.nccl(rank).count("comm_init_rank_config"), 1);
    const at::Tensor whole = at::zeros({3}, at::kInt);
    again->all_gather(whole, at::full({1}, rank, at::kInt))->wait();
    EXPECT_EQ(whole.select(0, 0).item().toInt(), 1);
    EXPECT_EQ(whole.select(0, 2).item().toInt(), 0);
    if (rank < 2) {
      const CommunicatorPtr pair = everyone->split({"pair", {0, 1}, rank, {}});
      pair->barrier();
      EXPECT_EQ(world.nccl(rank).count("comm_split"), 1);
      EXPECT_EQ(world.nccl(rank).count("comm_init_rank_config"), 2);
    }
  });
  world.expect_no_misuse();
}

TEST(NcclSplit, MemoryIsRegisteredWithAllPartsWhicheverCameFirst) {
  World world(2);
  run_ranks(2, [&](int rank, ThreadWorld& threads) {
    const CommunicatorPtr everyone = world.connect(threads, world_of(2, rank));
    Group group = world_of(2, rank);
    group.name = "early";
    const CommunicatorPtr early = everyone->split(group);
    everyone->register_memory(ones(16));
    EXPECT_EQ(world.nccl(rank).count("comm_register"), 2);
    group.name = "late";
    const CommunicatorPtr late = everyone->split(group);
    EXPECT_EQ(world.nccl(rank).count("comm_register"), 3);
  });
  world.expect_no_misuse();
}

TEST(NcclSplit, BeforeNccl219MemoryIsOrdinaryAndNotRegistered) {
  World world(2);
  for (FakeNcclFaults& faults : world.faults) {
    faults.version = NCCL_VERSION(2, 18, 3);
  }
  run_ranks(2, [&](int rank, ThreadWorld& threads) {
    const CommunicatorPtr everyone = world.connect(threads, world_of(2, rank));
    const at::Tensor memory = everyone->allocate(64);
    EXPECT_TRUE(all_equal(memory, 0));
    everyone->register_memory(memory);
    EXPECT_EQ(world.nccl(rank).count("mem_alloc"), 0);
    EXPECT_EQ(world.nccl(rank).count("comm_register"), 0);
  });
}

TEST(NcclGroupCalls, OperationsOfAGroupAreOneLaunch) {
  World world(2);
  run_ranks(2, [&](int rank, ThreadWorld& threads) {
    const CommunicatorPtr everyone = world.connect(threads, world_of(2, rank));
    const at::Tensor sum = ones(4);
    const at::Tensor low = ones(4, at::kBFloat16);
    const at::Tensor whole = at::zeros({4});
    everyone->group_begin();
    const WorkPtr first = everyone->all_reduce(sum);
    const WorkPtr second = everyone->all_reduce(low);
    const WorkPtr third = everyone->all_gather(whole, at::full({2}, rank + 1.0));
    EXPECT_FALSE(first->test());
    expect_words(error_of<ScheduleError>([&] { first->wait(); }), {"before group_end()"});
    everyone->group_end();
    third->wait();
    second->wait();
    first->wait();
    EXPECT_TRUE(all_equal(sum, 2));
    EXPECT_TRUE(all_equal(low, 2));
    EXPECT_TRUE(all_equal(whole.narrow(0, 2, 2), 2));
    const Calls calls = world.nccl(rank).calls();
    const Calls launches(calls.end() - 5, calls.end());
    EXPECT_EQ(launches,
              (Calls{"group_start", "all_reduce", "all_reduce", "all_gather", "group_end"}));
    everyone->group_begin();
    everyone->group_end();  // Nothing to launch.
    EXPECT_EQ(world.nccl(rank).calls(), calls);
    EXPECT_THROW(everyone->group_end(), ScheduleError);
  });
  world.expect_no_misuse();
}

TEST(NcclSums, NativeOnesAreRoundedAtEveryAddition) {
  for (const bool native : {false, true}) {
    World world(5);
    world.options.native_low_precision_sums = native;
    run_ranks(5, [&](int rank, ThreadWorld& threads) {
      const CommunicatorPtr everyone = world.connect(threads, world_of(5, rank));
      // In bf16 256 + 1 is 256 again.
      const at::Tensor tensor = at::full({3}, rank == 0 ? 256.0 : 1.0, at::kBFloat16);
      everyone->all_reduce(tensor)->wait();
      EXPECT_TRUE(all_equal(tensor, native ? 256 : 260));
    });
  }
}

// ---- streams

TEST(NcclStreams, WaitOrdersTheCallersStreamAndDoesNotBlockTheHost) {
  World world(2);
  world.has_streams = true;
  std::atomic<int> num_looked = 0;
  run_ranks(2, [&](int rank, ThreadWorld& threads) {
    const CommunicatorPtr everyone = world.connect(threads, world_of(2, rank));
    hopshard::detail::DeviceStream& current = world.device(rank).current_stream();
    const at::Tensor tensor = at::zeros({4});
    at::Tensor seen = at::zeros({4});
    // The inputs are only there once both hosts have looked at their works below.
    current.run([&] {
      while (num_looked < 2) {
        std::this_thread::yield();
      }
      tensor.fill_(rank + 1);
    });
    const WorkPtr work = everyone->all_reduce(tensor);
    work->wait();
    EXPECT_FALSE(work->test());
    current.run([&] { seen.copy_(tensor); });
    const auto end = current.record();
    ++num_looked;
    while (!end->is_done()) {
      std::this_thread::yield();
    }
    EXPECT_TRUE(all_equal(seen, 3));
    everyone->barrier();
    EXPECT_TRUE(work->test());
  });
  world.expect_no_misuse();
}

TEST(NcclStreams, ATimeLimitEndsAHangThatTheHostDoesNotWaitFor) {
  World world(2);
  world.has_streams = true;
  world.timeout = milliseconds(100);
  world.faults[1].hang_at = 0;
  run_ranks(2, [&](int rank, ThreadWorld& threads) {
    const CommunicatorPtr everyone = world.connect(threads, world_of(2, rank));
    const WorkPtr work = everyone->all_reduce(ones(4));
    work->wait();
    const auto end = world.device(rank).current_stream().record();
    while (!end->is_done()) {  // As a host that waits for its GPU.
      std::this_thread::sleep_for(milliseconds(1));
    }
    expect_words(error_of<CommError>([&] { everyone->all_reduce(ones(4))->wait(); }),
                 {"unusable since an earlier failure", "did not finish within the 100 ms"});
    EXPECT_THROW(work->wait(), CommError);
    EXPECT_EQ(world.nccl(rank).count("comm_abort"), 1);
  });
  world.expect_no_misuse();
}

}  // namespace
}  // namespace hopshard::testing
