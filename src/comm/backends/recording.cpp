#include "hopshard/comm/recording.hpp"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "../reduce_parts.hpp"
#include "hopshard/core/error.hpp"

namespace hopshard {
namespace {

std::string_view text_before(std::string_view text, char stop) {
  return text.substr(0, text.find(stop));
}

/// The parts of "comm/<group>/<op>/<kind>/<quantity>"; a group's name may not hold '/'.
std::string without_slash(std::string_view text) {
  std::string result(text);
  for (char& letter : result) {
    letter = letter == '/' ? '_' : letter;
  }
  return result;
}

class RecordingCommunicator final : public Communicator {
 public:
  RecordingCommunicator(CommunicatorPtr inner, Group group, std::shared_ptr<Meter> meter,
                        int ranks_per_node, std::shared_ptr<CallLog> log)
      : Communicator(std::move(group)),
        inner_(std::move(inner)),
        meter_(std::move(meter)),
        ranks_per_node_(ranks_per_node),
        log_(std::move(log)) {
    const auto& ranks = this->group().ranks;
    const auto next_member = static_cast<std::size_t>((rank() + 1) % size());
    const bool same_node =
        this->group().global_rank() / ranks_per_node == ranks[next_member] / ranks_per_node;
    link_ = same_node ? "intra_node" : "inter_node";
  }

  [[nodiscard]] std::string_view backend() const noexcept override {
    return inner_ ? inner_->backend() : "recording";
  }

  void group_begin() override {
    if (inner_) {
      inner_->group_begin();
    }
  }
  void group_end() override {
    if (inner_) {
      inner_->group_end();
    }
  }

  void abort(std::string_view reason) override {
    if (inner_) {
      inner_->abort(reason);
    }
  }

 private:
  WorkPtr do_all_gather(at::Tensor output, at::Tensor input, const CommOptions& options) override {
    count("all_gather", options, output, ring_bytes(output));
    if (inner_) {
      return inner_->all_gather(std::move(output), std::move(input), options);
    }
    const at::NoGradGuard no_grad;
    const std::int64_t numel = input.numel();
    const at::Tensor flat_output = output.view({output.numel()});
    const at::Tensor flat_input = input.view({numel});
    for (std::int64_t slot = 0; slot < size(); ++slot) {
      const at::Tensor part = flat_output.narrow(0, slot * numel, numel);
      if (part.const_data_ptr() != flat_input.const_data_ptr()) {
        part.copy_(flat_input);
      }
    }
    return make_finished_work();
  }

  WorkPtr do_reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                            const CommOptions& options) override {
    count("reduce_scatter", options, input, ring_bytes(input));
    if (inner_) {
      return inner_->reduce_scatter(std::move(output), std::move(input), op, options);
    }
    const at::NoGradGuard no_grad;
    const std::int64_t numel = output.numel();
    const at::Tensor part = input.view({input.numel()}).narrow(0, group().my_slot() * numel, numel);
    const std::vector<at::Tensor> parts(static_cast<std::size_t>(size()), part);
    detail::reduce_tensors(output.view({numel}), parts, op, options.accumulate);
    return make_finished_work();
  }

  WorkPtr do_all_reduce(at::Tensor tensor, ReduceOp op, const CommOptions& options) override {
    count("all_reduce", options, tensor, 2 * (size() - 1) * bytes_of(tensor) / size());
    if (inner_) {
      return inner_->all_reduce(std::move(tensor), op, options);
    }
    const at::NoGradGuard no_grad;
    reduce_equal_data(tensor, op);
    return make_finished_work();
  }

  WorkPtr do_broadcast(at::Tensor tensor, int root, const CommOptions& options) override {
    const bool is_last = (rank() + 1) % size() == root;
    count("broadcast", options, tensor, is_last ? 0 : bytes_of(tensor));
    if (inner_) {
      return inner_->broadcast(std::move(tensor), root, options);
    }
    return make_finished_work();
  }

  void do_barrier(const CommOptions& options) override {
    count("barrier", options, at::Tensor(), 0);
    if (inner_) {
      inner_->barrier(options);
    }
  }

  CommunicatorPtr do_split(Group part) override {
    CommunicatorPtr inner = inner_ ? inner_->split(part) : nullptr;
    return std::make_shared<RecordingCommunicator>(std::move(inner), std::move(part), meter_,
                                                   ranks_per_node_, log_);
  }

