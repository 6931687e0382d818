// One rank of the check of the nccl backend on real GPUs; tools/gpu_check.sh starts all of them.
// Every result is compared bit by bit with the formula of its integer-valued inputs. Rank 0 prints.
//
//   nccl_check --store DIR --rank R --ranks N --device D [--no-table]
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "hopshard/comm/nccl.hpp"
#include "hopshard/core/error.hpp"

namespace {

namespace fs = std::filesystem;
using hopshard::Communicator;
using hopshard::CommunicatorPtr;
using hopshard::Group;
using hopshard::ReduceOp;
using std::chrono::milliseconds;

/// Files of a folder that all ranks see; a value appears whole, by renaming.
class FileStore final : public hopshard::Store {
 public:
  explicit FileStore(fs::path folder) : folder_(std::move(folder)) {}

  void set(const std::string& key, std::string_view value) override {
    const fs::path path = path_of(key);
    const fs::path draft = path.string() + "." + std::to_string(getpid());
    std::ofstream(draft, std::ios::binary) << value;
    fs::rename(draft, path);
  }
  std::string get(const std::string& key, milliseconds timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (!has(key)) {
      HOPSHARD_CHECK(std::chrono::steady_clock::now() < deadline, TimeoutError, "no rank wrote '",
                     key, "' within ", timeout.count(), " ms");
      std::this_thread::sleep_for(milliseconds(1));
    }
    std::ifstream in(path_of(key), std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  bool has(const std::string& key) override { return fs::exists(path_of(key)); }

 private:
  [[nodiscard]] fs::path path_of(std::string key) const {
    std::replace(key.begin(), key.end(), '/', '_');
    return folder_ / key;
  }

  fs::path folder_;
};

struct Arguments {
  std::string store;
  int rank = 0;
  int ranks = 1;
  int device = 0;
  bool has_table = true;
};

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--no-table") {
      arguments.has_table = false;
      continue;
    }
    HOPSHARD_CHECK(i + 1 < argc, ConfigError, name, " needs a value");
    const std::string value = argv[++i];
    if (name == "--store") {
      arguments.store = value;
    } else if (name == "--rank") {
      arguments.rank = std::stoi(value);
    } else if (name == "--ranks") {
      arguments.ranks = std::stoi(value);
    } else if (name == "--device") {
      arguments.device = std::stoi(value);
    } else {
      throw hopshard::ConfigError("unknown option " + name);
    }
  }
  HOPSHARD_CHECK(!arguments.store.empty(), ConfigError, "--store is missing");
  return arguments;
}

class Check {
 public:
  explicit Check(const Arguments& arguments)
      : arguments_(arguments),
        device_(at::kCUDA, static_cast<c10::DeviceIndex>(arguments.device)),
        store_(std::make_shared<FileStore>(arguments.store)) {
    c10::impl::VirtualGuardImpl(at::kCUDA).setDevice(device_);
  }

  int run() {
    for (const bool reversed : {false, true}) {
      const CommunicatorPtr everyone = connect(reversed ? "reversed" : "world", reversed);
      check_operations(*everyone);
      check_parts(*everyone);
      if (!reversed && arguments_.has_table) {
        print_table(*everyone);
      }
    }
    check_time_limit();
    if (arguments_.rank == 0) {
      std::printf("%d ranks: %s\n", arguments_.ranks, num_wrong_ == 0 ? "all right" : "WRONG");
    }
    return num_wrong_ == 0 ? 0 : 1;
  }

 private:
  [[nodiscard]] int size() const { return arguments_.ranks; }

  Group group(const std::string& name, bool reversed) const {
    Group group{.name = name, .ranks = {}, .rank = arguments_.rank, .slots = {}};
    for (int member = 0; member < size(); ++member) {
      group.ranks.push_back(member);
      if (reversed) {
        group.slots.push_back(size() - 1 - member);
      }
    }
    return group;
  }

  CommunicatorPtr connect(const std::string& name, bool reversed) {
    return hopshard::make_nccl_communicator({.store = hopshard::make_prefix_store(store_, name),
                                             .group = group(name, reversed),
                                             .timeout = std::chrono::seconds(60)},
                                            {.check_calls = false,
                                             .native_low_precision_sums = false,
                                             .watch_interval = milliseconds(50)});
  }

