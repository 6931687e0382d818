// What every backend must do with good arguments.
#include <algorithm>
#include <array>
#include <atomic>
#include <thread>
#include <tuple>

#include "backends.hpp"
#include "hopshard/core/error.hpp"

namespace hopshard::testing {
namespace {

class Operations : public ::testing::TestWithParam<std::tuple<Backend, int, std::int64_t>> {
 protected:
  [[nodiscard]] int size() const { return std::get<1>(GetParam()); }
  [[nodiscard]] std::int64_t numel() const { return std::get<2>(GetParam()); }

  /// Runs `check(communicator)` on all ranks, for all choices of slots.
  template <typename Check>
  void on_all_ranks(Check check) const {
    if (size() > std::get<0>(GetParam()).max_ranks) {
      return;
    }
    for (const auto& slots : slot_choices(size())) {
      run_ranks(size(), [&](int rank, ThreadWorld& world) {
        const Group group = world_of(size(), rank, slots);
        const CommunicatorPtr communicator = std::get<0>(GetParam()).make(world, group);
        check(*communicator);
      });
    }
  }

  /// The member that owns each slot.
  static std::vector<int> owners(const Group& group) {
    std::vector<int> owner(static_cast<std::size_t>(group.size()));
    for (int member = 0; member < group.size(); ++member) {
      owner[static_cast<std::size_t>(group.slot_of(member))] = member;
    }
    return owner;
  }
};

TEST_P(Operations, AllGatherPutsEveryInputAtItsSlot) {
  on_all_ranks([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const Group& group = communicator.group();
    const std::vector<int> owner = owners(group);
    for (const at::ScalarType dtype : all_dtypes()) {
      for (const bool in_place : {false, true}) {
        SCOPED_TRACE(::testing::Message() << dtype << (in_place ? " in place" : ""));
        at::Tensor output = make_tensor(numel() * size(), dtype, [](auto) { return 99; });
        const at::Tensor values =
            make_tensor(numel(), dtype, [&](std::int64_t i) { return value_of(rank, i); });
        at::Tensor input = values;
        if (in_place) {
          input = output.narrow(0, group.my_slot() * numel(), numel());
          input.copy_(values);
        }
        communicator.all_gather(output, input, {.timeout = {}, .tag = "unshard/x"})->wait();
        expect_equal(output, [&](std::int64_t i) {
          const auto slot = static_cast<std::size_t>(i / numel());
          return in_dtype(value_of(owner[slot], i % numel()), dtype);
        });
      }
    }
  });
}

TEST_P(Operations, ReduceScatterKeepsMySlotOfTheResult) {
  on_all_ranks([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const Group& group = communicator.group();
    for (const at::ScalarType dtype : numeric_dtypes()) {
      for (const bool in_place : {false, true}) {
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
          SCOPED_TRACE(::testing::Message() << dtype << (in_place ? " in place" : "")
                                            << (op == ReduceOp::kSum ? " sum" : " max"));
          const at::Tensor input = make_tensor(numel() * size(), dtype,
                                               [&](std::int64_t i) { return value_of(rank, i); });
          const std::int64_t begin = group.my_slot() * numel();
          const at::Tensor output = in_place ? input.narrow(0, begin, numel())
                                             : make_tensor(numel(), dtype, [](auto) { return 99; });
          communicator.reduce_scatter(output, input, op)->wait();
          expect_equal(output, [&](std::int64_t i) {
            std::int64_t expected = 0;
            for (int member = 0; member < size(); ++member) {
              const std::int64_t value = value_of(member, begin + i);
              expected = op == ReduceOp::kSum ? expected + value : std::max(expected, value);
            }
            return expected;
          });
        }
      }
    }
  });
}

TEST_P(Operations, ReduceScatterAccumulates) {
  on_all_ranks([&](Communicator& communicator) {
    const std::int64_t begin = communicator.group().my_slot() * numel();
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kInt}) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
        SCOPED_TRACE(::testing::Message() << dtype << (op == ReduceOp::kSum ? " sum" : " max"));
        const at::Tensor input = make_tensor(numel() * size(), dtype, [&](std::int64_t i) {
          return value_of(communicator.rank(), i);
        });
        const at::Tensor output = make_tensor(numel(), dtype, [](auto i) { return i % 8; });
        communicator
            .reduce_scatter(output, input, op, {.timeout = {}, .tag = "sum", .accumulate = true})
            ->wait();
        expect_equal(output, [&](std::int64_t i) {
          std::int64_t expected = i % 8;
          for (int member = 0; member < size(); ++member) {
            const std::int64_t value = value_of(member, begin + i);
            expected = op == ReduceOp::kSum ? expected + value : std::max(expected, value);
          }
          return expected;
        });
      }
    }
  });
}

