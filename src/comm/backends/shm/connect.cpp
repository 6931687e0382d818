// How ranks find each other, through the store, and then through the control block:
//
//   hello/<i>    each rank: who it is, on which host, and its slots
//   block        rank 0: where the control block is (a file it has open)
//   opened/<i>   each rank: "ok", or why it cannot open that file
//   choice       rank 0: "file", or the name of a POSIX segment that all open instead; rank 0
//   removes
//                the name when all have mapped it (mapped/<i>)
//
// After that all have mapped the block, and the stages of RankState are barriers: at kAttached a
// rank has written its state, at kProbed it knows whether it can read its peers' private memory.
#include "connect.hpp"

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <fstream>
#include <map>
#include <mutex>
#include <random>
#include <sstream>
#include <thread>

#include "../backends.hpp"
#include "hopshard/core/error.hpp"
#include "progress.hpp"
#include "shm_communicator.hpp"

namespace hopshard::detail::shm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// Latency is bought for buffers up to this size: they are copied twice, but wait once.
constexpr std::size_t kInlineBytes = std::size_t{8} << 10;
/// Where everything is inline, larger pieces amortize the waits.
constexpr std::size_t kChunkInlineBytes = std::size_t{128} << 10;

enum Stage : std::uint64_t { kAttached = 1, kProbed = 2 };

/// Read by peers to find out whether they may; its address is in the control block.
const volatile std::uint64_t g_probe = kProbe;

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string host_name() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

/// The inode of this process's pid namespace; pids of another one mean nothing here.
std::uint64_t pid_namespace() {
  struct stat status {};
  return ::stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

CpuMask own_cpus() {
  CpuMask mask{};
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) {
    for (std::size_t cpu = 0; cpu < mask.size() * 64; ++cpu) {
      if (CPU_ISSET(cpu, &set)) {
        mask[cpu / 64] |= std::uint64_t{1} << (cpu % 64);
      }
    }
  }
  return mask;
}

struct Hello {
  ProcessIdentity process;
  std::uint64_t pid_namespace = 0;
  std::string boot_id;
  std::string host;
  std::string slots;

  [[nodiscard]] static Hello of_self(const Group& group) {
    Hello hello{.process = ProcessIdentity::of_self(),
                .pid_namespace = shm::pid_namespace(),
                .boot_id = first_line("/proc/sys/kernel/random/boot_id"),
                .host = host_name(),
                .slots = {}};
    for (int member = 0; member < group.size(); ++member) {
      hello.slots += concatenate(member == 0 ? "" : ",", group.slot_of(member));
    }
    return hello;
  }
  [[nodiscard]] std::string text() const {
    return concatenate(process.pid, ' ', process.start_time, ' ', pid_namespace, ' ',
                       boot_id.empty() ? "-" : boot_id, ' ', host.empty() ? "-" : host, ' ', slots);
  }
  [[nodiscard]] static Hello parse(const std::string& text) {
    Hello hello;
    std::istringstream in(text);
    in >> hello.process.pid >> hello.process.start_time >> hello.pid_namespace >> hello.boot_id >>
        hello.host >> hello.slots;
    HOPSHARD_CHECK(!in.fail(), CommError, "another rank wrote '", text,
                   "' into the store, which is no greeting of this version of hopshard");
    return hello;
  }
};

std::string random_name() {
  std::random_device device;
  std::ostringstream name;
  name << "/hopshard-" << std::hex << device() << device() << device();
  return name.str();
}

/// Ranks that are threads of one process share a mapping, so that a lock-free variable has one
/// address.
std::shared_ptr<const Mapping> map_block(const File& file, std::size_t num_bytes) {
  static std::mutex mutex;
  static auto* const all = new std::map<std::uint64_t, std::weak_ptr<const Mapping>>;
  const std::uint64_t inode = file.inode();
  const std::lock_guard lock(mutex);
  std::erase_if(*all, [](const auto& entry) { return entry.second.expired(); });
  auto mapping = (*all)[inode].lock();
  if (mapping == nullptr) {
    mapping = std::make_shared<const Mapping>(file, num_bytes);
    (*all)[inode] = mapping;
  }
  return mapping;
}

