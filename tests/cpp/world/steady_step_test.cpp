// A step that has learned its order allocates no tensor memory beside what the same computation
// does without an engine (D3). An executable of its own: it replaces torch's CPU allocator and
// `operator new`.
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <new>
#include <span>

#include "hopshard/comm/registry.hpp"
#include "hopshard/optim/sgd.hpp"
#include "training_world.hpp"

namespace {

/// Of one thread.
struct Counts {
  std::int64_t num_tensors = 0;
  std::int64_t tensor_bytes = 0;
  std::int64_t num_new = 0;  ///< Calls of `operator new`: small objects of torch, strings.
};
thread_local Counts counts_here;
thread_local bool is_rank_thread = false;
std::atomic<std::int64_t> num_tensors_elsewhere{0};

}  // namespace

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
// The other forms of new and delete end in these.
void* operator new(std::size_t num_bytes) {
  ++counts_here.num_new;
  if (void* const memory = std::malloc(num_bytes > 0 ? num_bytes : 1)) {
    return memory;
  }
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t /*num_bytes*/) noexcept { std::free(memory); }
#endif

namespace hopshard::testing {
namespace {

class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator& inner) : inner_(inner) {}

  c10::DataPtr allocate(std::size_t num_bytes) override {
    if (num_bytes > 0 && is_rank_thread) {
      ++counts_here.num_tensors;
      counts_here.tensor_bytes += static_cast<std::int64_t>(num_bytes);
    } else if (num_bytes > 0) {
      ++num_tensors_elsewhere;
    }
    return inner_.allocate(num_bytes);
  }
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override { return inner_.raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    inner_.copy_data(to, from, num_bytes);
  }

 private:
  c10::Allocator& inner_;
};

constexpr int kWorld = 4;
constexpr int kSteps = 6;
constexpr int kFirstSteadyStep = 2;  // The steps before it learn the order and fill the pool.
constexpr SgdSettings kSgd{.lr = 1.0 / 1024};

using CountsOfSteps = std::array<Counts, kSteps>;

struct Case {
  int degree = 1;
  int num_passes = 1;
  const char* transport = "local";
  EngineOptions options = {};
  const char* name = "";  ///< Of the options.
};

std::ostream& operator<<(std::ostream& out, const Case& tested) {
  return out << "degree " << tested.degree << ", " << tested.num_passes << " passes, "
             << tested.transport << tested.name;
}

void sgd(const at::Tensor& weight, const at::Tensor& gradient) {
  const auto numel = static_cast<std::size_t>(weight.numel());
  sgd_step(std::span(weight.mutable_data_ptr<float>(), numel),
           std::span(gradient.const_data_ptr<float>(), numel), std::span<float>(), kSgd,
           /*first_step=*/false);
}

template <typename Step>
CountsOfSteps count_steps(Step run_step) {
  CountsOfSteps counts;
  for (int step = 0; step < kSteps; ++step) {
    const Counts before = counts_here;
    run_step(step);
    const Counts after = counts_here;
    counts[static_cast<std::size_t>(step)] = {
        .num_tensors = after.num_tensors - before.num_tensors,
        .tensor_bytes = after.tensor_bytes - before.tensor_bytes,
        .num_new = after.num_new - before.num_new};
  }
  return counts;
}

CountsOfSteps train_plainly(int rank, int num_passes) {
  const Model model(rank);
  return count_steps([&](int step) {
    for (int pass = 0; pass < num_passes; ++pass) {
      const at::Tensor output =
          model.forward(input_of(rank, step, pass), all_units(rank, step, pass));
      loss_of(output, rank, step, pass).backward();
    }
    for (const at::Tensor& parameter : model.parameters()) {
      if (parameter.requires_grad()) {
        sgd(parameter, parameter.grad());
        parameter.mutable_grad().reset();
      }
    }
  });
}

CommunicatorPtr connect(ThreadWorld& world, const std::string& transport, const Group& group) {
  if (transport == "local") {
    return world.communicator(group);
  }
  std::string prefix = group.name;
  for (const int rank : group.ranks) {
    prefix += detail::concatenate("/", rank);
  }
  return connect_backend(transport, {.store = make_prefix_store(world.store(), prefix),
                                     .group = group,
                                     .timeout = std::chrono::seconds(30)});
}

