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
    const auto node_of = [&](int member) {
      return ranks[static_cast<std::size_t>(member)] / ranks_per_node;
    };
    const int node = node_of(rank());
    next_is_elsewhere_ = node_of((rank() + 1) % size()) != node;
    for (int member = 0; member < size(); ++member) {
      num_on_node_ += node_of(member) == node ? 1 : 0;
    }
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

  [[nodiscard]] Algorithm algorithm(CollectiveOp op, std::int64_t num_bytes) const override {
    return inner_ ? inner_->algorithm(op, num_bytes) : Algorithm::kFlat;
  }

  void abort(std::string_view reason) override {
    if (inner_) {
      inner_->abort(reason);
    }
  }

 private:
  WorkPtr do_all_gather(at::Tensor output, at::Tensor input, const CommOptions& options) override {
    count(CollectiveOp::kAllGather, options, output);
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
    count(CollectiveOp::kReduceScatter, options, input);
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
    count(CollectiveOp::kAllReduce, options, tensor);
    if (inner_) {
      return inner_->all_reduce(std::move(tensor), op, options);
    }
    const at::NoGradGuard no_grad;
    reduce_equal_data(tensor, op);
    return make_finished_work();
  }

  WorkPtr do_broadcast(at::Tensor tensor, int root, const CommOptions& options) override {
    count(CollectiveOp::kBroadcast, options, tensor, root);
    if (inner_) {
      return inner_->broadcast(std::move(tensor), root, options);
    }
    return make_finished_work();
  }

  void do_barrier(const CommOptions& options) override {
    count(CollectiveOp::kBarrier, options, at::Tensor());
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

  struct SentBytes {
    std::int64_t intra_node = 0;
    std::int64_t inter_node = 0;
  };

  /// [Note: bytes sent]
  [[nodiscard]] SentBytes sent_bytes(CollectiveOp op, std::int64_t bytes, int root) const {
    if (inner_ && inner_->algorithm(op, bytes) == Algorithm::kHierarchical) {
      const std::int64_t num_nodes = size() / num_on_node_;
      const int place = rank() % num_on_node_;
      const bool root_rail = root >= 0 && place == root % num_on_node_;
      return {
          .intra_node = ring_bytes(op, bytes, num_on_node_,
                                   root >= 0 && (place + 1) % num_on_node_ == root % num_on_node_),
          .inter_node = op == CollectiveOp::kBroadcast
                            ? (root_rail ? ring_bytes(op, bytes, num_nodes,
                                                      (rank() + num_on_node_) % size() == root)
                                         : 0)
                            : ring_bytes(op, bytes / num_on_node_, num_nodes, false)};
    }
    const std::int64_t sent = ring_bytes(op, bytes, size(), (rank() + 1) % size() == root);
    return next_is_elsewhere_ ? SentBytes{.inter_node = sent} : SentBytes{.intra_node = sent};
  }

  /// What a member of a ring of `num_ranks` sends; `is_last`: it is in front of a broadcast's root.
  static std::int64_t ring_bytes(CollectiveOp op, std::int64_t bytes, std::int64_t num_ranks,
                                 bool is_last) {
    switch (op) {
      case CollectiveOp::kAllGather:
      case CollectiveOp::kReduceScatter:
        return bytes / num_ranks * (num_ranks - 1);
      case CollectiveOp::kAllReduce:
        return 2 * (num_ranks - 1) * bytes / num_ranks;
      case CollectiveOp::kBroadcast:
        return is_last || num_ranks == 1 ? 0 : bytes;
      case CollectiveOp::kBarrier:
        break;
    }
    return 0;
  }

  void count(CollectiveOp op, const CommOptions& options, const at::Tensor& whole, int root = -1) {
    const std::string_view kind =
        options.tag.empty() ? std::string_view("untagged") : text_before(options.tag, '/');
    const std::string prefix = detail::concatenate(
        "comm/", without_slash(text_before(group().name, '[')), "/", to_string(op), "/", kind, "/");
    const std::int64_t bytes = whole.defined() ? bytes_of(whole) : 0;
    meter_->add(prefix + "calls");
    meter_->add(prefix + "bytes", bytes);
    const SentBytes sent = sent_bytes(op, bytes, root);
    for (const auto& [link, sent_on_link] : {std::pair("sent_intra_node_bytes", sent.intra_node),
                                             std::pair("sent_inter_node_bytes", sent.inter_node)}) {
      if (sent_on_link > 0) {
        meter_->add(prefix + link, sent_on_link);
        meter_->add(std::string("comm/") + link, sent_on_link);
      }
    }
    if (log_) {
      log_->append({std::string(to_string(op)), options.tag, group().name,
                    whole.defined() ? whole.numel() : 0,
                    whole.defined() ? whole.scalar_type() : at::ScalarType::Undefined});
    }
  }

  CommunicatorPtr inner_;
  std::shared_ptr<Meter> meter_;
  int ranks_per_node_;
  std::shared_ptr<CallLog> log_;
  bool next_is_elsewhere_ = false;
  int num_on_node_ = 0;
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