class Connector {
 public:
  Connector(const ConnectOptions& options, const Restrictions& restrictions)
      : options_(options),
        restrictions_(restrictions),
        group_(options.group),
        deadline_(Clock::now() + options.timeout) {}

  Setup run() {
    try {
      return connect();
    } catch (const CommError& error) {
      // For the others, which would only see that this rank is gone.
      options_.store->set(std::string(kFailedKey), error.what());
      throw;
    }
  }

 private:
  static constexpr std::string_view kFailedKey = "shm/failed";

  Setup connect() {
    exchange_hellos();
    const bool is_file = choose_block();
    Setup setup;
    setup.group = group_;
    const std::size_t inline_bytes = is_file ? kInlineBytes : kChunkInlineBytes;
    setup.mapping = map_block(block_file_, block_bytes(inline_bytes));
    setup.block = ControlBlock(setup.mapping->data(), size(), inline_bytes);
    if (!is_file) {
      settle_name();
    }
    hold_life_lock(block_file_.get(), me());
    setup.has_arenas = is_file;
    setup.reads_own_process = !restrictions_.no_own_process;
    attach(setup);
    setup.has_own_cores = count_cpus(setup) >= size();
    setup.can_read_private = is_file && probe(setup);
    setup.life_lines = std::move(life_lines_);
    setup.lock_file = std::move(block_file_);
    return setup;
  }

  [[nodiscard]] std::size_t size() const { return group_.ranks.size(); }
  [[nodiscard]] std::size_t me() const { return static_cast<std::size_t>(group_.rank); }
  [[nodiscard]] std::size_t block_bytes(std::size_t inline_bytes) const {
    return ControlBlock::num_bytes(size(), inline_bytes);
  }
  [[nodiscard]] std::string text() const {
    return concatenate("shm: connecting group '", group_.name, "' on rank ", group_.rank, " of ",
                       group_.size(), " (global rank ", group_.global_rank(), ")");
  }
  [[nodiscard]] std::string name_of(std::size_t member) const {
    return concatenate("global rank ", group_.ranks[member]);
  }
  static std::string key(std::string_view name, std::size_t member) {
    return concatenate("shm/", name, "/", member);
  }

  /// Until `is_there()`; ends early if `member` dies.
  template <typename IsThere>
  void await(std::size_t member, std::string_view what, IsThere is_there) {
    for (microseconds pause{50}; !is_there();
         pause = std::min(pause * 2, microseconds(std::chrono::milliseconds(5)))) {
      const bool is_dead = member < life_lines_.size() && life_lines_[member].is_dead();
      if ((is_dead || pause > milliseconds(1)) && options_.store->has(std::string(kFailedKey))) {
        throw CommError(
            concatenate(text(), ": another rank failed: ",
                        options_.store->get(std::string(kFailedKey), options_.timeout)));
      }
      if (is_dead && !is_there()) {
        throw CommError(concatenate(text(), ": ", name_of(member), " died (process ",
                                    life_lines_[member].pid(), " ended)"));
      }
      HOPSHARD_CHECK(Clock::now() < deadline_, TimeoutError, text(), ": ", name_of(member),
                     " did not ", what, " within ", options_.timeout.count(),
                     " ms; look at what it does instead, or raise the time limit");
      std::this_thread::sleep_for(pause);
    }
  }

  std::string get(const std::string& name, std::size_t from) {
    await(from, concatenate("write '", name, "' into the store"),
          [&] { return options_.store->has(name); });
    return options_.store->get(name, options_.timeout);
  }

