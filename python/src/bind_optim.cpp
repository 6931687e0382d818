// The optimizer kernels on tensors: checks what a span cannot say (device, dtype, layout), then
// runs without the GIL.
#include <ATen/core/Tensor.h>
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <initializer_list>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/optim/adamw.hpp"
#include "hopshard/optim/grad_norm.hpp"
#include "hopshard/optim/sgd.hpp"
#include "hopshard/optim/shard_update.hpp"
#include "hopshard/optim/stochastic_rounding.hpp"

namespace hopshard::python {
namespace {

namespace py = pybind11;

struct NamedTensor {
  const char* name;
  const at::Tensor* tensor;
};

/// All tensors become spans of the first one's dtype, so one check decides which kernel runs.
void check_tensors(const char* operation, std::initializer_list<NamedTensor> tensors) {
  const at::ScalarType dtype = tensors.begin()->tensor->scalar_type();
  for (const auto& [name, tensor] : tensors) {
    HOPSHARD_CHECK(tensor->defined() && tensor->is_cpu() && tensor->layout() == at::kStrided,
                   InvalidArgument, operation, ": ", name, " must be a dense CPU tensor");
    HOPSHARD_CHECK(tensor->dim() == 1 && tensor->is_contiguous(), InvalidArgument, operation, ": ",
                   name, " must be 1-D and contiguous, got ", tensor->dim(), " dimensions",
                   tensor->is_contiguous() ? "" : ", not contiguous");
    HOPSHARD_CHECK(dtype == at::kFloat || dtype == at::kDouble, InvalidArgument, operation, ": ",
                   tensors.begin()->name, " must be float32 or float64, got ", dtype);
    HOPSHARD_CHECK(tensor->scalar_type() == dtype, InvalidArgument, operation, ": ", name, " is ",
                   tensor->scalar_type(), ", but ", tensors.begin()->name, " is ", dtype);
  }
}

/// Bits of a bf16 tensor that belongs to an fp32 master; none without a tensor.
std::span<std::uint16_t> bf16_span_of(const char* operation, const char* name,
                                      const std::optional<at::Tensor>& tensor,
                                      const at::Tensor& master) {
  if (!tensor) return {};
  HOPSHARD_CHECK(master.scalar_type() == at::kFloat && tensor->is_cpu() &&
                     tensor->scalar_type() == at::kBFloat16 && tensor->is_contiguous(),
                 InvalidArgument, operation, ": ", name,
                 " must be contiguous bfloat16 on the CPU, beside a float32 master");
  return {static_cast<std::uint16_t*>(tensor->data_ptr()),
          static_cast<std::size_t>(tensor->numel())};
}

template <typename T>
std::span<T> span_of(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr<T>(), static_cast<std::size_t>(tensor.numel())};
}

template <typename T>
std::span<const T> const_span_of(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<T>(), static_cast<std::size_t>(tensor.numel())};
}

/// Calls `function` with a zero of the tensor's element type.
template <typename Function>
auto with_element_of(const at::Tensor& tensor, const Function& function) {
  return tensor.scalar_type() == at::kFloat ? function(float{}) : function(double{});
}

/// The writes bypass ATen; autograd must still notice that a saved tensor changed.
void mark_written(std::initializer_list<const at::Tensor*> tensors) {
  for (const at::Tensor* tensor : tensors) {
    if (!tensor->is_inference()) tensor->unsafeGetTensorImpl()->bump_version();
  }
}

void adam_step_tensors(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& exp_avg,
                       const at::Tensor& exp_avg_sq, const AdamSettings& settings,
                       std::int64_t step, double grad_scale) {
  check_tensors(
      "adam_step",
      {{"master", &master}, {"grad", &grad}, {"exp_avg", &exp_avg}, {"exp_avg_sq", &exp_avg_sq}});
  with_element_of(master, [&](auto zero) {
    using T = decltype(zero);
    adam_step(span_of<T>(master), const_span_of<T>(grad), span_of<T>(exp_avg),
              span_of<T>(exp_avg_sq), settings, step, grad_scale);
  });
  mark_written({&master, &exp_avg, &exp_avg_sq});
}

void sgd_step_tensors(const at::Tensor& master, const at::Tensor& grad,
                      const std::optional<at::Tensor>& momentum_buffer, const SgdSettings& settings,
                      bool first_step, double grad_scale) {
  check_tensors("sgd_step", {{"master", &master}, {"grad", &grad}});
  if (momentum_buffer) {
    check_tensors("sgd_step", {{"master", &master}, {"momentum_buffer", &*momentum_buffer}});
  }
  with_element_of(master, [&](auto zero) {
    using T = decltype(zero);
    sgd_step(span_of<T>(master), const_span_of<T>(grad),
             momentum_buffer ? span_of<T>(*momentum_buffer) : std::span<T>{}, settings, first_step,
             grad_scale);
  });
  mark_written({&master});
  if (momentum_buffer) mark_written({&*momentum_buffer});
}

