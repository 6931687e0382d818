#include "shm_communicator.hpp"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <utility>

#include "../../describe.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/core/hash.hpp"
#include "hopshard/core/log.hpp"
#include "memory.hpp"
#include "operation.hpp"

namespace hopshard::detail::shm {
namespace {

class ShmWork final : public Work {
 public:
  ShmWork(std::shared_ptr<SharedGroup> group, std::chrono::milliseconds timeout,
          std::shared_ptr<Operation> operation)
      : group_(std::move(group)), timeout_(timeout), last_(std::move(operation)) {}

  ~ShmWork() override {
    if (waited_) {
      return;
    }
    try {
      if (std::uncaught_exceptions() > num_exceptions_ && !test()) {
        group_->withdraw(*last_);
      }
      wait();
    } catch (const std::exception& error) {
      HOPSHARD_LOG(kError, "a work was dropped without wait() and failed: ", error.what());
    }
  }

  /// Another chunk of the same collective, issued after all so far.
  void append(std::shared_ptr<Operation> operation) {
    earlier_.push_back(std::exchange(last_, std::move(operation)));
  }

  void wait() override {
    waited_ = true;
    for (const auto& operation : earlier_) {
      group_->wait(*operation, timeout_);
    }
    group_->wait(*last_, timeout_);
  }

  bool test() override {
    // They end in order, except that a failure ends all.
    return group_->test(*last_);
  }

 private:
  std::shared_ptr<SharedGroup> group_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<Operation> last_;
  std::vector<std::shared_ptr<Operation>> earlier_;
  int num_exceptions_ = std::uncaught_exceptions();
  bool waited_ = false;
};

class ShmCommunicator final : public Communicator {
 public:
  ShmCommunicator(const ConnectOptions& options, const Restrictions& restrictions,
                  std::shared_ptr<SharedGroup> shared)
      : Communicator(options.group),
        store_(options.store),
        timeout_(options.timeout),
        restrictions_(restrictions),
        shared_(std::move(shared)) {}

  ~ShmCommunicator() override {
    if (shared_ != nullptr) {
      shared_->leave();
    }
  }

  [[nodiscard]] std::string_view backend() const noexcept override { return kBackend; }

  void abort(std::string_view reason) override {
    if (shared_ != nullptr) {
      shared_->abort(reason);
    }
  }

 protected:
  at::Tensor do_allocate(std::int64_t num_bytes) override {
    const bool has_arenas =
        shared_ != nullptr ? shared_->has_arenas() : !restrictions_.no_memory_files;
    if (!has_arenas) {
      return Communicator::do_allocate(num_bytes);
    }
    return Arenas::of_process().allocate(static_cast<std::size_t>(num_bytes));
  }

 private:
  WorkPtr do_all_gather(at::Tensor output, at::Tensor input, const CommOptions& options) override {
    CallRecord record{.kind = Kind::kAllGather};
    record.numel = input.numel();
    return issue(record, std::move(output), std::move(input), options);
  }

  WorkPtr do_reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                            const CommOptions& options) override {
    CallRecord record{.kind = Kind::kReduceScatter};
    record.reduce_op = static_cast<std::uint8_t>(op);
    record.numel = output.numel();
    return issue(record, std::move(output), std::move(input), options);
  }

  WorkPtr do_all_reduce(at::Tensor tensor, ReduceOp op, const CommOptions& options) override {
    CallRecord record{.kind = Kind::kAllReduce};
    record.reduce_op = static_cast<std::uint8_t>(op);
    record.numel = tensor.numel();
    return issue(record, std::move(tensor), at::Tensor(), options);
  }

  WorkPtr do_broadcast(at::Tensor tensor, int root, const CommOptions& options) override {
    CallRecord record{.kind = Kind::kBroadcast};
    record.root = root;
    record.numel = tensor.numel();
    return issue(record, std::move(tensor), at::Tensor(), options);
  }

