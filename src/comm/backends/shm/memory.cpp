#include "memory.hpp"

#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <iterator>
#include <system_error>

#include "hopshard/core/error.hpp"

namespace hopshard::detail::shm {
namespace {

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;
constexpr int kMadvCollapse = 25;  // Linux 6.1; Debian 12's headers do not name it.

/// The last page of an arena says that it is alive. Freeing punches a hole over the whole file, so
/// this becomes 0 with all of it, and the memory is back although peers may have it mapped.
constexpr std::uint64_t kAlive = 0x4552414E41454C41;

std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

std::atomic_ref<std::uint64_t> alive_word(const Mapping& mapping) {
  char* const page = mapping.data() + mapping.num_bytes() - kPageBytes;
  return std::atomic_ref<std::uint64_t>(*static_cast<std::uint64_t*>(static_cast<void*>(page)));
}

bool is_alive(const Mapping& mapping) {
  return alive_word(mapping).load(std::memory_order_acquire) == kAlive;
}

/// Takes all pages of a new mapping, as huge ones where the kernel has them. Small pages cost half
/// of the speed of memory that is read once: each is a walk through two page tables in a virtual
/// machine. Peers that map the file get its huge pages without asking.
void take_pages(const Mapping& mapping) {
  char* const data = mapping.data();
  const std::size_t huge_bytes = mapping.num_bytes() / kHugePageBytes * kHugePageBytes;
  // Most systems set shmem_enabled to "never"; collapsing on request works there too. It skips
  // extents without any page.
  for (std::size_t offset = 0; offset < huge_bytes; offset += kHugePageBytes) {
    ::madvise(data + offset, kPageBytes, MADV_POPULATE_WRITE);
  }
  if (huge_bytes > 0) {
    ::madvise(data, huge_bytes, kMadvCollapse);  // May fail: old kernel, fragmented memory.
  }
  // Running out of memory is an error here, and a SIGBUS at first touch.
  const std::size_t num_bytes = mapping.num_bytes();
  if (::madvise(data, num_bytes, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) {
    throw Error(
        concatenate("out of memory: ", num_bytes, " bytes of shared memory: ", error_text(errno)));
  }
}

}  // namespace

std::string error_text(int error) {
  return std::error_code(error, std::generic_category()).message();
}

File& File::operator=(File&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

File::~File() {
  if (descriptor_ >= 0) {
    ::close(descriptor_);
  }
}

std::uint64_t File::inode() const {
  struct stat status {};
  HOPSHARD_CHECK(::fstat(descriptor_, &status) == 0, CommError,
                 "fstat of shared memory: ", error_text(errno));
  return status.st_ino;
}

File make_memory_file(std::size_t num_bytes) {
  File file(::memfd_create("hopshard", MFD_CLOEXEC));
  HOPSHARD_CHECK(file.is_open(), CommError, "memfd_create: ", error_text(errno),
                 errno == EMFILE ? "; each allocate() needs one open file: raise `ulimit -n`" : "");
  HOPSHARD_CHECK(::ftruncate(file.get(), static_cast<off_t>(num_bytes)) == 0, CommError,
                 "ftruncate of a memfd to ", num_bytes, " bytes: ", error_text(errno));
  return file;
}

File open_memory_file_of(std::int64_t pid, int descriptor, std::uint64_t inode) {
  const std::string path = concatenate("/proc/", pid, "/fd/", descriptor);
  File file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  HOPSHARD_CHECK(file.is_open(), CommError, "open of ", path, ": ", error_text(errno));
  HOPSHARD_CHECK(file.inode() == inode, CommError, path, " is no longer the file it was");
  return file;
}

File make_named_file(const std::string& name, std::size_t num_bytes) {
  File file(::shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR));
  HOPSHARD_CHECK(file.is_open(), CommError, "shm_open: ", error_text(errno));
  int error = ::ftruncate(file.get(), static_cast<off_t>(num_bytes)) == 0 ? 0 : errno;
  if (error == 0) {
    error = ::posix_fallocate(file.get(), 0, static_cast<off_t>(num_bytes));
  }
  if (error != 0) {
    remove_named_file(name);
    throw CommError(
        concatenate("/dev/shm has no room for ", num_bytes, " bytes: ", error_text(error)));
  }
  return file;
}

File open_named_file(const std::string& name) {
  File file(::shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0));
  HOPSHARD_CHECK(file.is_open(), CommError,
                 "shm_open of another rank's segment: ", error_text(errno));
  return file;
}

void remove_named_file(const std::string& name) noexcept { ::shm_unlink(name.c_str()); }

Mapping::Mapping(const File& file, std::size_t num_bytes)
    : num_bytes_(num_bytes), reserved_bytes_(num_bytes) {
  // Huge pages need an address that is aligned to them: reserve more, and map inside of it.
  const bool is_huge = num_bytes >= kHugePageBytes;
  if (is_huge) {
    reserved_bytes_ += kHugePageBytes;
  }
  reserved_ = ::mmap(nullptr, reserved_bytes_, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  HOPSHARD_CHECK(reserved_ != MAP_FAILED, CommError, "mmap of ", num_bytes,
                 " bytes: ", error_text(errno));
  const auto begin = reinterpret_cast<std::uintptr_t>(reserved_);
  char* const target =
      static_cast<char*>(reserved_) + (is_huge ? round_up(begin, kHugePageBytes) - begin : 0);
  void* const mapped =
      ::mmap(target, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file.get(), 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    ::munmap(reserved_, reserved_bytes_);
    throw CommError(concatenate("mmap of ", num_bytes, " bytes: ", error_text(error)));
  }
  data_ = static_cast<char*>(mapped);
  if (is_huge) {
    ::madvise(mapped, num_bytes, MADV_HUGEPAGE);  // A hint; without it things are only slower.
  }
}

Mapping::~Mapping() { ::munmap(reserved_, reserved_bytes_); }

Arenas& Arenas::of_process() {
  // Never destroyed: tensors of static storage may outlive everything else. A forked child shares
  // the parent's arenas but must not free them.
  static std::mutex mutex;
  static std::map<pid_t, Arenas*>* const all = new std::map<pid_t, Arenas*>;
  const std::lock_guard lock(mutex);
  Arenas*& arenas = (*all)[::getpid()];
  if (arenas == nullptr) {
    arenas = new Arenas;
  }
  return *arenas;
}

at::Tensor Arenas::allocate(std::size_t num_bytes) {
  const std::size_t data_bytes = std::max(round_up(num_bytes, kPageBytes), kPageBytes);
  const std::size_t file_bytes = data_bytes + kPageBytes;
  Arena arena{.file = make_memory_file(file_bytes)};
  arena.inode = arena.file.inode();
  arena.mapping = std::make_unique<Mapping>(arena.file, file_bytes);
  take_pages(*arena.mapping);
  alive_word(*arena.mapping).store(kAlive, std::memory_order_release);
  char* const data = arena.mapping->data();
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  {
    const std::lock_guard lock(mutex_);
    arenas_.emplace(begin, std::move(arena));
  }
  const pid_t owner = ::getpid();
  return at::from_blob(
      data, {static_cast<std::int64_t>(num_bytes)},
      [this, begin, owner](void*) {
        if (::getpid() == owner) {
          free(begin);
        }
      },
      at::TensorOptions().dtype(at::kByte));
}

void Arenas::free(std::uintptr_t begin) {
  std::map<std::uintptr_t, Arena>::node_type node;
  {
    const std::lock_guard lock(mutex_);
    node = arenas_.extract(begin);
  }
  const Arena& arena = node.mapped();
  ::fallocate(arena.file.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
              static_cast<off_t>(arena.mapping->num_bytes()));
}

std::optional<Location> Arenas::find(const void* data, std::size_t num_bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const std::lock_guard lock(mutex_);
  auto next = arenas_.upper_bound(address);
  if (next == arenas_.begin()) {
    return std::nullopt;
  }
  const auto& [begin, arena] = *std::prev(next);
  if (address + num_bytes > begin + arena.mapping->num_bytes() - kPageBytes) {
    return std::nullopt;
  }
  return Location{.place = Location::Place::kArena,
                  .file = arena.file.get(),
                  .arena_id = arena.inode,
                  .arena_bytes = arena.mapping->num_bytes(),
                  .offset = address - begin,
                  .address = address};
}

StagingPool& StagingPool::of_process() {
  static std::mutex mutex;
  static auto* const all = new std::map<pid_t, StagingPool*>;
  const std::lock_guard lock(mutex);
  StagingPool*& pool = (*all)[::getpid()];
  if (pool == nullptr) {
    pool = new StagingPool;
  }
  return *pool;
}

std::optional<at::Tensor> StagingPool::take(std::size_t num_bytes, bool must) {
  const std::lock_guard lock(mutex_);
  const auto smallest = [&] {
    auto best = free_.end();
    for (auto memory = free_.begin(); memory != free_.end(); ++memory) {
      if (memory->nbytes() >= num_bytes &&
          (best == free_.end() || memory->nbytes() < best->nbytes())) {
        best = memory;
      }
    }
    return best;
  };
  if (const auto found = smallest(); found != free_.end()) {
    at::Tensor memory = std::move(*found);
    free_.erase(found);
    return memory;
  }
  constexpr std::size_t kUnit = std::size_t{1} << 20;
  const std::size_t rounded = round_up(num_bytes, kUnit);
  while (total_bytes_ + rounded > kMostBytes && !free_.empty()) {
    total_bytes_ -= free_.back().nbytes();
    free_.pop_back();
  }
  if (total_bytes_ + rounded > kMostBytes && !must) {
    return std::nullopt;
  }
  at::Tensor memory = Arenas::of_process().allocate(rounded);
  total_bytes_ += rounded;
  return memory;
}

void StagingPool::give_back(at::Tensor memory) {
  const std::lock_guard lock(mutex_);
  if (total_bytes_ > kMostBytes) {
    total_bytes_ -= memory.nbytes();
  } else {
    free_.push_back(std::move(memory));
  }
}

std::shared_ptr<PeerArenas> PeerArenas::of(std::int64_t pid) {
  static std::mutex mutex;
  static auto* const all = new std::map<std::int64_t, std::weak_ptr<PeerArenas>>;
  const std::lock_guard lock(mutex);
  std::erase_if(*all, [](const auto& entry) { return entry.second.expired(); });
  std::shared_ptr<PeerArenas> arenas = (*all)[pid].lock();
  if (arenas == nullptr) {
    arenas = std::make_shared<PeerArenas>(pid);
    (*all)[pid] = arenas;
  }
  return arenas;
}

PeerArenas::Memory PeerArenas::resolve(const Location& location) {
  const std::lock_guard lock(mutex_);
  auto found = mappings_.find(location.arena_id);
  if (found != mappings_.end() && !is_alive(*found->second)) {
    // A new file got the inode of one that was freed.
    mappings_.erase(found);
    found = mappings_.end();
  }
  if (found == mappings_.end()) {
    drop_freed();
    const File file = open_memory_file_of(pid_, location.file, location.arena_id);
    found =
        mappings_
            .emplace(location.arena_id, std::make_shared<const Mapping>(file, location.arena_bytes))
            .first;
  }
  return {found->second, found->second->data() + location.offset};
}

void PeerArenas::drop_freed() {
  std::erase_if(mappings_, [](const auto& entry) { return !is_alive(*entry.second); });
}

}  // namespace hopshard::detail::shm
