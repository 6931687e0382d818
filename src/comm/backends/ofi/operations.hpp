// The collectives, each as one Operation; which algorithm runs follows from the sizes, alike on all
// ranks. docs/algorithms.md has the steps and bytes. Next: backend.cpp, which makes them.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "hopshard/comm/communicator.hpp"
#include "operation.hpp"

namespace hopshard::detail::ofi {

[[nodiscard]] std::shared_ptr<Operation> make_barrier(CallInfo call);
[[nodiscard]] std::shared_ptr<Operation> make_all_gather(CallInfo call, const Group& group,
                                                         at::Tensor output, at::Tensor input);
/// @param nodes  of the group's members.
[[nodiscard]] std::shared_ptr<Operation> make_reduce_scatter(CallInfo call, const Group& group,
                                                             const std::vector<std::string>& nodes,
                                                             at::Tensor output, at::Tensor input,
                                                             ReduceOp op, bool accumulate);
[[nodiscard]] std::shared_ptr<Operation> make_all_reduce(CallInfo call, const Group& group,
                                                         const std::vector<std::string>& nodes,
                                                         at::Tensor tensor, ReduceOp op);
[[nodiscard]] std::shared_ptr<Operation> make_broadcast(CallInfo call, at::Tensor tensor, int root);

}  // namespace hopshard::detail::ofi
