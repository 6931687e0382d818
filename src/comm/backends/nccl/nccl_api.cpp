// The real NCCL, by dlopen.
#include "nccl_api.hpp"

#include <dlfcn.h>
#include <link.h>

#include <filesystem>
#include <mutex>
#include <vector>

#include "hopshard/core/error.hpp"

namespace hopshard::detail {
namespace {

constexpr const char* kLibrary = "libnccl.so.2";

/// Where the NCCL wheel lies if torch came as a wheel; empty if no torch library is loaded. The
/// wheel's folder is named only in the RPATH of torch's CUDA libraries.
std::string path_beside_torch() {
  std::string torch;
  dl_iterate_phdr(
      [](dl_phdr_info* loaded, std::size_t, void* result) {
        const std::string_view name = loaded->dlpi_name == nullptr ? "" : loaded->dlpi_name;
        if (!name.ends_with("/libtorch_cpu.so")) {
          return 0;
        }
        *static_cast<std::string*>(result) = name;
        return 1;
      },
      &torch);
  if (torch.empty()) {
    return {};
  }
  // <site-packages>/torch/lib/libtorch_cpu.so
  const auto packages = std::filesystem::path(torch).parent_path().parent_path().parent_path();
  return (packages / "nvidia" / "nccl" / "lib" / kLibrary).string();
}

class LoadedNccl final : public NcclApi {
 public:
  explicit LoadedNccl(void* library) : library_(library) {
    find(get_version_, "ncclGetVersion");
    find(get_unique_id_, "ncclGetUniqueId");
    find(get_error_string_, "ncclGetErrorString");
    find(get_last_error_, "ncclGetLastError");
    find(comm_init_rank_config_, "ncclCommInitRankConfig");
    find(comm_split_, "ncclCommSplit");
    find(comm_get_async_error_, "ncclCommGetAsyncError");
    find(comm_finalize_, "ncclCommFinalize");
    find(comm_destroy_, "ncclCommDestroy");
    find(comm_abort_, "ncclCommAbort");
    find(group_start_, "ncclGroupStart");
    find(group_end_, "ncclGroupEnd");
    find(all_gather_, "ncclAllGather");
    find(reduce_scatter_, "ncclReduceScatter");
    find(all_reduce_, "ncclAllReduce");
    find(broadcast_, "ncclBroadcast");
    int version = 0;
    if (get_version_(&version) == ncclSuccess && version >= kNcclWithRegistration) {
      find(comm_register_, "ncclCommRegister");
      find(comm_deregister_, "ncclCommDeregister");
      find(mem_alloc_, "ncclMemAlloc");
      find(mem_free_, "ncclMemFree");
    }
  }

  ncclResult_t get_version(int* version) override { return get_version_(version); }
  ncclResult_t get_unique_id(ncclUniqueId* id) override { return get_unique_id_(id); }
  const char* get_error_string(ncclResult_t result) override { return get_error_string_(result); }
  const char* get_last_error(ncclComm_t comm) override { return get_last_error_(comm); }

  ncclResult_t comm_init_rank_config(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank,
                                     ncclConfig_t* config) override {
    return comm_init_rank_config_(comm, num_ranks, id, rank, config);
  }
  ncclResult_t comm_split(ncclComm_t comm, int color, int key, ncclComm_t* part,
                          ncclConfig_t* config) override {
    return comm_split_(comm, color, key, part, config);
  }
  ncclResult_t comm_get_async_error(ncclComm_t comm, ncclResult_t* error) override {
    return comm_get_async_error_(comm, error);
  }
  ncclResult_t comm_finalize(ncclComm_t comm) override { return comm_finalize_(comm); }
  ncclResult_t comm_destroy(ncclComm_t comm) override { return comm_destroy_(comm); }
  ncclResult_t comm_abort(ncclComm_t comm) override { return comm_abort_(comm); }

  ncclResult_t comm_register(ncclComm_t comm, void* memory, std::size_t num_bytes,
                             void** handle) override {
    return comm_register_ == nullptr ? ncclInvalidUsage
                                     : comm_register_(comm, memory, num_bytes, handle);
  }
  ncclResult_t comm_deregister(ncclComm_t comm, void* handle) override {
    return comm_deregister_ == nullptr ? ncclInvalidUsage : comm_deregister_(comm, handle);
  }
  ncclResult_t mem_alloc(void** memory, std::size_t num_bytes) override {
    return mem_alloc_ == nullptr ? ncclInvalidUsage : mem_alloc_(memory, num_bytes);
  }
  ncclResult_t mem_free(void* memory) override {
    return mem_free_ == nullptr ? ncclInvalidUsage : mem_free_(memory);
  }

