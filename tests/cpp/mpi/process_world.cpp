// Runs the conformance suite with one rank per process: every process runs all cases, and in
// run_ranks() its own rank's part, then all tell each other how it ended, so that all see the same
// result. Between them is a store of files, because a launcher of MPI brings none.
#include "process_world.hpp"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <thread>

#include "cpp/conformance/backends.hpp"
#include "hopshard/core/env.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/core/log.hpp"

namespace hopshard::testing {
namespace {

/// A key is a file; renaming makes its value appear at once and whole.
class FileStore final : public Store {
 public:
  explicit FileStore(std::filesystem::path folder) : folder_(std::move(folder)) {
    std::filesystem::create_directories(folder_);
  }

  void set(const std::string& key, std::string_view value) override {
    const auto temporary = path_of(key).concat(detail::concatenate('.', getpid()));
    std::ofstream(temporary, std::ios::binary) << value;
    std::filesystem::rename(temporary, path_of(key));
  }

  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (!has(key)) {
      HOPSHARD_CHECK(std::chrono::steady_clock::now() < deadline, TimeoutError, "no key ", key);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    std::ifstream file(path_of(key), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  bool has(const std::string& key) override { return std::filesystem::exists(path_of(key)); }

  void remove() const { std::filesystem::remove_all(folder_); }

 private:
  [[nodiscard]] std::filesystem::path path_of(std::string key) const {
    std::replace(key.begin(), key.end(), '/', '_');
    return folder_ / key;
  }

  std::filesystem::path folder_;
};

enum Outcome : std::int64_t { kNoError, kPeerError, kOwnError };

void run_as_process(int world_size, const RankFunction& run, std::chrono::milliseconds limit) {
  const ProcessWorld& processes = process_world();
  ASSERT_LE(world_size, processes.size) << "mpirun has to start that many ranks";
  std::int64_t outcome = kNoError;
  std::exception_ptr error;
  if (processes.rank < world_size) {
    ThreadWorld world(world_size, limit);
    try {
      run(processes.rank, world);
    } catch (const CommError&) {
      outcome = kPeerError;
      error = std::current_exception();
    } catch (...) {
      outcome = kOwnError;
      error = std::current_exception();
    }
  }
  const std::vector<std::int64_t> outcomes = gather_numbers(outcome);
  const auto worst = std::max_element(outcomes.begin(), outcomes.end());
  if (error && outcome == *worst) {
    std::rethrow_exception(error);
  }
  const std::string text =
      detail::concatenate("rank ", worst - outcomes.begin(), " failed; see its own message");
  if (*worst == kOwnError) {
    throw std::runtime_error(text);
  }
  HOPSHARD_CHECK(*worst == kNoError, CommError, text);
}

int number_from_launcher(std::string_view name, std::string_view other_name) {
  const auto value = launcher_variable(name);
  const auto other_value = launcher_variable(other_name);
  if (!value && !other_value) {
    std::cerr << "start this with mpirun: neither " << name << " nor " << other_name << " is set\n";
    std::exit(2);
  }
  return std::stoi(value ? *value : *other_value);
}

}  // namespace

ProcessWorld& process_world() {
  static ProcessWorld world;
  return world;
}

CommunicatorPtr connect_processes(const Group& group, std::chrono::milliseconds timeout) {
  static std::map<std::string, int> num_connected;
  std::string prefix = group.name;
  for (const int rank : group.ranks) {
    prefix += detail::concatenate('/', rank);
  }
  prefix += detail::concatenate('/', num_connected[prefix]++);
  return connect_backend("mpi", {.store = make_prefix_store(process_world().store, prefix),
                                 .group = group,
                                 .timeout = timeout});
}

std::vector<std::int64_t> gather_numbers(std::int64_t mine) {
  const ProcessWorld& processes = process_world();
  const at::Tensor input = make_tensor(1, at::kLong, [&](auto) { return mine; });
  const at::Tensor output = make_tensor(processes.size, at::kLong, [](auto) { return 0; });
  processes.everyone->all_gather(output, input)->wait();
  const auto* data = output.const_data_ptr<std::int64_t>();
  return {data, data + processes.size};
}

std::vector<Backend> conforming_backends() {
  return {{.name = "mpi", .make = [](ThreadWorld& /*world*/, const Group& group) {
             return connect_processes(group);
           }}};
}

}  // namespace hopshard::testing

int main(int argc, char** argv) {
  using hopshard::testing::FileStore;
  ::testing::InitGoogleTest(&argc, argv);
  at::set_num_threads(1);
  auto& world = hopshard::testing::process_world();
  world.rank = hopshard::testing::number_from_launcher("OMPI_COMM_WORLD_RANK", "PMI_RANK");
  world.size = hopshard::testing::number_from_launcher("OMPI_COMM_WORLD_SIZE", "PMI_SIZE");
  hopshard::set_process_log_rank(world.rank);
  // The launcher's process is the same for all.
  const auto store =
      std::make_shared<FileStore>(std::filesystem::temp_directory_path() /
                                  hopshard::detail::concatenate("hopshard-mpi-", getppid()));
  world.store = store;
  hopshard::Group group = hopshard::testing::world_of(world.size, world.rank);
  group.name = "everyone";
  world.everyone = hopshard::testing::connect_processes(group, std::chrono::seconds(120));
  hopshard::testing::process_runner() = hopshard::testing::run_as_process;
  const int result = RUN_ALL_TESTS();
  world.everyone->barrier();
  world.everyone.reset();
  if (world.rank == 0) {
    store->remove();
  }
  return result;
}