void update_adam(const ShardUpdate& update, const at::Tensor& master, const at::Tensor& grad,
                 const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq,
                 const std::vector<AdamSettings>& settings, double grad_scale,
                 const std::optional<at::Tensor>& bf16_shard,
                 const std::optional<StochasticRounding>& rounding) {
  constexpr const char* kOperation = "ShardUpdate.adam";
  check_tensors(kOperation, {{"master", &master}, {"grad", &grad}});
  const auto shard = bf16_span_of(kOperation, "bf16_shard", bf16_shard, master);
  if (rounding) {
    update.adam(span_of<float>(master), const_span_of<float>(grad),
                bf16_span_of(kOperation, "exp_avg", exp_avg, master),
                bf16_span_of(kOperation, "exp_avg_sq", exp_avg_sq, master), settings, *rounding,
                grad_scale, shard);
  } else {
    check_tensors(kOperation,
                  {{"master", &master}, {"exp_avg", &exp_avg}, {"exp_avg_sq", &exp_avg_sq}});
    if (bf16_shard) {
      update.adam(span_of<float>(master), const_span_of<float>(grad), span_of<float>(exp_avg),
                  span_of<float>(exp_avg_sq), settings, grad_scale, shard);
    } else {
      with_element_of(master, [&](auto zero) {
        using T = decltype(zero);
        update.adam(span_of<T>(master), const_span_of<T>(grad), span_of<T>(exp_avg),
                    span_of<T>(exp_avg_sq), settings, grad_scale);
      });
    }
  }
  mark_written({&master, &exp_avg, &exp_avg_sq});
  if (bf16_shard) mark_written({&*bf16_shard});
}

void update_sgd(const ShardUpdate& update, const at::Tensor& master, const at::Tensor& grad,
                const std::optional<at::Tensor>& momentum_buffer,
                const std::vector<SgdSettings>& settings, double grad_scale,
                const std::optional<StochasticRounding>& rounding) {
  constexpr const char* kOperation = "ShardUpdate.sgd";
  check_tensors(kOperation, {{"master", &master}, {"grad", &grad}});
  if (rounding) {
    update.sgd(span_of<float>(master), const_span_of<float>(grad),
               bf16_span_of(kOperation, "momentum_buffer", momentum_buffer, master), settings,
               *rounding, grad_scale);
  } else {
    if (momentum_buffer) {
      check_tensors(kOperation, {{"master", &master}, {"momentum_buffer", &*momentum_buffer}});
    }
    with_element_of(master, [&](auto zero) {
      using T = decltype(zero);
      update.sgd(span_of<T>(master), const_span_of<T>(grad),
                 momentum_buffer ? span_of<T>(*momentum_buffer) : std::span<T>{}, settings,
                 grad_scale);
    });
  }
  mark_written({&master});
  if (momentum_buffer) mark_written({&*momentum_buffer});
}

void bind_settings(py::module_& m) {
  const AdamSettings adam;
  py::class_<AdamSettings>(m, "AdamSettings", "Hyper-parameters of torch.optim.Adam and AdamW.")
      .def(py::init([](double lr, double beta1, double beta2, double eps, double weight_decay,
                       bool decoupled_weight_decay, bool maximize) {
             return AdamSettings{lr,      beta1, beta2, eps, weight_decay, decoupled_weight_decay,
                                 maximize};
           }),
           py::kw_only(), py::arg("lr") = adam.lr, py::arg("beta1") = adam.beta1,
           py::arg("beta2") = adam.beta2, py::arg("eps") = adam.eps,
           py::arg("weight_decay") = adam.weight_decay,
           py::arg("decoupled_weight_decay") = adam.decoupled_weight_decay,
           py::arg("maximize") = adam.maximize)
      .def_readwrite("lr", &AdamSettings::lr)
      .def_readwrite("beta1", &AdamSettings::beta1)
      .def_readwrite("beta2", &AdamSettings::beta2)
      .def_readwrite("eps", &AdamSettings::eps)
      .def_readwrite("weight_decay", &AdamSettings::weight_decay)
      .def_readwrite("decoupled_weight_decay", &AdamSettings::decoupled_weight_decay)
      .def_readwrite("maximize", &AdamSettings::maximize)
      .def(py::self == py::self);

  const SgdSettings sgd;
  py::class_<SgdSettings>(m, "SgdSettings", "Hyper-parameters of torch.optim.SGD.")
      .def(py::init([](double lr, double momentum, double dampening, double weight_decay,
                       bool nesterov, bool maximize) {
             return SgdSettings{lr, momentum, dampening, weight_decay, nesterov, maximize};
           }),
           py::kw_only(), py::arg("lr") = sgd.lr, py::arg("momentum") = sgd.momentum,
           py::arg("dampening") = sgd.dampening, py::arg("weight_decay") = sgd.weight_decay,
           py::arg("nesterov") = sgd.nesterov, py::arg("maximize") = sgd.maximize)
      .def_readwrite("lr", &SgdSettings::lr)
      .def_readwrite("momentum", &SgdSettings::momentum)
      .def_readwrite("dampening", &SgdSettings::dampening)
      .def_readwrite("weight_decay", &SgdSettings::weight_decay)
      .def_readwrite("nesterov", &SgdSettings::nesterov)
      .def_readwrite("maximize", &SgdSettings::maximize)
      .def(py::self == py::self);
}