  void do_barrier(const CommOptions& options) override {
    CallRecord record{.kind = Kind::kBarrier};
    record.dtype = static_cast<std::int8_t>(at::ScalarType::Undefined);
    issue(record, at::Tensor(), at::Tensor(), options)->wait();
  }

  CommunicatorPtr do_split(Group part) override {
    std::string prefix = "split/" + part.name;
    for (const int rank : part.ranks) {
      prefix += concatenate("/", rank);
    }
    {
      // Split again, the same part finds fresh keys.
      const std::lock_guard lock(split_mutex_);
      prefix += concatenate("/", num_splits_[prefix]++);
    }
    return connect(
        {.store = make_prefix_store(store_, prefix), .group = std::move(part), .timeout = timeout_},
        restrictions_);
  }

  WorkPtr issue(CallRecord record, at::Tensor output, at::Tensor input,
                const CommOptions& options) {
    set_tag(record, options.tag);
    std::size_t element_bytes = 1;
    if (output.defined()) {
      HOPSHARD_CHECK(
          output.device().is_cpu(), InvalidArgument,
          describe_call(kBackend, hopshard::to_string(record.kind), options.tag, group()),
          ": a tensor on ", output.device(),
          " cannot be moved; this backend moves CPU memory only");
      record.dtype = static_cast<std::int8_t>(output.scalar_type());
      element_bytes = c10::elementSize(output.scalar_type());
    }
    const std::size_t part_bytes = static_cast<std::size_t>(record.numel) * element_bytes;
    std::size_t chunk_bytes = shared_->chunk_bytes();
    if (record.kind == Kind::kReduceScatter) {
      chunk_bytes /= static_cast<std::size_t>(size());
    }
    // Whole elements, but not less than one: SharedGroup refuses what does not fit.
    chunk_bytes = std::max(chunk_bytes / element_bytes, std::size_t{1}) * element_bytes;
    const bool is_whole = shared_->chunk_bytes() == 0 || part_bytes <= chunk_bytes;
    const auto timeout = options.timeout.count() > 0 ? options.timeout : timeout_;
    std::unique_ptr<ShmWork> work;
    std::size_t begin = 0;
    do {
      const std::size_t bytes = is_whole ? part_bytes : std::min(chunk_bytes, part_bytes - begin);
      auto operation = std::make_shared<Operation>();
      operation->record = record;
      operation->tag = options.tag;
      operation->accumulate = options.accumulate;
      operation->part_bytes = bytes;
      operation->part_stride = part_bytes;
      operation->element_bytes = element_bytes;
      if (output.defined()) {
        operation->output_data = static_cast<char*>(output.mutable_data_ptr()) + begin;
      }
      if (input.defined()) {
        operation->input_data = static_cast<const char*>(input.const_data_ptr()) + begin;
      }
      operation->output = output;
      operation->input = input;
      shared_->issue(operation);
      if (work == nullptr) {
        work = std::make_unique<ShmWork>(shared_, timeout, std::move(operation));
      } else {
        work->append(std::move(operation));
      }
      begin += bytes;
      ++record.chunk;
    } while (begin < part_bytes);
    return work;
  }

  static void set_tag(CallRecord& record, const std::string& tag) {
    Fnv1a hash;
    for (const char letter : tag) {
      hash.add(static_cast<unsigned char>(letter));
    }
    record.tag_hash = hash.value();
    record.tag_bytes = static_cast<std::uint32_t>(std::min(tag.size(), CallRecord::kTagBytes));
    std::copy_n(tag.begin(), record.tag_bytes, record.tag.begin());
  }

  StorePtr store_;
  std::chrono::milliseconds timeout_;
  Restrictions restrictions_;
  std::shared_ptr<SharedGroup> shared_;
  std::mutex split_mutex_;
  std::map<std::string, int> num_splits_;
};

}  // namespace

CommunicatorPtr make_shm_communicator(const ConnectOptions& options,
                                      const Restrictions& restrictions,
                                      std::shared_ptr<SharedGroup> shared) {
  return std::make_shared<ShmCommunicator>(options, restrictions, std::move(shared));
}

}  // namespace hopshard::detail::shm