CountsOfSteps train_sharded(int rank, ThreadWorld& world, const Case& tested) {
  const Model model(rank);
  EngineOptions options = tested.options;
  options.backward_passes_per_step = tested.num_passes;
  ShardEngine engine(model.units,
                     make_process_groups(GroupLayout(kWorld, 2, tested.degree), rank,
                                         [&](const Group& group) {
                                           return connect(world, tested.transport, group);
                                         }),
                     options);
  std::vector<at::Tensor> handles;
  for (const ParameterPlace& place : engine.store().parameters()) {
    handles.push_back(place.is_trainable ? at::empty({0}) : at::Tensor());
  }
  engine.set_gradient_handles(handles);

  std::int64_t pool_allocations = 0;
  const CountsOfSteps counts = count_steps([&](int step) {
    for (int pass = 0; pass < tested.num_passes; ++pass) {
      const at::Tensor output =
          model.forward(engine, input_of(rank, step, pass), all_units(rank, step, pass));
      loss_of(output, rank, step, pass).backward();
    }
    EXPECT_TRUE(engine.finish_gradients());
    const std::vector<at::Tensor>& gradients = engine.gradient_arenas();
    for (std::size_t arena = 0; arena < gradients.size(); ++arena) {
      sgd(engine.store().arenas()[arena], gradients[arena]);
    }
    engine.end_step(/*stepped=*/true);
    engine.zero_gradients();
    const EngineStatistics statistics = engine.statistics();
    if (step >= kFirstSteadyStep) {
      EXPECT_EQ(statistics.pool_allocations, pool_allocations) << "in step " << step;
    }
    pool_allocations = statistics.pool_allocations;
    EXPECT_EQ(statistics.num_deviations, 0);
  });
  EXPECT_GT(pool_allocations, 0);
  return counts;
}

class SteadyStep : public ::testing::TestWithParam<Case> {
 protected:
  static void SetUpTestSuite() {
    static CountingAllocator counting(*c10::GetCPUAllocator());
    c10::SetCPUAllocator(&counting);
  }
};

TEST_P(SteadyStep, AllocatesWhatThePlainComputationDoes) {
  const Case& tested = GetParam();
  for (const BackendInfo& backend : backends()) {
    if (backend.name == tested.transport && backend.why_not) {
      GTEST_SKIP() << backend.name << ": " << *backend.why_not;
    }
  }
  std::array<CountsOfSteps, kWorld> plain;
  std::array<CountsOfSteps, kWorld> sharded;
  num_tensors_elsewhere = 0;
  run_ranks(kWorld, [&](int rank, ThreadWorld& world) {
    is_rank_thread = true;
    plain[static_cast<std::size_t>(rank)] = train_plainly(rank, tested.num_passes);
    sharded[static_cast<std::size_t>(rank)] = train_sharded(rank, world, tested);
  });
  EXPECT_EQ(num_tensors_elsewhere, 0) << "threads of the transport";
  for (std::size_t rank = 0; rank < kWorld; ++rank) {
    for (std::size_t step = kFirstSteadyStep; step < kSteps; ++step) {
      const Counts& without = plain[rank][step];
      const Counts& with = sharded[rank][step];
      EXPECT_GT(without.num_tensors, 0) << "nothing is counted";
      EXPECT_EQ(with.num_tensors, without.num_tensors) << "rank " << rank << ", step " << step;
      EXPECT_EQ(with.tensor_bytes, without.tensor_bytes) << "rank " << rank << ", step " << step;
    }
  }
  // Objects without data are not promised to be none.
  RecordProperty("num_new_plain", std::to_string(plain[0].back().num_new));
  RecordProperty("num_new_sharded", std::to_string(sharded[0].back().num_new));
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const char* const transport : {"local", "shm"}) {
    for (const int degree : {1, 2, 4}) {
      for (const int num_passes : {1, 2}) {
        all.push_back({.degree = degree, .num_passes = num_passes, .transport = transport});
      }
    }
  }
  EngineOptions options;
  options.reduce_dtype = at::kBFloat16;
  all.push_back({.degree = 2, .num_passes = 2, .options = options, .name = "_bf16_wire"});
  options.reduce_dtype = at::kHalf;
  all.push_back({.degree = 2, .num_passes = 2, .options = options, .name = "_fp16_wire"});
  options = {};
  options.reshard_after_forward = false;
  options.second_hop_bucket_bytes = 256;
  all.push_back({.degree = 2, .num_passes = 2, .options = options, .name = "_stays"});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Worlds, SteadyStep, ::testing::ValuesIn(cases()), [](const auto& tested) {
  return detail::concatenate("p", tested.param.degree, "_passes", tested.param.num_passes, "_",
                             tested.param.transport, tested.param.name);
});

}  // namespace
}  // namespace hopshard::testing