TEST_P(Operations, AllReduceGivesAllRanksTheResult) {
  on_all_ranks([&](Communicator& communicator) {
    for (const at::ScalarType dtype : numeric_dtypes()) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
        SCOPED_TRACE(::testing::Message() << dtype << (op == ReduceOp::kSum ? " sum" : " max"));
        const at::Tensor tensor = make_tensor(
            numel(), dtype, [&](std::int64_t i) { return value_of(communicator.rank(), i); });
        communicator.all_reduce(tensor, op)->wait();
        expect_equal(tensor, [&](std::int64_t i) {
          std::int64_t expected = 0;
          for (int member = 0; member < size(); ++member) {
            const std::int64_t value = value_of(member, i);
            expected = op == ReduceOp::kSum ? expected + value : std::max(expected, value);
          }
          return expected;
        });
      }
    }
  });
}

TEST_P(Operations, BroadcastCopiesTheRootsTensor) {
  on_all_ranks([&](Communicator& communicator) {
    for (const at::ScalarType dtype : all_dtypes()) {
      for (int root = 0; root < size(); ++root) {
        SCOPED_TRACE(::testing::Message() << dtype << " root " << root);
        const at::Tensor tensor = make_tensor(
            numel(), dtype, [&](std::int64_t i) { return value_of(communicator.rank(), i); });
        communicator.broadcast(tensor, root)->wait();
        expect_equal(tensor, [&](std::int64_t i) { return in_dtype(value_of(root, i), dtype); });
      }
    }
  });
}

TEST_P(Operations, WorksCompleteInAnyOrder) {
  on_all_ranks([&](Communicator& communicator) {
    const auto fill = [&](std::int64_t i) { return value_of(communicator.rank(), i); };
    const at::Tensor first = make_tensor(numel(), at::kFloat, fill);
    const at::Tensor second = make_tensor(numel(), at::kFloat, fill);
    WorkPtr first_work = communicator.broadcast(first, 0);
    WorkPtr second_work = communicator.all_reduce(second, ReduceOp::kMax);
    if (communicator.rank() % 2 == 0) {
      std::swap(first_work, second_work);
    }
    first_work->wait();
    second_work->wait();
    second_work->wait();
    expect_equal(first, [](std::int64_t i) { return value_of(0, i); });
  });
}

std::string name_of(const ::testing::TestParamInfo<Operations::ParamType>& info) {
  return std::get<0>(info.param).name + "_ranks" + std::to_string(std::get<1>(info.param)) +
         "_numel" + std::to_string(std::get<2>(info.param));
}

// The largest is several blocks and a rest. Sanitizers make every element far more expensive.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::array kSizes = {2, 4};
constexpr std::array<std::int64_t, 3> kNumels = {0, 3, 2048 + 1};
#else
constexpr std::array kSizes = {1, 2, 4, 7};
constexpr std::array<std::int64_t, 5> kNumels = {0, 1, 3, 100, 65536 + 1};
#endif

INSTANTIATE_TEST_SUITE_P(Conformance, Operations,
                         ::testing::Combine(::testing::ValuesIn(conforming_backends()),
                                            ::testing::ValuesIn(kSizes),
                                            ::testing::ValuesIn(kNumels)),
                         name_of);

class Groups : public ::testing::TestWithParam<Backend> {};

TEST_P(Groups, SubGroupsAndSeveralGroupsPerRankWorkAtOnce) {
  // 2 x 3 ranks as a grid: each rank is in the group of its row and the group of its column.
  if (!GetParam().takes_any_group) {
    return;
  }
  run_ranks(6, [&](int rank, ThreadWorld& world) {
    const int row = rank / 3;
    const int column = rank % 3;
    const Group row_group{"row", {row * 3, row * 3 + 1, row * 3 + 2}, column, {2, 0, 1}};
    const Group column_group{"column", {column, column + 3}, row, {}};
    const CommunicatorPtr in_row = GetParam().make(world, row_group);
    const CommunicatorPtr in_column = GetParam().make(world, column_group);
    for (int round = 0; round < 20; ++round) {
      const at::Tensor sum = make_tensor(5, at::kFloat, [&](auto) { return rank + round; });
      const at::Tensor part =
          make_tensor(5, at::kLong, [&](std::int64_t i) { return rank * 10 + i; });
      const at::Tensor whole = make_tensor(15, at::kLong, [](auto) { return -1; });
      // Odd ranks wait the other way round: no backend may need one order over its groups.
      WorkPtr reduce = in_column->all_reduce(sum);
      WorkPtr gather = in_row->all_gather(whole, part);
      if (rank % 2 == 1) {
        gather->wait();
      }
      reduce->wait();
      gather->wait();
      expect_equal(sum, [&](auto) { return column * 2 + 3 + 2 * round; });
      expect_equal(whole, [&](std::int64_t i) {
        const std::int64_t owner[] = {1, 2, 0};  // Slots {2, 0, 1} turned round.
        return (row * 3 + owner[i / 5]) * 10 + i % 5;
      });
    }
  });
}

