#include "peers.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <sstream>

#include "hopshard/core/error.hpp"

namespace hopshard::detail::shm {
namespace {

/// 0: there is no such process.
std::uint64_t start_time_of(std::int64_t pid) {
  std::ifstream file(concatenate("/proc/", pid, "/stat"));
  std::string text;
  std::getline(file, text);
  // The name in parentheses may hold anything; 20 fields stand between it and the start time.
  std::istringstream fields(text.substr(std::min(text.rfind(')') + 1, text.size())));
  std::string field;
  constexpr int kFieldsAfterName = 20;
  for (int i = 0; i < kFieldsAfterName; ++i) {
    fields >> field;
  }
  return fields ? std::strtoull(field.c_str(), nullptr, 10) : 0;
}

struct flock lock_of(std::size_t member, short type) {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(member);
  lock.l_len = 1;
  return lock;
}

/// process_vm_readv and process_vm_writev move at most this much in one call.
constexpr std::size_t kMostBytesPerCall = std::size_t{1} << 30;

template <typename Move>
void move_all(std::int64_t pid, void* here, std::uint64_t there, std::size_t num_bytes,
              std::string_view name, Move move) {
  std::size_t done = 0;
  while (done < num_bytes) {
    const std::size_t count = std::min(num_bytes - done, kMostBytesPerCall);
    iovec local{static_cast<char*>(here) + done, count};
    // An address of the other process, never dereferenced here. NOLINTNEXTLINE
    iovec remote{reinterpret_cast<void*>(there + done), count};
    const ssize_t moved = move(static_cast<pid_t>(pid), &local, &remote);
    if (moved < 0 && errno == EINTR) {
      continue;
    }
    HOPSHARD_CHECK(moved > 0, CommError, name, " of process ", pid, ": ", error_text(errno));
    done += static_cast<std::size_t>(moved);
  }
}

}  // namespace

ProcessIdentity ProcessIdentity::of_self() { return of(::getpid()); }

ProcessIdentity ProcessIdentity::of(std::int64_t pid) { return {pid, start_time_of(pid)}; }

LifeLine::LifeLine(ProcessIdentity process, bool use_pid, int lock_file, std::size_t member)
    : process_(process), lock_file_(lock_file), member_(member) {
  if (!use_pid) {
    return;
  }
  is_self_ = process.pid == ::getpid();
  if (is_self_) {
    return;
  }
  pidfd_ = File(static_cast<int>(::syscall(SYS_pidfd_open, process.pid, 0)));
  const int error = errno;
  // Asked after the pidfd is there, so that it belongs to the process that was meant.
  is_gone_ = (!pidfd_.is_open() && error == ESRCH) ||
             (pidfd_.is_open() && start_time_of(process.pid) != process.start_time);
}

bool LifeLine::is_dead() const {
  if (is_self_ || is_gone_) {
    return is_gone_;
  }
  if (pidfd_.is_open()) {
    pollfd request{pidfd_.get(), POLLIN, 0};
    return ::poll(&request, 1, 0) == 1 && (request.revents & POLLIN) != 0;
  }
  struct flock lock = lock_of(member_, F_WRLCK);
  return ::fcntl(lock_file_, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

void hold_life_lock(int lock_file, std::size_t member) {
  struct flock lock = lock_of(member, F_WRLCK);
  HOPSHARD_CHECK(::fcntl(lock_file, F_OFD_SETLK, &lock) == 0, CommError,
                 "a lock on shared memory: ", error_text(errno));
}

void read_process_memory(std::int64_t pid, void* to, std::uint64_t from, std::size_t num_bytes) {
  move_all(pid, to, from, num_bytes, "process_vm_readv",
           [](pid_t process, const iovec* local, const iovec* remote) {
             return ::process_vm_readv(process, local, 1, remote, 1, 0);
           });
}

void write_process_memory(std::int64_t pid, std::uint64_t to, const void* from,
                          std::size_t num_bytes) {
  // The kernel's interface wants a pointer that can be written for both directions.
  move_all(pid, const_cast<void*>(from), to, num_bytes, "process_vm_writev",  // NOLINT
           [](pid_t process, const iovec* local, const iovec* remote) {
             return ::process_vm_writev(process, local, 1, remote, 1, 0);
           });
}

}  // namespace hopshard::detail::shm