  /// (3 i + 5 rank) mod 11, as in the conformance suite: exact in every dtype.
  [[nodiscard]] at::Tensor values(int rank, std::int64_t begin, std::int64_t numel,
                                  at::ScalarType dtype) const {
    const at::Tensor index =
        at::arange(begin, begin + numel, at::TensorOptions().dtype(at::kLong).device(device_));
    return index.mul(3).add(5 * rank).remainder(11).to(dtype);
  }

  [[nodiscard]] at::Tensor reduced(std::int64_t begin, std::int64_t numel, at::ScalarType dtype,
                                   ReduceOp op) const {
    at::Tensor result = values(0, begin, numel, at::kLong);
    for (int rank = 1; rank < size(); ++rank) {
      const at::Tensor next = values(rank, begin, numel, at::kLong);
      result = op == ReduceOp::kSum ? result.add(next) : at::maximum(result, next);
    }
    return result.to(dtype);
  }

  void expect(const std::string& what, const at::Tensor& found, const at::Tensor& expected) {
    if (!found.equal(expected)) {
      ++num_wrong_;
      std::printf("rank %d: %s is wrong\n", arguments_.rank, what.c_str());
    }
  }

  void check_operations(Communicator& everyone) {
    const int rank = arguments_.rank;
    const auto slot = static_cast<std::int64_t>(everyone.group().my_slot());
    for (const at::ScalarType dtype :
         {at::kByte, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
      for (const std::int64_t numel : {1, 3, 1000, 1 << 18}) {
        const std::string what =
            hopshard::detail::concatenate(everyone.group().name, ' ', dtype, " of ", numel, ' ');
        const auto options = at::TensorOptions().dtype(dtype).device(device_);

        const at::Tensor whole = at::zeros({numel * size()}, options);
        const at::Tensor mine = whole.narrow(0, slot * numel, numel);
        mine.copy_(values(rank, 0, numel, dtype));
        everyone.all_gather(whole, mine)->wait();
        for (int member = 0; member < size(); ++member) {
          const std::int64_t begin = everyone.group().slot_of(member) * numel;
          expect(what + "all_gather", whole.narrow(0, begin, numel),
                 values(member, 0, numel, dtype));
        }
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
          const at::Tensor input = values(rank, 0, numel * size(), dtype);
          const at::Tensor expected = reduced(slot * numel, numel, dtype, op);
          const at::Tensor output = at::full({numel}, 1, options);
          everyone.reduce_scatter(output, input, op)->wait();
          expect(what + "reduce_scatter", output, expected);
          const at::Tensor again = values(rank, 0, numel * size(), dtype);
          everyone
              .reduce_scatter(output, again, op,
                              {.timeout = {}, .tag = "accumulate", .accumulate = true})
              ->wait();
          expect(what + "reduce_scatter accumulated", output,
                 op == ReduceOp::kSum ? expected.add(expected) : expected);
          const at::Tensor tensor = values(rank, 0, numel, dtype);
          everyone.all_reduce(tensor, op)->wait();
          expect(what + "all_reduce", tensor, reduced(0, numel, dtype, op));
        }
        const int root = size() - 1;
        const at::Tensor tensor = values(rank, 0, numel, dtype);
        everyone.broadcast(tensor, root)->wait();
        expect(what + "broadcast", tensor, values(root, 0, numel, dtype));
      }
    }
    // In bf16 256 + 1 is 256 again: sums must not be rounded on the way.
    const at::Tensor low = at::full({3}, rank == 0 ? 256 : 1,
                                    at::TensorOptions().dtype(at::kBFloat16).device(device_));
    everyone.all_reduce(low)->wait();
    expect("the sum in bf16", low, low.clone().fill_(256 + size() - 1));

    std::vector<hopshard::WorkPtr> works;
    std::vector<at::Tensor> tensors;
    everyone.group_begin();
    for (int i = 0; i < 8; ++i) {
      tensors.push_back(values(rank, i, 1000, at::kFloat));
      works.push_back(everyone.all_reduce(tensors.back()));
    }
    everyone.group_end();
    for (int i = 0; i < 8; ++i) {
      works[static_cast<std::size_t>(i)]->wait();
      expect("all_reduce in a group", tensors[static_cast<std::size_t>(i)],
             reduced(i, 1000, at::kFloat, ReduceOp::kSum));
    }
    everyone.barrier();
  }