TEST_P(Groups, ABarrierHoldsEverybodyBack) {
  std::atomic<int> num_arrived = 0;
  run_ranks(4, [&](int rank, ThreadWorld& world) {
    const CommunicatorPtr everyone = GetParam().make(world, world_of(4, rank));
    std::this_thread::sleep_for(std::chrono::milliseconds(5 * rank));
    ++num_arrived;
    everyone->barrier();
    EXPECT_EQ(num_arrived, 4);
  });
}

TEST_P(Groups, LowPrecisionSumsAreTakenInFp32) {
  // In bf16 256 + 1 is 256 again, so a sum that rounds on the way gives 256, not 260.
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const std::int64_t big = dtype == at::kBFloat16 ? 256 : 2048;
    run_ranks(GetParam().takes_any_group ? 5 : 4, [&](int rank, ThreadWorld& world) {
      const CommunicatorPtr everyone = GetParam().make(world, world_of(world.world_size(), rank));
      const auto fill = [&](auto) { return rank == 0 ? big : 1; };
      const at::Tensor tensor = make_tensor(3, dtype, fill);
      everyone->all_reduce(tensor)->wait();
      expect_equal(tensor, [&](auto) { return big + everyone->size() - 1; });
      const at::Tensor input = make_tensor(2 * everyone->size(), dtype, fill);
      const at::Tensor output = make_tensor(2, dtype, fill);
      everyone->reduce_scatter(output, input)->wait();
      expect_equal(output, [&](auto) { return big + everyone->size() - 1; });
    });
  }
}

TEST_P(Groups, PartsAreSplitFromAGroup) {
  run_ranks(4, [&](int rank, ThreadWorld& world) {
    const CommunicatorPtr everyone = GetParam().make(world, world_of(4, rank));
    if (!GetParam().takes_any_group) {
      return;
    }
    const int half = rank / 2;
    const CommunicatorPtr in_half =
        everyone->split({"half", {half * 2, half * 2 + 1}, rank % 2, {1, 0}});
    EXPECT_EQ(in_half->backend(), everyone->backend());
    const CommunicatorPtr alone = everyone->split({"alone", {rank}, 0, {}});
    const CommunicatorPtr outer =
        rank == 0 || rank == 3 ? everyone->split({"outer", {0, 3}, rank / 3, {}}) : nullptr;
    const at::Tensor whole = make_tensor(6, at::kFloat, [](auto) { return -1; });
    const at::Tensor part = make_tensor(3, at::kFloat, [&](auto) { return rank; });
    in_half->all_gather(whole, part)->wait();
    expect_equal(whole, [&](auto i) { return half * 2 + (i < 3 ? 1 : 0); });
    alone->all_reduce(part)->wait();
    expect_equal(part, [&](auto) { return rank; });
    if (outer) {
      outer->all_reduce(part)->wait();
      expect_equal(part, [](auto) { return 3; });
    }
    EXPECT_THROW(static_cast<void>(everyone->split({"no", {rank, 4}, 0, {}})), InvalidArgument);
    EXPECT_THROW(static_cast<void>(everyone->split({"no", {(rank + 1) % 4}, 0, {}})),
                 InvalidArgument);
    everyone->barrier();
  });
}