  ncclResult_t group_start() override { return group_start_(); }
  ncclResult_t group_end() override { return group_end_(); }
  ncclResult_t all_gather(const void* input, void* output, std::size_t count, ncclDataType_t type,
                          ncclComm_t comm, cudaStream_t stream) override {
    return all_gather_(input, output, count, type, comm, stream);
  }
  ncclResult_t reduce_scatter(const void* input, void* output, std::size_t count,
                              ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                              cudaStream_t stream) override {
    return reduce_scatter_(input, output, count, type, op, comm, stream);
  }
  ncclResult_t all_reduce(const void* input, void* output, std::size_t count, ncclDataType_t type,
                          ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) override {
    return all_reduce_(input, output, count, type, op, comm, stream);
  }
  ncclResult_t broadcast(const void* input, void* output, std::size_t count, ncclDataType_t type,
                         int root, ncclComm_t comm, cudaStream_t stream) override {
    return broadcast_(input, output, count, type, root, comm, stream);
  }

 private:
  template <typename Function>
  void find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library_, name));
    HOPSHARD_CHECK(function != nullptr, ConfigError, kLibrary, " has no ", name,
                   ": it is older than NCCL ", nccl_version_text(kOldestNccl), " or damaged");
  }

  void* library_;  ///< Never closed: torch uses it too, and its threads may outlive us.
  decltype(&ncclGetVersion) get_version_ = nullptr;
  decltype(&ncclGetUniqueId) get_unique_id_ = nullptr;
  decltype(&ncclGetErrorString) get_error_string_ = nullptr;
  decltype(&ncclGetLastError) get_last_error_ = nullptr;
  decltype(&ncclCommInitRankConfig) comm_init_rank_config_ = nullptr;
  decltype(&ncclCommSplit) comm_split_ = nullptr;
  decltype(&ncclCommGetAsyncError) comm_get_async_error_ = nullptr;
  decltype(&ncclCommFinalize) comm_finalize_ = nullptr;
  decltype(&ncclCommDestroy) comm_destroy_ = nullptr;
  decltype(&ncclCommAbort) comm_abort_ = nullptr;
  // Spelled out: the headers may be older than these functions.
  ncclResult_t (*comm_register_)(ncclComm_t, void*, std::size_t, void**) = nullptr;
  ncclResult_t (*comm_deregister_)(ncclComm_t, void*) = nullptr;
  ncclResult_t (*mem_alloc_)(void**, std::size_t) = nullptr;
  ncclResult_t (*mem_free_)(void*) = nullptr;
  decltype(&ncclGroupStart) group_start_ = nullptr;
  decltype(&ncclGroupEnd) group_end_ = nullptr;
  decltype(&ncclAllGather) all_gather_ = nullptr;
  decltype(&ncclReduceScatter) reduce_scatter_ = nullptr;
  decltype(&ncclAllReduce) all_reduce_ = nullptr;
  decltype(&ncclBroadcast) broadcast_ = nullptr;
};

std::shared_ptr<NcclApi> load() {
  std::vector<std::string> paths = {kLibrary};
  if (std::string beside = path_beside_torch(); !beside.empty()) {
    paths.push_back(std::move(beside));
  }
  std::string tried;
  for (const std::string& path : paths) {
    if (void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
      return std::make_shared<LoadedNccl>(library);
    }
    const char* const reason = dlerror();
    tried += concatenate(tried.empty() ? "" : "; ", reason == nullptr ? path.c_str() : reason);
  }
  throw ConfigError(concatenate("NCCL could not be loaded (", tried,
                                "): install a torch wheel with CUDA, or put the folder of ",
                                kLibrary, " into LD_LIBRARY_PATH"));
}

}  // namespace

std::shared_ptr<NcclApi> load_nccl() {
  static std::mutex mutex;
  static std::shared_ptr<NcclApi> api;
  const std::lock_guard lock(mutex);
  if (!api) {
    api = load();  // A failure is tried again: the user may load torch's CUDA libraries meanwhile.
  }
  return api;
}

int check_nccl_version(NcclApi& api) {
  int version = 0;
  const ncclResult_t result = api.get_version(&version);
  HOPSHARD_CHECK(result == ncclSuccess, ConfigError,
                 "NCCL does not tell its version: ", api.get_error_string(result));
  HOPSHARD_CHECK(version >= kOldestNccl && version / 10'000 == NCCL_MAJOR, ConfigError, "NCCL ",
                 nccl_version_text(version), " is loaded, but hopshard needs ",
                 nccl_version_text(kOldestNccl), " or newer of NCCL ", NCCL_MAJOR,
                 "; install the one that torch came with");
  return version;
}

std::string nccl_version_text(int version) {
  // The code had four digits up to 2.8 and has five since.
  const int scale = version < 10'000 ? 1'000 : 10'000;
  return concatenate(version / scale, '.', version % scale / 100, '.', version % 100);
}

}  // namespace hopshard::detail
