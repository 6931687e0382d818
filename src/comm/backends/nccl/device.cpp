#include "device.hpp"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <utility>

#include "hopshard/core/error.hpp"

namespace hopshard::detail {
namespace {

c10::impl::VirtualGuardImpl cuda() { return c10::impl::VirtualGuardImpl(at::kCUDA); }

class CudaEvent final : public DeviceEvent {
 public:
  explicit CudaEvent(const c10::Stream& stream) : device_(stream.device()) {
    cuda().record(&event_, stream, device_.index(), c10::EventFlag::PYTORCH_DEFAULT);
  }
  ~CudaEvent() override { cuda().destroyEvent(event_, device_.index()); }

  bool is_done() override { return cuda().queryEvent(event_); }
  void make_current_stream_wait() override { cuda().block(event_, cuda().getStream(device_)); }
  void block(const c10::Stream& stream) const { cuda().block(event_, stream); }

 private:
  at::Device device_;
  void* event_ = nullptr;
};

class CudaStream final : public DeviceStream {
 public:
  // High priority, so that a gather is not queued behind the kernels that it feeds.
  explicit CudaStream(at::Device device)
      : stream_(cuda().getStreamFromGlobalPool(device, /*isHighPriority=*/true)) {}

  [[nodiscard]] cudaStream_t native() const override {
    return static_cast<cudaStream_t>(stream_.native_handle());
  }
  void follow_current_stream() override {
    CudaEvent(cuda().getStream(stream_.device())).block(stream_);
  }
  void run(std::function<void()> operations) override {
    const c10::StreamGuard guard(stream_);
    operations();
  }
  std::shared_ptr<DeviceEvent> record() override { return std::make_shared<CudaEvent>(stream_); }

 private:
  c10::Stream stream_;
};

class CudaDeviceApi final : public DeviceApi {
 public:
  [[nodiscard]] bool has_streams() const override { return true; }
  at::Device current_device() override { return cuda().getDevice(); }
  void set_current_device(at::Device device) override { cuda().setDevice(device); }
  std::shared_ptr<DeviceStream> make_stream(at::Device device) override {
    return std::make_shared<CudaStream>(device);
  }
  void synchronize(at::Device device) override { cuda().synchronizeDevice(device.index()); }
  std::mutex& launch_mutex(at::Device device) override {
    const std::lock_guard lock(mutex_);
    return launch_mutexes_[device.index()];
  }

 private:
  std::mutex mutex_;
  std::map<c10::DeviceIndex, std::mutex> launch_mutexes_;
};

}  // namespace

std::shared_ptr<DeviceApi> make_cuda_device_api() {
  HOPSHARD_CHECK(c10::impl::hasDeviceGuardImpl(at::kCUDA), ConfigError,
                 "torch's CUDA libraries are not loaded: this torch is for CPUs only, or a C++ "
                 "program does not link libtorch_cuda");
  HOPSHARD_CHECK(cuda().deviceCount() > 0, ConfigError,
                 "torch sees no NVIDIA GPU with a working driver");
  // One for all: the locks of launches are per device, not per caller.
  static const auto api = std::make_shared<CudaDeviceApi>();
  return api;
}

}  // namespace hopshard::detail
