// NCCL and a device without either: ranks are threads, their streams are threads too, and memory is
// the CPU's. Data really moves. As strict as the real one where that is where mistakes hide: ranks
// that disagree hang until each is aborted, a busy communicator refuses calls, sums are rounded at
// every addition, an orderly end waits for the peers. And it fails on demand.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/backends/nccl/device.hpp"
#include "comm/backends/nccl/nccl_api.hpp"

namespace hopshard::testing {

/// What one rank's NCCL does wrong. Names of functions are those of NcclApi.
struct FakeNcclFaults {
  int version = NCCL_VERSION_CODE;
  int num_busy_looks = 0;  ///< A communicator that connects or launches is busy for so many looks.
  std::map<std::string, ncclResult_t> results;  ///< Function -> what it returns, doing nothing.
  std::int64_t hang_at = -1;         ///< This collective of the rank never ends, but by an abort.
  std::int64_t async_error_at = -1;  ///< The same, and NCCL reports ncclRemoteError.
};

/// One rank's NCCL. Communicators meet those of other ranks in the process.
///
/// Threads: all members may be called from any thread.
class FakeNccl final : public detail::NcclApi {
 public:
  explicit FakeNccl(FakeNcclFaults faults = {});
  ~FakeNccl() override;

  /// The functions that were called, in order, but for questions.
  [[nodiscard]] std::vector<std::string> calls() const;
  [[nodiscard]] int count(const std::string& function) const;
  /// Calls that real NCCL does not allow, e.g. with a communicator that is busy or gone.
  [[nodiscard]] std::vector<std::string> misuses() const;

  ncclResult_t get_version(int* version) override;
  ncclResult_t get_unique_id(ncclUniqueId* id) override;
  const char* get_error_string(ncclResult_t result) override;
  const char* get_last_error(ncclComm_t comm) override;
  ncclResult_t comm_init_rank_config(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank,
                                     ncclConfig_t* config) override;
  ncclResult_t comm_split(ncclComm_t comm, int color, int key, ncclComm_t* part,
                          ncclConfig_t* config) override;
  ncclResult_t comm_get_async_error(ncclComm_t comm, ncclResult_t* error) override;
  ncclResult_t comm_finalize(ncclComm_t comm) override;
  ncclResult_t comm_destroy(ncclComm_t comm) override;
  ncclResult_t comm_abort(ncclComm_t comm) override;
  ncclResult_t comm_register(ncclComm_t comm, void* memory, std::size_t num_bytes,
                             void** handle) override;
  ncclResult_t comm_deregister(ncclComm_t comm, void* handle) override;
  ncclResult_t mem_alloc(void** memory, std::size_t num_bytes) override;
  ncclResult_t mem_free(void* memory) override;
  ncclResult_t group_start() override;
  ncclResult_t group_end() override;
  ncclResult_t all_gather(const void* input, void* output, std::size_t count, ncclDataType_t type,
                          ncclComm_t comm, cudaStream_t stream) override;
  ncclResult_t reduce_scatter(const void* input, void* output, std::size_t count,
                              ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                              cudaStream_t stream) override;
  ncclResult_t all_reduce(const void* input, void* output, std::size_t count, ncclDataType_t type,
                          ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) override;
  ncclResult_t broadcast(const void* input, void* output, std::size_t count, ncclDataType_t type,
                         int root, ncclComm_t comm, cudaStream_t stream) override;

  struct Clique;
  struct Comm;
  struct Collective;

 private:
  struct State;
  [[nodiscard]] ncclResult_t enter(const std::string& function);
  [[nodiscard]] ncclResult_t misuse(const std::string& what);
  [[nodiscard]] std::shared_ptr<Comm> find(ncclComm_t comm);
  [[nodiscard]] ncclResult_t collective(const std::string& function, ncclComm_t comm,
                                        cudaStream_t stream, Collective collective);
  [[nodiscard]] ncclResult_t launch(const std::shared_ptr<Comm>& comm,
                                    std::vector<std::pair<Collective, cudaStream_t>> collectives);

  std::unique_ptr<State> state_;
};

/// One rank's device: CPU memory.
class FakeDevice final : public detail::DeviceApi {
 public:
  /// @param has_streams  work on memory is queued on current_stream(); else the calling thread is
  ///                     the current stream, and waiting for an event blocks it.
  explicit FakeDevice(bool has_streams = false);
  ~FakeDevice() override;

  /// Requires has_streams().
  [[nodiscard]] detail::DeviceStream& current_stream();

  [[nodiscard]] bool has_streams() const override { return current_stream_ != nullptr; }
  at::Device current_device() override { return at::kCPU; }
  void set_current_device(at::Device /*device*/) override {}
  std::shared_ptr<detail::DeviceStream> make_stream(at::Device device) override;
  void synchronize(at::Device /*device*/) override {}
  std::mutex& launch_mutex(at::Device /*device*/) override { return launch_mutex_; }

 private:
  std::mutex launch_mutex_;
  std::shared_ptr<detail::DeviceStream> current_stream_;
};

}  // namespace hopshard::testing
