#include "hopshard/runtime/grad_hooks.hpp"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <exception>
#include <utility>
#include <vector>

#include "hopshard/core/error.hpp"

namespace hopshard {

namespace {

namespace ag = torch::autograd;

std::atomic<void (*)(std::exception_ptr)> error_translator = nullptr;

void run_guarded(const std::function<void()>& callback) {
  try {
    callback();
  } catch (const Error&) {
    if (auto* const translator = error_translator.load()) {
      translator(std::current_exception());
    }
    throw;
  }
}

// Torch deletes hooks with their nodes, which may outlive the engine: `enabled` is shared and
// turned off first.
struct BeforeHook : ag::FunctionPreHook {
  BeforeHook(std::shared_ptr<const bool> enabled_flag, std::function<void()> function)
      : enabled(std::move(enabled_flag)), callback(std::move(function)) {}
  ag::variable_list operator()(const ag::variable_list& grads) override {
    if (*enabled) {
      run_guarded(callback);
    }
    return grads;
  }
  std::shared_ptr<const bool> enabled;
  std::function<void()> callback;
};

struct AfterHook : ag::FunctionPostHook {
  AfterHook(std::shared_ptr<const bool> enabled_flag, std::function<void()> function)
      : enabled(std::move(enabled_flag)), callback(std::move(function)) {}
  ag::variable_list operator()(const ag::variable_list& outputs,
                               const ag::variable_list& /*inputs*/) override {
    if (*enabled) {
      run_guarded(callback);
    }
    return outputs;
  }
  std::shared_ptr<const bool> enabled;
  std::function<void()> callback;
};

}  // namespace

struct ParameterHooks::Impl {
  // torch holds these nodes weakly. A shared_ptr in torch 2.11, a c10::intrusive_ptr in 2.15.
  using NodePtr = decltype(ag::impl::grad_accumulator(std::declval<const at::Tensor&>()));
  std::vector<NodePtr> nodes;
  std::shared_ptr<bool> enabled = std::make_shared<bool>(true);
};

ParameterHooks::ParameterHooks() : impl_(std::make_unique<Impl>()) {}

ParameterHooks::~ParameterHooks() { *impl_->enabled = false; }

void ParameterHooks::watch(const at::Tensor& parameter, std::function<void()> before,
                           std::function<void()> after) {
  auto node = ag::impl::grad_accumulator(parameter);
  HOPSHARD_CHECK(node, InvalidArgument, "a parameter without requires_grad has no gradient");
  node->add_pre_hook(std::make_unique<BeforeHook>(impl_->enabled, std::move(before)));
  node->add_post_hook(std::make_unique<AfterHook>(impl_->enabled, std::move(after)));
  impl_->nodes.push_back(std::move(node));
}

void watch_output(const at::Tensor& output, std::function<void()> callback) {
  output.register_hook(
      [callback = std::move(callback)](const at::TensorBase& /*grad*/) { run_guarded(callback); });
}

void call_at_end_of_backward(std::function<void()> callback) {
  ag::Engine::get_default_engine().queue_callback(
      [callback = std::move(callback)] { run_guarded(callback); });
}

bool is_in_backward() { return ag::get_current_graph_task_exec_info() != nullptr; }

void set_hook_error_translator(void (*translator)(std::exception_ptr)) {
  error_translator.store(translator);
}

}  // namespace hopshard