TEST_P(Groups, AllocatedMemoryIsZeroAndWorksInAnyPlace) {
  run_ranks(4, [&](int rank, ThreadWorld& world) {
    const CommunicatorPtr everyone = GetParam().make(world, world_of(4, rank));
    const std::int64_t numel = 1000;
    at::Tensor memory = everyone->allocate(4 * (2 * 4 * numel + 3));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.const_data_ptr()) % 128, 0U);
    const at::Tensor floats = memory.view(at::kFloat);
    memory = at::Tensor();  // Its views keep it.
    expect_equal(floats, [](auto) { return 0; });
    everyone->register_memory(floats);
    // Each rank uses another place of its memory; one rank's input is in ordinary memory.
    const at::Tensor whole = floats.narrow(0, rank, 4 * numel);
    at::Tensor input = floats.narrow(0, 4 * numel + 3, 4 * numel);
    const auto fill = [&](std::int64_t i) { return value_of(rank, i); };
    input.copy_(make_tensor(4 * numel, at::kFloat, fill));
    if (rank == 1) {
      input = input.clone();
    }
    everyone->all_gather(whole, input.narrow(0, 0, numel))->wait();
    expect_equal(whole, [&](auto i) { return value_of(static_cast<int>(i / numel), i % numel); });
    everyone->reduce_scatter(whole.narrow(0, 0, numel), input)->wait();
    expect_equal(whole.narrow(0, 0, numel), [&](auto i) {
      std::int64_t sum = 0;
      for (int member = 0; member < 4; ++member) {
        sum += value_of(member, rank * numel + i);
      }
      return sum;
    });
    EXPECT_THROW(static_cast<void>(everyone->allocate(-1)), InvalidArgument);
    expect_equal(everyone->allocate(0), [](auto) { return 0; });
    everyone->barrier();
  });
}

TEST_P(Groups, TestTellsWhenAWorkIsDone) {
  run_ranks(2, [&](int rank, ThreadWorld& world) {
    const CommunicatorPtr everyone = GetParam().make(world, world_of(2, rank));
    const at::Tensor tensor = make_tensor(100, at::kFloat, [&](auto) { return rank + 1; });
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
    }
    const WorkPtr work = everyone->all_reduce(tensor);
    // It goes on without anybody in wait().
    while (!work->test()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    work->wait();
    EXPECT_TRUE(work->test());
    expect_equal(tensor, [](auto) { return 3; });
  });
}

TEST_P(Groups, AWaitForOneGroupDoesNotHoldUpAnother) {
  // Rank 0 waits for the pair first, rank 1 for everybody first; both must end.
  run_ranks(2, [&](int rank, ThreadWorld& world) {
    const CommunicatorPtr one = GetParam().make(world, world_of(2, rank));
    Group other_group = world_of(2, rank);
    other_group.name = "other";
    const CommunicatorPtr other = GetParam().make(world, other_group);
    for (int round = 0; round < 50; ++round) {
      const at::Tensor whole = make_tensor(20'000, at::kInt, [](auto) { return 0; });
      const at::Tensor part = make_tensor(10'000, at::kInt, [&](auto) { return rank + 1; });
      const WorkPtr gather = one->all_gather(whole, part);
      if (rank == 0) {
        gather->wait();  // Rank 1 does not look at `one` before `other` is through.
      }
      other->barrier();
      gather->wait();
      expect_equal(whole, [](auto i) { return 1 + i / 10'000; });
    }
  });
}

TEST_P(Groups, ThousandOperationsInFlightKeepTheirOrder) {
  run_ranks(4, [&](int rank, ThreadWorld& world) {
    const CommunicatorPtr everyone = GetParam().make(world, world_of(4, rank));
    std::vector<at::Tensor> tensors;
    std::vector<WorkPtr> works;
    for (int call = 0; call < 1000; ++call) {
      tensors.push_back(make_tensor(7, at::kInt, [&](auto i) { return rank * call + i; }));
      works.push_back(everyone->all_reduce(tensors.back()));
      if (call % 100 == 99) {
        for (const WorkPtr& work : works) {
          work->wait();
        }
        works.clear();
      }
    }
    for (int call = 0; call < 1000; ++call) {
      expect_equal(tensors[static_cast<std::size_t>(call)],
                   [&](auto i) { return 6 * call + 4 * i; });
    }
  });
}

TEST_P(Groups, DroppedWorksAreWaitedForAndDoNotThrow) {
  run_ranks(4, [&](int rank, ThreadWorld& world) {
    const CommunicatorPtr everyone = GetParam().make(world, world_of(4, rank));
    const at::Tensor tensor = make_tensor(100, at::kFloat, [&](auto) { return rank; });
    { const WorkPtr dropped = everyone->all_reduce(tensor); }
    expect_equal(tensor, [](auto) { return 6; });
  });
}

INSTANTIATE_TEST_SUITE_P(Conformance, Groups, ::testing::ValuesIn(conforming_backends()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace hopshard::testing
