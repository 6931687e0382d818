// One place decides what a legal call is, so no backend has to; and a group of one is the identity
// here, so no backend is asked.
#include "hopshard/comm/communicator.hpp"

#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "describe.hpp"
#include "hopshard/comm/memory.hpp"
#include "hopshard/core/error.hpp"
#include "reduce_parts.hpp"

namespace hopshard {
namespace {

constexpr std::array kDtypes = {at::kBool, at::kByte,     at::kChar,  at::kInt,   at::kLong,
                                at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};

/// What is being called, for the texts of errors.
struct Call {
  std::string_view backend;
  std::string_view op;
  const CommOptions& options;
  const Group& group;

  [[nodiscard]] std::string text() const {
    return detail::describe_call(backend, op, options.tag, group);
  }
};

void check_options(const Call& call) {
  HOPSHARD_CHECK(call.options.timeout.count() >= 0, InvalidArgument, call.text(), ": the timeout ",
                 call.options.timeout.count(),
                 " ms is negative; 0 stands for the communicator's default");
  HOPSHARD_CHECK(!call.options.accumulate || call.op == "reduce_scatter", InvalidArgument,
                 call.text(), ": only reduce_scatter can accumulate into its output");
}

void check_tensor(const Call& call, const at::Tensor& tensor, std::string_view role) {
  HOPSHARD_CHECK(tensor.defined(), InvalidArgument, call.text(), ": the ", role,
                 " is an undefined tensor");
  HOPSHARD_CHECK(tensor.layout() == at::kStrided && tensor.is_contiguous(), InvalidArgument,
                 call.text(), ": the ", role, " of shape ", tensor.sizes(),
                 " is not contiguous; pass tensor.contiguous() and copy the result back");
  for (const at::ScalarType dtype : kDtypes) {
    if (tensor.scalar_type() == dtype) {
      return;
    }
  }
  std::string legal;
  for (const at::ScalarType dtype : kDtypes) {
    legal += detail::concatenate(legal.empty() ? "" : ", ", dtype);
  }
  throw InvalidArgument(detail::concatenate(call.text(), ": the ", role, " has dtype ",
                                            tensor.scalar_type(), "; legal are ", legal,
                                            ". To move other data, pass tensor.view(torch.uint8)"));
}

void check_reducible(const Call& call, const at::Tensor& tensor, ReduceOp op) {
  HOPSHARD_CHECK(tensor.scalar_type() != at::kBool, InvalidArgument, call.text(), ": ",
                 detail::to_string(op),
                 " of Bool tensors is not defined; use uint8 and max for a logical or");
}

bool share_memory(const at::Tensor& left, const at::Tensor& right) {
  const auto left_begin = reinterpret_cast<std::uintptr_t>(left.const_data_ptr());
  const auto right_begin = reinterpret_cast<std::uintptr_t>(right.const_data_ptr());
  return left_begin < right_begin + right.nbytes() && right_begin < left_begin + left.nbytes();
}

/// `part` holds n elements, `whole` n * size; if they share memory, the part is exactly my slot.
void check_pair(const Call& call, const at::Tensor& whole, std::string_view whole_role,
                const at::Tensor& part, std::string_view part_role) {
  HOPSHARD_CHECK(whole.scalar_type() == part.scalar_type(), InvalidArgument, call.text(), ": the ",
                 part_role, " is ", part.scalar_type(), " but the ", whole_role, " is ",
                 whole.scalar_type(), "; both must have one dtype");
  HOPSHARD_CHECK(whole.device() == part.device(), InvalidArgument, call.text(), ": the ", part_role,
                 " is on ", part.device(), " but the ", whole_role, " on ", whole.device(),
                 "; both must be on one device");
  const std::int64_t size = call.group.size();
  HOPSHARD_CHECK(whole.numel() == part.numel() * size, InvalidArgument, call.text(), ": the ",
                 whole_role, " has ", whole.numel(), " elements, but the ", part_role, " has ",
                 part.numel(), ", which makes ", part.numel(), " * ", size, " = ",
                 part.numel() * size, " for ", size, " ranks");
  const std::size_t part_bytes = part.nbytes();
  if (part_bytes == 0) {
    return;
  }
  const auto whole_begin = reinterpret_cast<std::uintptr_t>(whole.const_data_ptr());
  const auto part_begin = reinterpret_cast<std::uintptr_t>(part.const_data_ptr());
  const bool apart = !share_memory(whole, part);
  const auto my_slot = static_cast<std::size_t>(call.group.my_slot());
  HOPSHARD_CHECK(apart || part_begin == whole_begin + my_slot * part_bytes, InvalidArgument,
                 call.text(), ": the ", part_role, " overlaps the ", whole_role, ", beginning ",
                 static_cast<std::int64_t>(part_begin) - static_cast<std::int64_t>(whole_begin),
                 " bytes after it; in place it must be exactly slot ", my_slot, ", ",
                 my_slot * part_bytes, " bytes after it");
}

void copy_unless_same(const at::Tensor& to, const at::Tensor& from) {
  if (to.numel() == 0 || to.const_data_ptr() == from.const_data_ptr()) {
    return;
  }
  const at::NoGradGuard no_grad;
  to.view({to.numel()}).copy_(from.view({from.numel()}));
}

}  // namespace

Communicator::Communicator(Group group) : group_(std::move(group)) { group_.validate(); }

WorkPtr Communicator::all_gather(at::Tensor output, at::Tensor input, const CommOptions& options) {
  const Call call{backend(), "all_gather", options, group_};
  check_options(call);
  check_tensor(call, output, "output");
  check_tensor(call, input, "input");
  check_pair(call, output, "output", input, "input");
  if (size() == 1) {
    copy_unless_same(output, input);
    return make_finished_work();
  }
  return do_all_gather(std::move(output), std::move(input), options);
}

WorkPtr Communicator::reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                                     const CommOptions& options) {
  const Call call{backend(), "reduce_scatter", options, group_};
  check_options(call);
  check_tensor(call, output, "output");
  check_tensor(call, input, "input");
  check_reducible(call, input, op);
  check_pair(call, input, "input", output, "output");
  HOPSHARD_CHECK(!options.accumulate || !share_memory(output, input), InvalidArgument, call.text(),
                 ": an output that is accumulated into cannot be a slot of the input");
  if (size() == 1) {
    if (options.accumulate) {
      detail::reduce_tensors(output, {output, input}, op);
    } else {
      copy_unless_same(output, input);
    }
    return make_finished_work();
  }
  return do_reduce_scatter(std::move(output), std::move(input), op, options);
}

