// A world whose ranks are processes, for C++ tests of what threads cannot show: ranks that are
// killed, and memory that is really another's. Fork before any rank has threads or a communicator:
// the parent only waits.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "hopshard/comm/store.hpp"
#include "hopshard/core/error.hpp"

namespace hopshard::testing {

/// Memory that the parent and all ranks share: a store, and a text of each rank for the parent.
class SharedBoard {
 public:
  static constexpr std::size_t kMaxRanks = 16;

  SharedBoard() {
    void* const memory =
        ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      throw std::runtime_error("mmap of the board failed");
    }
    board_ = new (memory) Board;
  }
  SharedBoard(const SharedBoard&) = delete;
  SharedBoard& operator=(const SharedBoard&) = delete;
  ~SharedBoard() { ::munmap(board_, sizeof(Board)); }

  /// Of the rank that calls, for the parent to read.
  void report(int rank, std::string_view text) {
    auto& target = board_->reports[static_cast<std::size_t>(rank)];
    const std::size_t length = std::min(text.size(), target.size() - 1);
    std::memcpy(target.data(), text.data(), length);
    target[length] = '\0';
  }
  [[nodiscard]] std::string report_of(int rank) const {
    return board_->reports[static_cast<std::size_t>(rank)].data();
  }

  /// Counts up while a rank works, so that the parent can act in the middle of it.
  std::atomic<std::uint64_t>& counter() { return board_->counter; }

  [[nodiscard]] StorePtr store() { return std::make_shared<BoardStore>(*board_); }

 private:
  static constexpr std::size_t kMaxEntries = 1024;
  static constexpr std::size_t kMaxText = 512;
  struct Entry {
    std::atomic<std::uint32_t> state{0};  ///< 0: free, 1: being written, 2: written.
    std::array<char, kMaxText> key{};
    std::array<char, kMaxText> value{};
  };
  struct Board {
    std::atomic<std::uint64_t> counter{0};
    std::array<Entry, kMaxEntries> entries;
    std::array<std::array<char, 2048>, kMaxRanks> reports{};
  };

  /// Entries are only added, so a rank that is killed in the middle spoils no other entry.
  class BoardStore final : public Store {
   public:
    explicit BoardStore(Board& board) : board_(board) {}

    void set(const std::string& key, std::string_view value) override {
      if (key.size() >= kMaxText || value.size() >= kMaxText) {
        throw CommError("the board has no room for '" + key + "'");
      }
      for (Entry& entry : board_.entries) {
        std::uint32_t free = 0;
        if (entry.state.compare_exchange_strong(free, 1)) {
          std::memcpy(entry.key.data(), key.data(), key.size());
          std::memcpy(entry.value.data(), value.data(), value.size());
          entry.state.store(2, std::memory_order_release);
          return;
        }
      }
      throw CommError("the board is full");
    }

    std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
      const auto deadline = std::chrono::steady_clock::now() + timeout;
      while (true) {
        if (const Entry* entry = find(key)) {
          return entry->value.data();
        }
        if (std::chrono::steady_clock::now() > deadline) {
          throw TimeoutError("no rank wrote '" + key + "'");
        }
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    }

    bool has(const std::string& key) override { return find(key) != nullptr; }

   private:
    [[nodiscard]] const Entry* find(const std::string& key) const {
      for (const Entry& entry : board_.entries) {
        const std::uint32_t state = entry.state.load(std::memory_order_acquire);
        if (state == 0) {
          return nullptr;
        }
        if (state == 2 && key == entry.key.data()) {
          return &entry;
        }
      }
      return nullptr;
    }

    Board& board_;
  };

  Board* board_ = nullptr;
};

/// Ranks as child processes. All that are left are killed with this.
class ForkWorld {
 public:
  using RankFunction = std::function<void(int rank, SharedBoard& board)>;

  ForkWorld() = default;
  ForkWorld(const ForkWorld&) = delete;
  ForkWorld& operator=(const ForkWorld&) = delete;
  ~ForkWorld() {
    for (const auto& [rank, pid] : running_) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }

  /// Runs `run` in `num_ranks` children. An exception is reported as "error: <text>".
  void start(int num_ranks, const RankFunction& run) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      const pid_t pid = ::fork();
      if (pid < 0) {
        throw std::runtime_error("fork failed");
      }
      if (pid == 0) {
        try {
          run(rank, board_);
        } catch (const std::exception& error) {
          board_.report(rank, std::string("error: ") + error.what());
          ::_exit(1);
        }
        ::_exit(0);
      }
      running_[rank] = pid;
      pids_[rank] = pid;
    }
  }

  void kill(int rank) { ::kill(pids_.at(rank), SIGKILL); }
  [[nodiscard]] pid_t pid_of(int rank) const { return pids_.at(rank); }

  /// The rank's exit status as waitpid() gives it; nothing after `limit`: it hangs.
  /// A rank that ended stays a zombie until it is asked for here.
  [[nodiscard]] std::optional<int> wait_for(int rank, std::chrono::milliseconds limit) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    while (std::chrono::steady_clock::now() < deadline) {
      int status = 0;
      if (::waitpid(running_.at(rank), &status, WNOHANG) > 0) {
        running_.erase(rank);
        return status;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return std::nullopt;
  }

  [[nodiscard]] SharedBoard& board() { return board_; }

 private:
  SharedBoard board_;
  std::map<int, pid_t> running_;
  std::map<int, pid_t> pids_;
};

}  // namespace hopshard::testing
