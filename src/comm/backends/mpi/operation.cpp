#include "operation.hpp"

#include "hopshard/core/error.hpp"

namespace hopshard::detail::mpi {
std::string_view to_string(MpiKind kind) {
  switch (kind) {
    case MpiKind::kConnect:
      return "connect";
    case MpiKind::kAllGather:
      return "all_gather";
    case MpiKind::kReduceScatter:
      return "reduce_scatter";
    case MpiKind::kAllReduce:
      return "all_reduce";
    case MpiKind::kBroadcast:
      return "broadcast";
    case MpiKind::kBarrier:
      return "barrier";
  }
  return "";
}

std::string MpiCall::text() const {
  const bool reduces = kind == MpiKind::kReduceScatter || kind == MpiKind::kAllReduce;
  return to_string(OperationText{.op = mpi::to_string(kind),
                                 .tag = tag,
                                 .numel = numel,
                                 .dtype = dtype,
                                 .reduce_op = reduces ? std::optional(reduce_op) : std::nullopt,
                                 .root = root}) +
         remark;
}

std::int64_t MpiCall::bytes() const {
  return dtype == at::ScalarType::Undefined
             ? 0
             : numel * static_cast<std::int64_t>(c10::elementSize(dtype));
}

void Operation::finish() {
  state = OperationState::kEnded;
  call.output.reset();
  call.input.reset();
  completion->finish();
}

void Operation::fail(const Failure& why, bool keep_buffers) {
  state = OperationState::kEnded;
  if (!keep_buffers) {
    call.output.reset();
    call.input.reset();
  }
  completion->fail(make_error(why.kind, call_text + ": " + why.cause));
}

}  // namespace hopshard::detail::mpi
