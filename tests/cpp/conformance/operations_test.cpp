// What every backend must do with good arguments.
#include <algorithm>
#include <tuple>

#include "backends.hpp"
#include "support/thread_world.hpp"

namespace hopshard::testing {
namespace {

class Operations : public ::testing::TestWithParam<std::tuple<Backend, int, std::int64_t>> {
 protected:
  [[nodiscard]] int size() const { return std::get<1>(GetParam()); }
  [[nodiscard]] std::int64_t numel() const { return std::get<2>(GetParam()); }

  /// Runs `check(communicator)` on all ranks, for all choices of slots.
  template <typename Check>
  void on_all_ranks(Check check) const {
    for (const auto& slots : slot_choices(size())) {
      run_ranks(size(), [&](int rank, LocalHub& hub) {
        const Group group = world_of(size(), rank, slots);
        const CommunicatorPtr communicator = std::get<0>(GetParam()).make(hub, group);
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

// Several blocks and a rest. Sanitizers make every element of the loops here far more expensive.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::int64_t kLargeNumel = 2048 + 1;
#else
constexpr std::int64_t kLargeNumel = 65536 + 1;
#endif

INSTANTIATE_TEST_SUITE_P(Conformance, Operations,
                         ::testing::Combine(::testing::ValuesIn(conforming_backends()),
                                            ::testing::Values(1, 2, 4, 7),
                                            ::testing::Values(0, 1, 3, 100, kLargeNumel)),
                         name_of);

class Groups : public ::testing::TestWithParam<Backend> {};

TEST_P(Groups, SubGroupsAndSeveralGroupsPerRankWorkAtOnce) {
  // 2 x 3 ranks as a grid: each rank is in the group of its row and the group of its column.
  run_ranks(6, [&](int rank, LocalHub& hub) {
    const int row = rank / 3;
    const int column = rank % 3;
    const Group row_group{"row", {row * 3, row * 3 + 1, row * 3 + 2}, column, {2, 0, 1}};
    const Group column_group{"column", {column, column + 3}, row, {}};
    const CommunicatorPtr in_row = GetParam().make(hub, row_group);
    const CommunicatorPtr in_column = GetParam().make(hub, column_group);
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
  run_ranks(4, [&](int rank, LocalHub& hub) {
    const CommunicatorPtr world = GetParam().make(hub, world_of(4, rank));
    std::this_thread::sleep_for(std::chrono::milliseconds(5 * rank));
    ++num_arrived;
    world->barrier();
    EXPECT_EQ(num_arrived, 4);
  });
}

TEST_P(Groups, LowPrecisionSumsAreTakenInFp32) {
  // In bf16 256 + 1 is 256 again, so a sum that rounds on the way gives 256, not 260.
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const std::int64_t big = dtype == at::kBFloat16 ? 256 : 2048;
    run_ranks(5, [&](int rank, LocalHub& hub) {
      const CommunicatorPtr world = GetParam().make(hub, world_of(5, rank));
      const auto fill = [&](auto) { return rank == 0 ? big : 1; };
      const at::Tensor tensor = make_tensor(3, dtype, fill);
      world->all_reduce(tensor)->wait();
      expect_equal(tensor, [&](auto) { return big + 4; });
      const at::Tensor input = make_tensor(10, dtype, fill);
      const at::Tensor output = make_tensor(2, dtype, fill);
      world->reduce_scatter(output, input)->wait();
      expect_equal(output, [&](auto) { return big + 4; });
    });
  }
}

TEST_P(Groups, DroppedWorksAreWaitedForAndDoNotThrow) {
  run_ranks(3, [&](int rank, LocalHub& hub) {
    const CommunicatorPtr world = GetParam().make(hub, world_of(3, rank));
    const at::Tensor tensor = make_tensor(100, at::kFloat, [&](auto) { return rank; });
    { const WorkPtr dropped = world->all_reduce(tensor); }
    expect_equal(tensor, [](auto) { return 3; });
  });
}

INSTANTIATE_TEST_SUITE_P(Conformance, Groups, ::testing::ValuesIn(conforming_backends()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace hopshard::testing
