// Turns the contract's calls into NCCL's: which of its ranks is which slot, what goes through
// scratch memory, who keeps it alive. Order, waiting and failing are NcclGroup's.
#include "nccl_communicator.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "../../describe.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/core/log.hpp"
#include "nccl_group.hpp"

namespace hopshard::detail {
namespace {

using std::chrono::milliseconds;

constexpr std::string_view kBackend = "nccl";

ncclDataType_t nccl_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBool:
    case at::kByte:
      return ncclUint8;
    case at::kChar:
      return ncclInt8;
    case at::kInt:
      return ncclInt32;
    case at::kLong:
      return ncclInt64;
    case at::kHalf:
      return ncclFloat16;
    case at::kBFloat16:
      return ncclBfloat16;
    case at::kFloat:
      return ncclFloat32;
    case at::kDouble:
      return ncclFloat64;
    default:
      throw InvalidArgument(concatenate("NCCL has no type for ", dtype));
  }
}

ncclRedOp_t nccl_op(ReduceOp op) { return op == ReduceOp::kSum ? ncclSum : ncclMax; }

/// What all communicators split from one another share.
struct Family {
  std::shared_ptr<NcclApi> api;
  std::shared_ptr<DeviceApi> device_api;
  at::Device device = at::kCPU;
  int version = 0;
  NcclOptions options;

  std::mutex mutex;
  std::vector<std::pair<void*, std::size_t>> registered;
  std::vector<std::weak_ptr<NcclGroup>> groups;
};

class NcclWork final : public Work {
 public:
  NcclWork(std::shared_ptr<NcclGroup> group, NcclOperationPtr operation)
      : group_(std::move(group)),
        operation_(std::move(operation)),
        num_exceptions_(std::uncaught_exceptions()) {}

  ~NcclWork() override {
    if (waited_) {
      return;
    }
    try {
      if (std::uncaught_exceptions() > num_exceptions_) {
        group_->withdraw(*operation_);
      } else {
        wait();
      }
    } catch (const std::exception& error) {
      HOPSHARD_LOG(kError, "a work was dropped without wait() and failed: ", error.what());
    }
  }

  void wait() override {
    waited_ = true;
    group_->wait(*operation_);
  }

  bool test() override { return group_->test(*operation_); }