  void exchange_hellos() {
    const Hello mine = Hello::of_self(group_);
    options_.store->set(key("hello", me()), mine.text());
    for (std::size_t member = 0; member < size(); ++member) {
      const Hello other = member == me() ? mine : Hello::parse(get(key("hello", member), member));
      HOPSHARD_CHECK(other.boot_id == mine.boot_id, ConfigError, text(), ": ", name_of(member),
                     " runs on host '", other.host, "', this rank on '", mine.host,
                     "'; shm connects ranks of one host. Use it for the ranks inside a node, and "
                     "c10d, mpi, ofi or nccl between nodes");
      HOPSHARD_CHECK(other.slots == mine.slots, InvalidArgument, text(), ": ", name_of(member),
                     " gives the slots ", other.slots, ", this rank ", mine.slots,
                     "; all must give the same");
      has_common_pids_ = has_common_pids_ && other.pid_namespace == mine.pid_namespace;
      hellos_.push_back(other);
    }
    has_common_pids_ = has_common_pids_ && !restrictions_.no_pid;
    if (has_common_pids_) {
      make_life_lines(/*lock_file=*/-1);
    }
  }

  void make_life_lines(int lock_file) {
    life_lines_.clear();
    for (std::size_t member = 0; member < size(); ++member) {
      life_lines_.emplace_back(hellos_[member].process, has_common_pids_, lock_file, member);
    }
  }

  /// Opens the control block; true if it is a memory file, so that others can be opened as well.
  bool choose_block() {
    if (group_.rank == 0) {
      offer_file();
    }
    try_file();
    if (group_.rank == 0) {
      return decide();
    }
    const std::string choice = get("shm/choice", 0);
    if (choice == "file") {
      return true;
    }
    HOPSHARD_CHECK(choice.starts_with('/'), ConfigError, text(), ": ", choice);
    name_ = choice;
    block_file_ = open_named_file(name_);
    return false;
  }

  void offer_file() {
    std::string offer = "none: memory files are switched off";
    if (!restrictions_.no_memory_files) {
      try {
        block_file_ = make_memory_file(block_bytes(kInlineBytes));
        offer = concatenate("file ", block_file_.get(), ' ', block_file_.inode());
      } catch (const CommError& error) {
        offer = concatenate("none: ", error.what());
      }
    }
    options_.store->set("shm/block", offer);
  }

  void try_file() {
    std::istringstream offer(get("shm/block", 0));
    std::string word;
    int descriptor = -1;
    std::uint64_t inode = 0;
    offer >> word >> descriptor >> inode;
    std::string result = "ok";
    if (word != "file") {
      result = offer.str();
    } else if (!has_common_pids_) {
      result = "the ranks are in different pid namespaces";
    } else {
      try {
        File opened = open_memory_file_of(hellos_[0].process.pid, descriptor, inode);
        if (group_.rank != 0) {
          block_file_ = std::move(opened);
        }
      } catch (const CommError& error) {
        result = error.what();
      }
    }
    options_.store->set(key("opened", me()), result);
  }

  /// Rank 0.
  bool decide() {
    std::string obstacle;
    for (std::size_t member = 0; member < size(); ++member) {
      const std::string result = get(key("opened", member), member);
      if (result != "ok") {
        obstacle = concatenate(name_of(member), ": ", result);
      }
    }
    if (obstacle.empty()) {
      options_.store->set("shm/choice", "file");
      return true;
    }
    name_ = random_name();
    try {
      block_file_ = make_named_file(name_, block_bytes(kChunkInlineBytes));
    } catch (const CommError& error) {
      const std::string choice = concatenate(
          "no memory can be shared on this host. Memory files are refused (", obstacle,
          "), and so is POSIX shared memory (", error.what(),
          "). In containers, share one pid namespace or enlarge /dev/shm (docker run --pid, "
          "--shm-size), or use c10d or mpi");
      options_.store->set("shm/choice", choice);
      throw ConfigError(concatenate(text(), ": ", choice));
    }
    options_.store->set("shm/choice", name_);
    return false;
  }

  /// All have it mapped: nobody needs the name any more, and it must not outlive the ranks.
  void settle_name() {
    options_.store->set(key("mapped", me()), "yes");
    if (group_.rank != 0) {
      return;
    }
    struct Removal {
      const std::string& name;
      ~Removal() { remove_named_file(name); }
    };
    const Removal removal{name_};
    for (std::size_t member = 0; member < size(); ++member) {
      static_cast<void>(get(key("mapped", member), member));
    }
  }

  void await_stage(const Setup& setup, Stage stage, std::string_view what) {
    for (std::size_t member = 0; member < size(); ++member) {
      await(member, what, [&] {
        return setup.block.rank(member).stage.load(std::memory_order_acquire) >= stage;
      });
    }
  }