  at::Tensor do_allocate(std::int64_t num_bytes) override {
    return inner_ ? inner_->allocate(num_bytes) : Communicator::do_allocate(num_bytes);
  }

  void do_register_memory(const at::Tensor& memory) override {
    if (inner_) {
      inner_->register_memory(memory);
    }
  }

  void reduce_equal_data(const at::Tensor& tensor, ReduceOp op) const {
    if (op == ReduceOp::kSum) {
      tensor.mul_(size());
    }
  }

  static std::int64_t bytes_of(const at::Tensor& tensor) {
    return static_cast<std::int64_t>(tensor.nbytes());
  }

  [[nodiscard]] std::int64_t ring_bytes(const at::Tensor& whole) const {
    return bytes_of(whole) / size() * (size() - 1);
  }

  void count(std::string_view op, const CommOptions& options, const at::Tensor& whole,
             std::int64_t sent_bytes) {
    const std::string_view kind =
        options.tag.empty() ? std::string_view("untagged") : text_before(options.tag, '/');
    const std::string prefix = detail::concatenate(
        "comm/", without_slash(text_before(group().name, '[')), "/", op, "/", kind, "/");
    const std::string sent = detail::concatenate("sent_", link_, "_bytes");
    meter_->add(prefix + "calls");
    meter_->add(prefix + "bytes", whole.defined() ? bytes_of(whole) : 0);
    meter_->add(prefix + sent, sent_bytes);
    meter_->add("comm/" + sent, sent_bytes);
    if (log_) {
      log_->append({std::string(op), options.tag, group().name, whole.defined() ? whole.numel() : 0,
                    whole.defined() ? whole.scalar_type() : at::ScalarType::Undefined});
    }
  }

  CommunicatorPtr inner_;
  std::shared_ptr<Meter> meter_;
  int ranks_per_node_;
  std::shared_ptr<CallLog> log_;
  std::string_view link_;
};

}  // namespace

void CallLog::append(RecordedCall call) {
  const std::lock_guard lock(mutex_);
  calls_.push_back(std::move(call));
}

std::vector<RecordedCall> CallLog::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

void CallLog::clear() {
  const std::lock_guard lock(mutex_);
  calls_.clear();
}

CommunicatorPtr make_recording_communicator(CommunicatorPtr inner, Group group,
                                            std::shared_ptr<Meter> meter, int ranks_per_node,
                                            std::shared_ptr<CallLog> log) {
  group.validate();
  HOPSHARD_CHECK(meter != nullptr, InvalidArgument,
                 "a recording communicator needs a Meter to count into");
  HOPSHARD_CHECK(ranks_per_node >= 1, InvalidArgument, "ranks_per_node must be at least 1, got ",
                 ranks_per_node);
  if (inner) {
    HOPSHARD_CHECK(inner->group().ranks == group.ranks && inner->rank() == group.rank,
                   InvalidArgument, "the recording communicator of group '", group.name, "' (rank ",
                   group.rank, " of ", group.size(), ") was given an inner one of group '",
                   inner->group().name, "' (rank ", inner->rank(), " of ", inner->size(),
                   "); both must have the same ranks");
  }
  return std::make_shared<RecordingCommunicator>(std::move(inner), std::move(group),
                                                 std::move(meter), ranks_per_node, std::move(log));
}

std::int64_t comm_total(const Meter& meter, std::string_view quantity, const CommFilter& filter) {
  std::int64_t total = 0;
  for (const auto& [name, value] : meter.counters()) {
    std::vector<std::string_view> parts;
    std::string_view rest = name;
    while (parts.size() < 4 && rest.find('/') != std::string_view::npos) {
      parts.push_back(text_before(rest, '/'));
      rest.remove_prefix(parts.back().size() + 1);
    }
    const auto matches = [](const std::string& wanted, std::string_view given) {
      return wanted.empty() || wanted == given;
    };
    if (parts.size() == 4 && parts[0] == "comm" && rest == quantity &&
        matches(filter.group, parts[1]) && matches(filter.op, parts[2]) &&
        matches(filter.kind, parts[3])) {
      total += value;
    }
  }
  return total;
}

}  // namespace hopshard