 private:
  std::shared_ptr<NcclGroup> group_;
  NcclOperationPtr operation_;
  int num_exceptions_;
  bool waited_ = false;
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::shared_ptr<Family> family, std::unique_ptr<NcclComm> comm, StorePtr store,
                   Group group, milliseconds timeout)
      : Communicator(group),
        family_(std::move(family)),
        store_(store),
        timeout_(timeout),
        group_state_(std::make_shared<NcclGroup>(
            family_->device_api, family_->device, std::move(comm), std::move(store),
            std::move(group),
            NcclGroupOptions{family_->options.check_calls, family_->options.watch_interval})) {
    const std::lock_guard lock(family_->mutex);
    if (group_state_->comm() != nullptr) {
      for (const auto& [memory, num_bytes] : family_->registered) {
        group_state_->comm()->register_memory(memory, num_bytes);
      }
      family_->groups.push_back(group_state_);
    }
  }

  ~NcclCommunicator() override { group_state_->close(); }

  [[nodiscard]] std::string_view backend() const noexcept override { return kBackend; }

  void group_begin() override { group_state_->hold(); }
  void group_end() override { group_state_->release_held(); }

  void abort(std::string_view reason) override { group_state_->abort(reason); }

 private:
  WorkPtr do_all_gather(at::Tensor output, at::Tensor input, const CommOptions& options) override {
    auto operation =
        make_operation({.op = "all_gather", .numel = input.numel(), .dtype = input.scalar_type()},
                       options, {output, input});
    if (input.numel() > 0) {
      operation->launch = [api = family_->api, output, input](ncclComm_t comm,
                                                              cudaStream_t stream) {
        return api->all_gather(input.const_data_ptr(), output.mutable_data_ptr(), count_of(input),
                               nccl_type(input.scalar_type()), comm, stream);
      };
    }
    return issue(std::move(operation));
  }

  WorkPtr do_reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                            const CommOptions& options) override {
    auto operation = make_operation({.op = "reduce_scatter",
                                     .numel = output.numel(),
                                     .dtype = output.scalar_type(),
                                     .reduce_op = op},
                                    options, {output, input});
    const std::int64_t numel = output.numel();
    if (numel == 0) {
      return issue(std::move(operation));
    }
    at::Tensor sent = input;
    at::Tensor received = output;
    if (has_to_widen(input, op)) {
      sent = at::empty({input.numel()}, input.options().dtype(at::kFloat));
      received = sent.narrow(0, group().my_slot() * numel, numel);
      operation->prepare = [sent, input] { copy(sent, input); };
    } else if (options.accumulate) {
      received = at::empty({numel}, output.options());
    }
    operation->launch = [api = family_->api, sent, received, op](ncclComm_t comm,
                                                                 cudaStream_t stream) {
      return api->reduce_scatter(sent.const_data_ptr(), received.mutable_data_ptr(),
                                 count_of(received), nccl_type(sent.scalar_type()), nccl_op(op),
                                 comm, stream);
    };
    if (!received.is_same(output)) {
      operation->tensors.push_back(sent);
      operation->tensors.push_back(received);
      operation->finish = [received, output, op, accumulate = options.accumulate] {
        add_into(output, received, op, accumulate);
      };
    }
    return issue(std::move(operation));
  }

  WorkPtr do_all_reduce(at::Tensor tensor, ReduceOp op, const CommOptions& options) override {
    auto operation = make_operation({.op = "all_reduce",
                                     .numel = tensor.numel(),
                                     .dtype = tensor.scalar_type(),
                                     .reduce_op = op},
                                    options, {tensor});
    if (tensor.numel() == 0) {
      return issue(std::move(operation));
    }
    at::Tensor sent = tensor;
    if (has_to_widen(tensor, op)) {
      sent = at::empty({tensor.numel()}, tensor.options().dtype(at::kFloat));
      operation->tensors.push_back(sent);
      operation->prepare = [sent, tensor] { copy(sent, tensor); };
      operation->finish = [sent, tensor] { copy(tensor, sent); };
    }
    operation->launch = [api = family_->api, sent, op](ncclComm_t comm, cudaStream_t stream) {
      return api->all_reduce(sent.const_data_ptr(), sent.mutable_data_ptr(), count_of(sent),
                             nccl_type(sent.scalar_type()), nccl_op(op), comm, stream);
    };
    return issue(std::move(operation));
  }

  WorkPtr do_broadcast(at::Tensor tensor, int root, const CommOptions& options) override {
    auto operation = make_operation(
        {.op = "broadcast", .numel = tensor.numel(), .dtype = tensor.scalar_type(), .root = root},
        options, {tensor});
    if (tensor.numel() > 0) {
      operation->launch = [api = family_->api, tensor, root = group().slot_of(root)](
                              ncclComm_t comm, cudaStream_t stream) {
        return api->broadcast(tensor.const_data_ptr(), tensor.mutable_data_ptr(), count_of(tensor),
                              nccl_type(tensor.scalar_type()), root, comm, stream);
      };
    }
    return issue(std::move(operation));
  }

  void do_barrier(const CommOptions& options) override {
    const at::Tensor token =
        at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(family_->device));
    const auto operation = make_operation({.op = "barrier"}, options, {token});
    operation->launch = [api = family_->api, token](ncclComm_t comm, cudaStream_t stream) {
      return api->all_reduce(token.const_data_ptr(), token.mutable_data_ptr(), 1, ncclInt32,
                             ncclSum, comm, stream);
    };
    group_state_->issue(operation);
    group_state_->wait_on_host(*operation);
  }

  CommunicatorPtr do_split(Group part) override {
    std::string key = "split/" + part.name;
    for (const int rank : part.ranks) {
      key += concatenate('/', rank);
    }
    const int number = num_splits_[key]++;
    StorePtr store = make_prefix_store(store_, concatenate(key, '/', number));
    std::unique_ptr<NcclComm> comm;
    if (part.size() > 1) {
      const NcclConnect connect{family_->api, store, part, timeout_, connect_text("split", part)};
      Peers peers(store, part);
      comm = part.size() == size() ? split_nccl_comm(*group_state_->comm(), connect, peers)
                                   : make_nccl_comm(connect, peers);
    }
    return std::make_shared<NcclCommunicator>(family_, std::move(comm), std::move(store),
                                              std::move(part), timeout_);
  }

  at::Tensor do_allocate(std::int64_t num_bytes) override {
    const auto options = at::TensorOptions().dtype(at::kByte).device(family_->device);
    if (family_->version < kNcclWithRegistration) {
      return at::zeros({num_bytes}, options);
    }
    void* memory = nullptr;
    const auto rounded = static_cast<std::size_t>(std::max<std::int64_t>(num_bytes, 1));
    const ncclResult_t result = family_->api->mem_alloc(&memory, rounded);
    HOPSHARD_CHECK(result == ncclSuccess, Error, "NCCL could not allocate ", rounded,
                   " bytes for group '", group().name, "' on ", family_->device, ": ",
                   family_->api->get_error_string(result));
    at::Tensor tensor = at::from_blob(
        memory, {num_bytes},
        [family = family_](void* data) {
          try {
            // Freeing unmaps at once, whatever still runs.
            family->device_api->synchronize(family->device);
          } catch (const std::exception& error) {
            HOPSHARD_LOG(kError, "the device is lost: ", error.what());
          }
          if (family->api->mem_free(data) != ncclSuccess) {
            HOPSHARD_LOG(kWarning, "NCCL could not free memory");
          }
        },
        options, family_->device);
    tensor.zero_();
    return tensor;
  }

  void do_register_memory(const at::Tensor& memory) override {
    if (family_->version < kNcclWithRegistration || memory.nbytes() == 0) {
      return;
    }
    check_device(memory, describe_call(kBackend, "register_memory", "", group()));
    void* const data = memory.mutable_data_ptr();
    const std::lock_guard lock(family_->mutex);
    family_->registered.emplace_back(data, memory.nbytes());
    std::erase_if(family_->groups, [](const auto& other) { return other.expired(); });
    for (const auto& other : family_->groups) {
      if (const auto alive = other.lock()) {
        alive->comm()->register_memory(data, memory.nbytes());
      }
    }
  }

  void check_device(const at::Tensor& tensor, const std::string& call_text) const {
    HOPSHARD_CHECK(tensor.device() == family_->device, InvalidArgument, call_text,
                   ": a tensor is on ", tensor.device(), ", but this communicator was made for ",
                   family_->device, ", the current device of the thread that connected it");
  }

  NcclOperationPtr make_operation(OperationText text, const CommOptions& options,
                                  std::vector<at::Tensor> tensors) const {
    auto operation = std::make_shared<NcclOperation>();
    text.tag = options.tag;
    operation->call_text = describe_call(kBackend, text.op, options.tag, group());
    operation->text = to_string(text);
    operation->limit = options.timeout.count() > 0 ? options.timeout : timeout_;
    for (const at::Tensor& tensor : tensors) {
      check_device(tensor, operation->call_text);
    }
    operation->tensors = std::move(tensors);
    return operation;
  }

  WorkPtr issue(NcclOperationPtr operation) {
    group_state_->issue(operation);
    return std::make_unique<NcclWork>(group_state_, std::move(operation));
  }

  [[nodiscard]] bool has_to_widen(const at::Tensor& tensor, ReduceOp op) const {
    const at::ScalarType dtype = tensor.scalar_type();
    return (dtype == at::kBFloat16 || dtype == at::kHalf) && op == ReduceOp::kSum &&
           !family_->options.native_low_precision_sums;
  }

  static std::size_t count_of(const at::Tensor& tensor) {
    return static_cast<std::size_t>(tensor.numel());
  }

  static void copy(const at::Tensor& to, const at::Tensor& from) {
    const at::NoGradGuard no_grad;
    to.view({to.numel()}).copy_(from.view({from.numel()}));
  }

  /// output = (output op) received, rounded once.
  static void add_into(const at::Tensor& output, const at::Tensor& received, ReduceOp op,
                       bool accumulate) {
    const at::NoGradGuard no_grad;
    const at::Tensor flat = output.view({output.numel()});
    if (!accumulate) {
      flat.copy_(received);
    } else if (op == ReduceOp::kSum) {
      flat.copy_(received.add_(flat));
    } else {
      flat.copy_(at::maximum(received, flat));
    }
  }

  static std::string connect_text(std::string_view op, const Group& group) {
    return describe_call(kBackend, op, "", group);
  }

  std::shared_ptr<Family> family_;
  StorePtr store_;
  milliseconds timeout_;
  std::shared_ptr<NcclGroup> group_state_;
  std::map<std::string, int> num_splits_;
};

}  // namespace