  void attach(const Setup& setup) {
    RankState& state = setup.block.rank(me());
    state.cpus = own_cpus();
    // Its address, for peers to read. NOLINTNEXTLINE
    state.probe_address = reinterpret_cast<std::uintptr_t>(&g_probe);
    state.stage.store(kAttached, std::memory_order_release);
    if (!has_common_pids_) {
      // The locks of others count once they are attached; until then only the time limit helps.
      await_stage(setup, kAttached, "attach to the shared memory");
    }
    make_life_lines(block_file_.get());
    await_stage(setup, kAttached, "attach to the shared memory");
  }

  /// Those that any of the ranks may run on. A launcher may bind each rank to another one.
  [[nodiscard]] std::size_t count_cpus(const Setup& setup) const {
    std::size_t count = 0;
    for (std::size_t word = 0; word < CpuMask{}.size(); ++word) {
      std::uint64_t any = 0;
      for (std::size_t member = 0; member < size(); ++member) {
        any |= setup.block.rank(member).cpus[word];
      }
      count += static_cast<std::size_t>(std::popcount(any));
    }
    return count;
  }

  /// True if every rank can read every other.
  bool probe(const Setup& setup) {
    bool can_read = has_common_pids_ && !restrictions_.no_process_memory;
    for (std::size_t member = 0; can_read && member < size(); ++member) {
      std::uint64_t word = 0;
      try {
        read_process_memory(hellos_[member].process.pid, &word,
                            setup.block.rank(member).probe_address, sizeof(word));
      } catch (const CommError&) {
      }
      can_read = word == kProbe;
    }
    RankState& state = setup.block.rank(me());
    state.can_read_others.store(can_read ? 2 : 1, std::memory_order_relaxed);
    state.stage.store(kProbed, std::memory_order_release);
    await_stage(setup, kProbed, "try to read its peers' memory");
    for (std::size_t member = 0; member < size(); ++member) {
      can_read = can_read && setup.block.rank(member).can_read_others.load() == 2;
    }
    return can_read;
  }

  using microseconds = std::chrono::microseconds;

  const ConnectOptions& options_;
  const Restrictions& restrictions_;
  const Group& group_;
  Clock::time_point deadline_;
  std::vector<Hello> hellos_;
  std::vector<LifeLine> life_lines_;
  bool has_common_pids_ = true;
  File block_file_;
  std::string name_;
};

CommunicatorPtr connect_here(const ConnectOptions& options) { return connect(options, {}); }

}  // namespace

CommunicatorPtr connect(const ConnectOptions& options, const Restrictions& restrictions) {
  HOPSHARD_CHECK(options.store != nullptr, InvalidArgument, "shm: group '", options.group.name,
                 "': the store is null");
  std::shared_ptr<SharedGroup> shared;
  if (options.group.size() > 1) {
    shared = std::make_shared<SharedGroup>(Connector(options, restrictions).run());
    Progress::of_process().add(shared);
  }
  return make_shm_communicator(options, restrictions, std::move(shared));
}

std::optional<std::string> find_obstacle() {
  constexpr std::size_t kTrialBytes = kPageBytes;
  std::string refused;
  try {
    const File file = make_memory_file(kTrialBytes);
    const Mapping mapping(open_memory_file_of(::getpid(), file.get(), file.inode()), kTrialBytes);
    return std::nullopt;
  } catch (const CommError& error) {
    refused = error.what();
  }
  const std::string name = random_name();
  try {
    const File file = make_named_file(name, kTrialBytes);
    remove_named_file(name);
    const Mapping mapping(file, kTrialBytes);
    return std::nullopt;
  } catch (const CommError& error) {
    return concatenate("no memory can be shared here: ", refused, "; ", error.what());
  }
}

}  // namespace hopshard::detail::shm

namespace hopshard::detail {

BackendInfo describe_shm() {
  return {"shm", "ranks of one host over shared memory", shm::find_obstacle(), shm::connect_here};
}

}  // namespace hopshard::detail
