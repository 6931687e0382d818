// Autograd events in C++ (D5): a backward runs no Python per parameter. The only place, with its
// .cpp, that knows torch's autograd graph. Next: shard_engine.hpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace hopshard {

/// Hooks on parameters' AccumulateGrad nodes; removed with this object.
///
/// Users' own `register_hook` and `register_post_accumulate_grad_hook` fire before `after`.
/// Callbacks run on the thread that runs the backward (CPU: the one that called it), without the
/// GIL. What they throw ends the backward; see set_hook_error_translator().
class ParameterHooks {
 public:
  ParameterHooks();
  ~ParameterHooks();
  ParameterHooks(const ParameterHooks&) = delete;
  ParameterHooks& operator=(const ParameterHooks&) = delete;

  /// @param parameter  a leaf that requires a gradient; may be a placeholder.
  /// @param before     before the gradient is added to `parameter.grad()`.
  /// @param after      `parameter.grad()` holds it.
  void watch(const at::Tensor& parameter, std::function<void()> before,
             std::function<void()> after);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Calls `callback` when a backward reaches `output`, before the node that made it runs.
void watch_output(const at::Tensor& output, std::function<void()> callback);

/// Calls `callback` once, when the backward that runs now has done everything else.
/// @throws  outside a backward.
void call_at_end_of_backward(std::function<void()> callback);

/// True on a thread that runs a backward now.
[[nodiscard]] bool is_in_backward();

/// Errors leave a hook through torch's engine, which keeps only their text. A binding sets a
/// translator that rethrows them as its language's exceptions; it must not return.
void set_hook_error_translator(void (*translator)(std::exception_ptr));

}  // namespace hopshard