CommunicatorPtr connect_nccl(std::shared_ptr<NcclApi> api, std::shared_ptr<DeviceApi> device_api,
                             const ConnectOptions& connect, const NcclOptions& options) {
  connect.group.validate();
  HOPSHARD_CHECK(connect.store != nullptr, InvalidArgument, "nccl: group '", connect.group.name,
                 "' is connected without a store");
  HOPSHARD_CHECK(connect.timeout.count() > 0, InvalidArgument, "nccl: group '", connect.group.name,
                 "': the time limit must be positive, got ", connect.timeout.count(), " ms");
  HOPSHARD_CHECK(options.watch_interval.count() > 0, InvalidArgument, "nccl: group '",
                 connect.group.name, "': the watch interval must be positive, got ",
                 options.watch_interval.count(), " ms");
  const auto family = std::make_shared<Family>();
  family->version = check_nccl_version(*api);
  family->device = device_api->current_device();
  family->api = std::move(api);
  family->device_api = std::move(device_api);
  family->options = options;
  std::unique_ptr<NcclComm> comm;
  if (connect.group.size() > 1) {
    Peers peers(connect.store, connect.group);
    comm = make_nccl_comm({family->api, connect.store, connect.group, connect.timeout,
                           describe_call(kBackend, "connect", "", connect.group)},
                          peers);
  }
  return std::make_shared<NcclCommunicator>(family, std::move(comm), connect.store, connect.group,
                                            connect.timeout);
}

}  // namespace hopshard::detail
