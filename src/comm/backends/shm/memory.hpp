// Memory that several processes see: files in memory (memfd, or POSIX shared memory where memfd
// cannot be shared), their mappings, and the arenas behind Communicator::allocate(). Peers open a
// memfd through the owner's /proc/<pid>/fd, so nothing has a name that could be left behind.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "control_block.hpp"

namespace hopshard::detail::shm {

/// "ENOENT (No such file or directory)", for texts.
std::string error_text(int error);

/// An open file, closed with this.
class File {
 public:
  File() = default;
  explicit File(int descriptor) : descriptor_(descriptor) {}
  File(File&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  File& operator=(File&& other) noexcept;
  ~File();

  [[nodiscard]] bool is_open() const { return descriptor_ >= 0; }
  [[nodiscard]] int get() const { return descriptor_; }
  /// @throws CommError  the file is gone or cannot be asked.
  [[nodiscard]] std::uint64_t inode() const;

 private:
  int descriptor_ = -1;
};

/// @throws CommError  saying what was refused.
[[nodiscard]] File make_memory_file(std::size_t num_bytes);
/// The file that process `pid` has open as `descriptor`.
[[nodiscard]] File open_memory_file_of(std::int64_t pid, int descriptor, std::uint64_t inode);
/// POSIX shared memory by name; the creator reserves its pages, so that a full /dev/shm is an error
/// here and not a SIGBUS later.
[[nodiscard]] File make_named_file(const std::string& name, std::size_t num_bytes);
[[nodiscard]] File open_named_file(const std::string& name);
void remove_named_file(const std::string& name) noexcept;

/// A shared mapping of a whole file, unmapped with this.
class Mapping {
 public:
  /// @throws CommError
  Mapping(const File& file, std::size_t num_bytes);
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  [[nodiscard]] char* data() const { return data_; }
  [[nodiscard]] std::size_t num_bytes() const { return num_bytes_; }

 private:
  char* data_ = nullptr;
  std::size_t num_bytes_ = 0;
  void* reserved_ = nullptr;
  std::size_t reserved_bytes_ = 0;
};

/// The arenas of this process. Each is one file; peers map it when they first see it in an
/// operation, and drop it after its owner freed it: its last page, which is zero then, tells.
///
/// Threads: all members may be called from any thread.
class Arenas {
 public:
  /// Of this process; after a fork the child starts with none.
  static Arenas& of_process();

  /// Zero-filled; freed with the last tensor that views it. @throws CommError, Error
  [[nodiscard]] at::Tensor allocate(std::size_t num_bytes);

  /// Where [data, data + num_bytes) lies, if it lies in one arena.
  [[nodiscard]] std::optional<Location> find(const void* data, std::size_t num_bytes);

 private:
  struct Arena {
    File file;
    std::uint64_t inode = 0;
    std::unique_ptr<Mapping> mapping;
  };
  void free(std::uintptr_t begin);

  std::mutex mutex_;
  std::map<std::uintptr_t, Arena> arenas_;  ///< By first address.
};

/// Arenas for copies of buffers that peers cannot map; kept for the next operation, because fresh
/// pages cost more than the copy. Through them every byte moves twice, yet faster than the kernel
/// moves it once (process_vm_readv); the total is bounded, since it is memory on top of the user's.
///
/// Threads: all members may be called from any thread.
class StagingPool {
 public:
  static constexpr std::size_t kMostBytes = std::size_t{256} << 20;
  static StagingPool& of_process();

  /// Nothing if the total would exceed kMostBytes, unless `must`. @throws CommError, Error
  [[nodiscard]] std::optional<at::Tensor> take(std::size_t num_bytes, bool must);
  void give_back(at::Tensor memory);

 private:
  std::mutex mutex_;
  std::vector<at::Tensor> free_;
  std::size_t total_bytes_ = 0;  ///< Free and taken.
};

/// The arenas of another process, as this process has mapped them; for all groups together.
///
/// Threads: all members may be called from any thread.
class PeerArenas {
 public:
  explicit PeerArenas(std::int64_t pid) : pid_(pid) {}
  /// The one of `pid` in this process.
  [[nodiscard]] static std::shared_ptr<PeerArenas> of(std::int64_t pid);

  struct Memory {
    std::shared_ptr<const Mapping> mapping;  ///< Keeps `data` mapped.
    char* data = nullptr;
  };
  /// @throws CommError
  [[nodiscard]] Memory resolve(const Location& location);

 private:
  void drop_freed();

  std::int64_t pid_;
  std::mutex mutex_;
  std::map<std::uint64_t, std::shared_ptr<const Mapping>> mappings_;  ///< By inode.
};

}  // namespace hopshard::detail::shm