  void check_parts(Communicator& everyone) {
    const CommunicatorPtr again = everyone.split(group("again", true));
    const at::Tensor memory = everyone.allocate(1 << 20);
    everyone.register_memory(memory);
    const at::Tensor tensor = memory.view(at::kFloat);
    tensor.copy_(values(arguments_.rank, 0, tensor.numel(), at::kFloat));
    again->all_reduce(tensor)->wait();
    expect("all_reduce of registered memory in a split group", tensor,
           reduced(0, tensor.numel(), at::kFloat, ReduceOp::kSum));
    if (size() > 2 && arguments_.rank < 2) {
      const CommunicatorPtr pair = everyone.split({"pair", {0, 1}, arguments_.rank, {}});
      const at::Tensor both = at::full({4}, arguments_.rank + 1.0, at::TensorOptions(device_));
      pair->all_reduce(both)->wait();
      expect("all_reduce of a pair", both, both.clone().fill_(3));
    }
    everyone.barrier();  // The memory is used by others until here.
  }

  void check_time_limit() {
    if (size() == 1) {
      return;
    }
    const CommunicatorPtr everyone = connect("late", false);
    everyone->barrier();
    if (arguments_.rank == 0) {
      const auto start = std::chrono::steady_clock::now();
      try {
        everyone->barrier({.timeout = milliseconds(1000), .tag = "alone"});
        ++num_wrong_;
        std::printf("a barrier of one rank ended\n");
      } catch (const hopshard::TimeoutError& error) {
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        std::printf("time limit of 1 s ended after %.2f s: %s\n", took.count(), error.what());
      }
      return;
    }
    for (int look = 0; look < 200; ++look) {  // Until the news is here.
      std::this_thread::sleep_for(milliseconds(50));
      if (store_->has("late/given_up")) {
        break;
      }
    }
    std::this_thread::sleep_for(milliseconds(500));
    try {
      everyone->barrier();
      ++num_wrong_;
      std::printf("rank %d: a barrier after a failure ended\n", arguments_.rank);
    } catch (const hopshard::CommError&) {
    }
  }

  void print_table(Communicator& everyone) {
    if (arguments_.rank == 0) {
      std::printf("%-15s %9s %10s %12s   median of 20, whole buffer; bus as in nccl-tests\n", "op",
                  "MiB", "ms", "bus GB/s");
    }
    const double share = static_cast<double>(size() - 1) / size();
    for (const std::int64_t mib : {1, 16, 256}) {
      const std::int64_t numel = mib * (1 << 20) / 4 / size();
      const auto options = at::TensorOptions().dtype(at::kFloat).device(device_);
      const at::Tensor whole = at::zeros({numel * size()}, options);
      const at::Tensor part = at::zeros({numel}, options);
      const auto row = [&](const char* op, double factor, const std::function<void()>& call) {
        std::vector<double> times;
        for (int i = 0; i < 25; ++i) {
          everyone.barrier();
          const auto start = std::chrono::steady_clock::now();
          call();
          c10::impl::VirtualGuardImpl(at::kCUDA).synchronizeDevice(device_.index());
          const std::chrono::duration<double, std::milli> took =
              std::chrono::steady_clock::now() - start;
          if (i >= 5) {
            times.push_back(took.count());
          }
        }
        std::sort(times.begin(), times.end());
        const double median = times[times.size() / 2];
        if (arguments_.rank == 0) {
          std::printf("%-15s %9lld %10.3f %12.2f\n", op, static_cast<long long>(mib), median,
                      factor * static_cast<double>(whole.nbytes()) / median / 1e6);
        }
      };
      row("all_gather", share, [&] { everyone.all_gather(whole, part)->wait(); });
      row("reduce_scatter", share, [&] { everyone.reduce_scatter(part, whole)->wait(); });
      row("all_reduce", 2 * share, [&] { everyone.all_reduce(whole)->wait(); });
    }
  }

  Arguments arguments_;
  at::Device device_;
  hopshard::StorePtr store_;
  int num_wrong_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  try {
    const Arguments arguments = parse(argc, argv);
    HOPSHARD_CHECK(dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) != nullptr, ConfigError,
                   "torch's CUDA library does not load: ", dlerror());
    static_cast<void>(hopshard::require_backend("nccl"));  // Says what is missing.
    return Check(arguments).run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "nccl_check: %s\n", error.what());
    return 1;
  }
}
