// Sizes that do not fit into caches, shared segments of a default size or 32-bit counts.
#include <ATen/ops/empty.h>

#include <fstream>

#include "backends.hpp"

namespace hopshard::testing {
namespace {

constexpr std::int64_t kMib = std::int64_t{1} << 20;

class Large : public ::testing::TestWithParam<Backend> {};

TEST_P(Large, MegabytesArriveWhole) {
  const int size = 4;
  for (const std::int64_t mib : {1, 64}) {
    run_ranks(size, [&](int rank, ThreadWorld& world) {
      const CommunicatorPtr everyone = GetParam().make(world, world_of(size, rank));
      for (const bool allocated : {true, false}) {
        SCOPED_TRACE(::testing::Message() << mib << " MiB" << (allocated ? " allocated" : ""));
        const std::int64_t numel = mib * kMib / 4;
        const auto make = [&](std::int64_t count) {
          return allocated ? everyone->allocate(count * 4).view(at::kInt)
                           : at::empty({count}, at::kInt);
        };
        const at::Tensor input = make(numel);
        const auto fill = [&](std::int64_t salt) {
          auto* data = input.mutable_data_ptr<std::int32_t>();
          for (std::int64_t i = 0; i < numel; ++i) {
            data[i] = static_cast<std::int32_t>(i * 7 + salt);
          }
        };
        fill(rank);
        const at::Tensor sum = make(numel / size);
        everyone->reduce_scatter(sum, input)->wait();
        const std::int64_t begin = numel / size * rank;
        const auto* sums = sum.const_data_ptr<std::int32_t>();
        std::int64_t num_wrong = 0;
        for (std::int64_t i = 0; i < numel / size; ++i) {
          num_wrong += sums[i] != static_cast<std::int32_t>(size * (begin + i) * 7 + 6) ? 1 : 0;
        }
        EXPECT_EQ(num_wrong, 0) << "reduce_scatter";
        everyone->all_gather(input, sum)->wait();
        const auto* all = input.const_data_ptr<std::int32_t>();
        num_wrong = 0;
        for (std::int64_t i = 0; i < numel; ++i) {
          num_wrong += all[i] != static_cast<std::int32_t>(size * i * 7 + 6) ? 1 : 0;
        }
        EXPECT_EQ(num_wrong, 0) << "all_gather";
        fill(rank);
        everyone->all_reduce(input)->wait();
        num_wrong = 0;
        for (std::int64_t i = 0; i < numel; ++i) {
          num_wrong += all[i] != static_cast<std::int32_t>(size * i * 7 + 6) ? 1 : 0;
        }
        EXPECT_EQ(num_wrong, 0) << "all_reduce";
      }
    });
  }
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
std::int64_t available_memory_mib() {
  std::ifstream info("/proc/meminfo");
  std::string word;
  while (info >> word) {
    if (word == "MemAvailable:") {
      std::int64_t kib = 0;
      info >> kib;
      return kib / 1024;
    }
  }
  return 0;
}

TEST_P(Large, CountsBeyond32BitsArriveWhole) {
  constexpr std::int64_t kHalf = (std::int64_t{1} << 30) + 3;  // Two of them exceed 2^31.
  if (available_memory_mib() < 10 * 1024) {
    GTEST_SKIP() << "needs 10 GiB of free memory, there are " << available_memory_mib() << " MiB";
  }
  run_ranks(2, [&](int rank, ThreadWorld& world) {
    const CommunicatorPtr everyone = GetParam().make(world, world_of(2, rank));
    const at::Tensor whole = at::empty({2 * kHalf}, at::kByte);
    const at::Tensor mine = whole.narrow(0, rank * kHalf, kHalf);
    auto* data = mine.mutable_data_ptr<std::uint8_t>();
    const auto value = [](int owner, std::int64_t i) {
      return static_cast<std::uint8_t>((i >> 12) + owner * 101);
    };
    for (std::int64_t i = 0; i < kHalf; ++i) {
      data[i] = value(rank, i);
    }
    everyone->all_gather(whole, mine)->wait();
    std::int64_t num_wrong = 0;
    const auto* all = whole.const_data_ptr<std::uint8_t>() + (1 - rank) * kHalf;
    for (std::int64_t i = 0; i < kHalf; ++i) {
      num_wrong += all[i] != value(1 - rank, i) ? 1 : 0;
    }
    EXPECT_EQ(num_wrong, 0);
    everyone->broadcast(whole, 1)->wait();
    everyone->barrier();
  });
}
#endif

std::vector<Backend> backends_of_their_own() {
  std::vector<Backend> all = conforming_backends();
  std::erase_if(all, [](const Backend& backend) { return backend.is_variant; });
  return all;
}

INSTANTIATE_TEST_SUITE_P(Conformance, Large, ::testing::ValuesIn(backends_of_their_own()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace hopshard::testing