void bind_kernels(py::module_& m) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  m.def("adam_step", &adam_step_tensors, py::arg("master"), py::arg("grad"), py::arg("exp_avg"),
        py::arg("exp_avg_sq"), py::arg("settings"), py::arg("step"), py::arg("grad_scale") = 1.0,
        no_gil);
  m.def("sgd_step", &sgd_step_tensors, py::arg("master"), py::arg("grad"),
        py::arg("momentum_buffer"), py::arg("settings"), py::arg("first_step"),
        py::arg("grad_scale") = 1.0, no_gil);

  m.def(
      "sum_of_squares",
      [](const at::Tensor& values) {
        check_tensors("sum_of_squares", {{"values", &values}});
        return with_element_of(values, [&](auto zero) {
          return sum_of_squares(const_span_of<decltype(zero)>(values));
        });
      },
      py::arg("values"), no_gil);
  m.def(
      "power_sum",
      [](const at::Tensor& values, double p) {
        check_tensors("power_sum", {{"values", &values}});
        return with_element_of(
            values, [&](auto zero) { return power_sum(const_span_of<decltype(zero)>(values), p); });
      },
      py::arg("values"), py::arg("p"), no_gil);
  m.def(
      "abs_max",
      [](const at::Tensor& values) {
        check_tensors("abs_max", {{"values", &values}});
        return with_element_of(
            values, [&](auto zero) { return abs_max(const_span_of<decltype(zero)>(values)); });
      },
      py::arg("values"), no_gil);
  m.def(
      "all_finite",
      [](const at::Tensor& values) {
        check_tensors("all_finite", {{"values", &values}});
        return with_element_of(
            values, [&](auto zero) { return all_finite(const_span_of<decltype(zero)>(values)); });
      },
      py::arg("values"), no_gil);
}

void bind_shard_update(py::module_& m) {
  const Segment segment;
  py::class_<Segment>(m, "Segment", "Elements of an arena that share hyper-parameters and age.")
      .def(py::init([](std::int64_t begin, std::int64_t end, int group, std::int64_t step) {
             return Segment{begin, end, group, step};
           }),
           py::arg("begin"), py::arg("end"), py::arg("group") = segment.group,
           py::arg("step") = segment.step)
      .def_readwrite("begin", &Segment::begin)
      .def_readwrite("end", &Segment::end)
      .def_readwrite("group", &Segment::group)
      .def_readwrite("step", &Segment::step)
      .def_property_readonly_static("SKIPPED",
                                    [](const py::object&) { return int{Segment::kSkipped}; })
      .def(py::self == py::self)
      .def("__repr__", [](const Segment& s) {
        return "Segment(" + std::to_string(s.begin) + ", " + std::to_string(s.end) +
               ", group=" + std::to_string(s.group) + ", step=" + std::to_string(s.step) + ")";
      });

  m.def(
      "merge_segments",
      [](const std::vector<Segment>& segments, bool swallow_padding) {
        return merge_segments(segments, swallow_padding ? Padding::kSwallow : Padding::kKeepOut);
      },
      py::arg("segments"), py::arg("swallow_padding") = true);

  py::class_<StochasticRounding>(m, "StochasticRounding",
                                 "Where the bits come from that round moments to bf16.")
      .def(py::init([](std::uint64_t seed, std::uint64_t stream, std::int64_t first_element) {
             return StochasticRounding{seed, stream, first_element};
           }),
           py::kw_only(), py::arg("seed") = 0, py::arg("stream") = 0, py::arg("first_element") = 0)
      .def(py::self == py::self);

  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<ShardUpdate>(m, "ShardUpdate", "The kernel calls of one step over an arena.")
      .def(py::init([](std::int64_t arena_numel, const std::vector<Segment>& segments) {
             return ShardUpdate(arena_numel, segments);
           }),
           py::arg("arena_numel"), py::arg("segments"))
      .def_property_readonly("arena_numel", &ShardUpdate::arena_numel)
      .def_property_readonly("passes", &ShardUpdate::passes)
      .def("advance", &ShardUpdate::advance)
      .def("adam", &update_adam, py::arg("master"), py::arg("grad"), py::arg("exp_avg"),
           py::arg("exp_avg_sq"), py::arg("settings"), py::arg("grad_scale") = 1.0,
           py::arg("bf16_shard") = py::none(), py::arg("rounding") = py::none(), no_gil)
      .def("sgd", &update_sgd, py::arg("master"), py::arg("grad"), py::arg("momentum_buffer"),
           py::arg("settings"), py::arg("grad_scale") = 1.0, py::arg("rounding") = py::none(),
           no_gil);
}

}  // namespace

void bind_optim(pybind11::module_& m) {
  bind_settings(m);
  bind_kernels(m);
  bind_shard_update(m);
}

}  // namespace hopshard::python
