#include "describe.hpp"

#include "hopshard/core/error.hpp"

namespace hopshard::detail {

std::string describe_tag(std::string_view tag) {
  return tag.empty() ? "(no tag)" : concatenate("'", tag, "'");
}

std::string describe_call(std::string_view backend, std::string_view op, std::string_view tag,
                          const Group& group) {
  return concatenate(backend, " ", op, " ", describe_tag(tag), " in group '", group.name,
                     "' on rank ", group.rank, " of ", group.size(), " (global rank ",
                     group.global_rank(), ")");
}

std::string to_string(const OperationText& operation) {
  std::string text = concatenate(operation.op, ' ', describe_tag(operation.tag));
  if (operation.dtype != at::ScalarType::Undefined) {
    text += concatenate(" of ", operation.numel, ' ', operation.dtype);
  }
  if (operation.reduce_op) {
    text += concatenate(" (", to_string(*operation.reduce_op), ')');
  }
  if (operation.root >= 0) {
    text += concatenate(" from root ", operation.root);
  }
  return text;
}

std::string name_global_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "global rank " : "global ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) {
      text += i + 1 == ranks.size() ? " and " : ", ";
    }
    text += std::to_string(ranks[i]);
  }
  return text;
}

std::string did_not_arrive(const std::vector<int>& ranks, std::chrono::milliseconds limit,
                           int waiting_global_rank) {
  return concatenate(name_global_ranks(ranks), " did not arrive within the ", limit.count(),
                     " ms that rank ", waiting_global_rank, " waited; look at what ",
                     ranks.size() == 1 ? "it does" : "they do",
                     " instead, or raise the time limit");
}

std::string_view to_string(ReduceOp op) { return op == ReduceOp::kSum ? "sum" : "max"; }

}  // namespace hopshard::detail
