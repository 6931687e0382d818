// The streams and events of the device whose memory NCCL moves, as an interface: tests put threads
// and CPU memory in their place. Next: nccl_group.hpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <nccl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

namespace hopshard::detail {

/// A point in a stream.
///
/// Threads: all members may be called from any thread.
class DeviceEvent {
 public:
  DeviceEvent() = default;
  virtual ~DeviceEvent() = default;
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  /// True once all work before it is done. Never blocks.
  [[nodiscard]] virtual bool is_done() = 0;
  /// What the calling thread queues on its current stream from now on runs after it. Does not
  /// block the host.
  virtual void make_current_stream_wait() = 0;
};

/// A queue of work on one device, apart from the caller's current stream.
class DeviceStream {
 public:
  DeviceStream() = default;
  virtual ~DeviceStream() = default;
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  [[nodiscard]] virtual cudaStream_t native() const = 0;
  /// What is queued here from now on runs after what the calling thread's current stream holds.
  virtual void follow_current_stream() = 0;
  /// Runs tensor operations on this stream; they may run later.
  virtual void run(std::function<void()> operations) = 0;
  [[nodiscard]] virtual std::shared_ptr<DeviceEvent> record() = 0;
};

class DeviceApi {
 public:
  DeviceApi() = default;
  virtual ~DeviceApi() = default;
  DeviceApi(const DeviceApi&) = delete;
  DeviceApi& operator=(const DeviceApi&) = delete;

  /// False where a tensor's reader is the host, so that Work::wait() must block it.
  [[nodiscard]] virtual bool has_streams() const = 0;
  /// The calling thread's.
  [[nodiscard]] virtual at::Device current_device() = 0;
  /// Makes `device` the calling thread's.
  virtual void set_current_device(at::Device device) = 0;
  [[nodiscard]] virtual std::shared_ptr<DeviceStream> make_stream(at::Device device) = 0;
  /// Blocks the host until the device has nothing to do; for memory that is about to be unmapped.
  virtual void synchronize(at::Device device) = 0;
  /// Held while operations are launched: see "several communicators on one GPU" in nccl.hpp.
  [[nodiscard]] virtual std::mutex& launch_mutex(at::Device device) = 0;
};

/// CUDA through torch's own device interface, so nothing of CUDA is linked.
/// @throws ConfigError  this torch has no CUDA, or sees no GPU.
[[nodiscard]] std::shared_ptr<DeviceApi> make_cuda_device_api();

}  // namespace hopshard::detail