WorkPtr Communicator::all_reduce(at::Tensor tensor, ReduceOp op, const CommOptions& options) {
  const Call call{backend(), "all_reduce", options, group_};
  check_options(call);
  check_tensor(call, tensor, "tensor");
  check_reducible(call, tensor, op);
  if (size() == 1) {
    return make_finished_work();
  }
  return do_all_reduce(std::move(tensor), op, options);
}

WorkPtr Communicator::broadcast(at::Tensor tensor, int root, const CommOptions& options) {
  const Call call{backend(), "broadcast", options, group_};
  check_options(call);
  check_tensor(call, tensor, "tensor");
  HOPSHARD_CHECK(root >= 0 && root < size(), InvalidArgument, call.text(), ": the root ", root,
                 " is no rank of this group; give its index in the group, 0..", size() - 1,
                 ", not its global rank");
  if (size() == 1) {
    return make_finished_work();
  }
  return do_broadcast(std::move(tensor), root, options);
}

void Communicator::barrier(const CommOptions& options) {
  check_options(Call{backend(), "barrier", options, group_});
  if (size() > 1) {
    do_barrier(options);
  }
}

CommunicatorPtr Communicator::split(Group part) {
  part.validate();
  for (const int member : part.ranks) {
    HOPSHARD_CHECK(
        std::find(group_.ranks.begin(), group_.ranks.end(), member) != group_.ranks.end(),
        InvalidArgument, backend(), " split of group '", group_.name, "': global rank ", member,
        " of the part '", part.name, "' is not in it");
  }
  HOPSHARD_CHECK(part.global_rank() == group_.global_rank(), InvalidArgument, backend(),
                 " split of group '", group_.name, "': the part '", part.name, "' is global rank ",
                 part.global_rank(), "'s, but this is global rank ", group_.global_rank());
  return do_split(std::move(part));
}

at::Tensor Communicator::allocate(std::int64_t num_bytes) {
  HOPSHARD_CHECK(num_bytes >= 0, InvalidArgument, backend(), " allocate in group '", group_.name,
                 "': ", num_bytes, " bytes");
  return do_allocate(num_bytes);
}

void Communicator::register_memory(const at::Tensor& memory) {
  const CommOptions no_options;
  check_tensor(Call{backend(), "register_memory", no_options, group_}, memory, "memory");
  do_register_memory(memory);
}

at::Tensor Communicator::do_allocate(std::int64_t num_bytes) { return allocate_memory(num_bytes); }

void Communicator::do_register_memory(const at::Tensor& /*memory*/) {}

}  // namespace hopshard
