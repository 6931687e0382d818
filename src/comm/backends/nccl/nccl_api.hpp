// NCCL as an interface, so that a test can be NCCL: answer late, fail, hang. The real one is loaded
// at run time, because the library belongs to torch's wheel and a machine without a GPU must not
// pay for it. Nothing is interpreted here. Next: nccl_comm.hpp.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <memory>
#include <string>

namespace hopshard::detail {

static_assert(NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 0),
              "hopshard needs the headers of NCCL 2.18 or newer, for ncclCommSplit");

inline constexpr int kOldestNccl = NCCL_VERSION(2, 18, 0);
/// ncclMemAlloc and ncclCommRegister came with this one.
inline constexpr int kNcclWithRegistration = NCCL_VERSION(2, 19, 0);

/// The functions that the backend uses, with the names and arguments of nccl.h.
///
/// Threads: as NCCL's own.
class NcclApi {
 public:
  NcclApi() = default;
  virtual ~NcclApi() = default;
  NcclApi(const NcclApi&) = delete;
  NcclApi& operator=(const NcclApi&) = delete;

  [[nodiscard]] virtual ncclResult_t get_version(int* version) = 0;
  [[nodiscard]] virtual ncclResult_t get_unique_id(ncclUniqueId* id) = 0;
  [[nodiscard]] virtual const char* get_error_string(ncclResult_t result) = 0;
  [[nodiscard]] virtual const char* get_last_error(ncclComm_t comm) = 0;

  [[nodiscard]] virtual ncclResult_t comm_init_rank_config(ncclComm_t* comm, int num_ranks,
                                                           ncclUniqueId id, int rank,
                                                           ncclConfig_t* config) = 0;
  [[nodiscard]] virtual ncclResult_t comm_split(ncclComm_t comm, int color, int key,
                                                ncclComm_t* part, ncclConfig_t* config) = 0;
  [[nodiscard]] virtual ncclResult_t comm_get_async_error(ncclComm_t comm, ncclResult_t* error) = 0;
  [[nodiscard]] virtual ncclResult_t comm_finalize(ncclComm_t comm) = 0;
  [[nodiscard]] virtual ncclResult_t comm_destroy(ncclComm_t comm) = 0;
  [[nodiscard]] virtual ncclResult_t comm_abort(ncclComm_t comm) = 0;

  [[nodiscard]] virtual ncclResult_t comm_register(ncclComm_t comm, void* memory,
                                                   std::size_t num_bytes, void** handle) = 0;
  [[nodiscard]] virtual ncclResult_t comm_deregister(ncclComm_t comm, void* handle) = 0;
  [[nodiscard]] virtual ncclResult_t mem_alloc(void** memory, std::size_t num_bytes) = 0;
  [[nodiscard]] virtual ncclResult_t mem_free(void* memory) = 0;

  [[nodiscard]] virtual ncclResult_t group_start() = 0;
  [[nodiscard]] virtual ncclResult_t group_end() = 0;
  [[nodiscard]] virtual ncclResult_t all_gather(const void* input, void* output, std::size_t count,
                                                ncclDataType_t type, ncclComm_t comm,
                                                cudaStream_t stream) = 0;
  [[nodiscard]] virtual ncclResult_t reduce_scatter(const void* input, void* output,
                                                    std::size_t count, ncclDataType_t type,
                                                    ncclRedOp_t op, ncclComm_t comm,
                                                    cudaStream_t stream) = 0;
  [[nodiscard]] virtual ncclResult_t all_reduce(const void* input, void* output, std::size_t count,
                                                ncclDataType_t type, ncclRedOp_t op,
                                                ncclComm_t comm, cudaStream_t stream) = 0;
  [[nodiscard]] virtual ncclResult_t broadcast(const void* input, void* output, std::size_t count,
                                               ncclDataType_t type, int root, ncclComm_t comm,
                                               cudaStream_t stream) = 0;
};

/// libnccl.so.2 of this process, of the system, or beside torch, in this order; loaded once.
/// @throws ConfigError  where it was looked for and why it could not be used.
[[nodiscard]] std::shared_ptr<NcclApi> load_nccl();

/// The version of the library at run time, e.g. 22809.
/// @throws ConfigError  it is older than kOldestNccl, or not NCCL 2.
int check_nccl_version(NcclApi& api);

/// "2.28.9"
[[nodiscard]] std::string nccl_version_text(int version);

}  // namespace hopshard::detail
