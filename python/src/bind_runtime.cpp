// The engine: module events in, gradients and whole parameters out. Blocking calls release the GIL.
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/runtime/shard_engine.hpp"

namespace hopshard::python {

namespace py = pybind11;

namespace {

const char* type_name_of(std::exception_ptr error) {
  try {
    std::rethrow_exception(std::move(error));
  } catch (const ConfigError&) {
    return "ConfigError";
  } catch (const InvalidArgument&) {
    return "InvalidArgument";
  } catch (const TimeoutError&) {
    return "TimeoutError";
  } catch (const CommError&) {
    return "CommError";
  } catch (const ScheduleError&) {
    return "ScheduleError";
  } catch (const ShardedError&) {
    return "ShardedError";
  } catch (...) {
    return "Error";
  }
}

std::string text_of(std::exception_ptr error) {
  try {
    std::rethrow_exception(std::move(error));
  } catch (const std::exception& caught) {
    return caught.what();
  }
}

// Torch's engine turns foreign exceptions into RuntimeError but lets python_error through as it
// is, so `except hopshard.CommError` works around loss.backward().
[[noreturn]] void throw_as_python_error(std::exception_ptr error) {
  const py::gil_scoped_acquire gil;
  const py::object type = py::module_::import("hopshard._C").attr(type_name_of(error));
  PyErr_SetString(type.ptr(), text_of(error).c_str());
  python_error translated;
  translated.persist();
  throw translated;
}

py::dict to_dict(const EngineStatistics& statistics) {
  py::dict seconds;
  seconds["gather"] = statistics.gather_seconds;
  seconds["reduce"] = statistics.reduce_seconds;
  seconds["second_hop"] = statistics.second_hop_seconds;
  const LaneSeconds& gathers = statistics.gathers;
  const LaneSeconds& first_hops = statistics.first_hops;
  const LaneSeconds& second_hops = statistics.second_hops;
  py::dict hidden;
  hidden["gather"] = gathers.hidden;
  hidden["reduce"] = first_hops.hidden;
  hidden["second_hop"] = second_hops.hidden;
  const double all_hidden = gathers.hidden + first_hops.hidden + second_hops.hidden;
  const double all = all_hidden + gathers.waited + first_hops.waited + second_hops.waited;
  py::dict out;
  out["seconds"] = seconds;
  out["hidden_seconds"] = hidden;
  out["hidden_share"] = all > 0 ? all_hidden / all : 0.0;
  out["persistent_bytes"] = statistics.persistent_bytes;
  out["pool_bytes"] = statistics.pool_bytes;
  out["peak_bytes"] = statistics.peak_bytes;
  out["pool_allocations"] = statistics.pool_allocations;
  out["num_deviations"] = statistics.num_deviations;
  return out;
}

/// Its end waits for reductions under way, and so for ranks that may be threads of this process.
struct DeleteWithoutGil {
  void operator()(ShardEngine* engine) const {
    const py::gil_scoped_release no_gil;
    delete engine;
  }
};

}  // namespace

void bind_runtime(py::module_& m) {
  set_hook_error_translator(
      [](std::exception_ptr error) { throw_as_python_error(std::move(error)); });

  py::class_<UnitSpec>(m, "UnitSpec", "A unit as the user's model gives it.")
      .def(py::init([](std::string name, std::vector<std::string> parameter_names,
                       std::vector<at::Tensor> parameters, bool is_persistent,
                       std::vector<at::ScalarType> dtypes) {
             return UnitSpec{std::move(name), std::move(parameter_names), std::move(parameters),
                             is_persistent, std::move(dtypes)};
           }),
           py::arg("name"), py::arg("parameter_names"), py::arg("parameters"),
           py::arg("is_persistent") = false, py::arg("dtypes") = py::tuple())
      .def_readonly("name", &UnitSpec::name)
      .def_readonly("parameter_names", &UnitSpec::parameter_names);

  py::class_<ParameterPlace>(m, "ParameterPlace", "Where one parameter is.")
      .def_readonly("name", &ParameterPlace::name)
      .def_readonly("parameter", &ParameterPlace::parameter)
      .def_readonly("unit", &ParameterPlace::unit)
      .def_readonly("buffer", &ParameterPlace::buffer)
      .def_readonly("is_trainable", &ParameterPlace::is_trainable)
      .def_readonly("piece_numel", &ParameterPlace::piece_numel)
      .def_readonly("piece_in_parameter", &ParameterPlace::piece_in_parameter);

  using release = py::call_guard<py::gil_scoped_release>;
  using Holder = std::unique_ptr<ShardEngine, DeleteWithoutGil>;
  py::class_<ShardEngine, Holder>(m, "ShardEngine",
                                  "Carries a model's schedule out; one per model and rank.")
      .def(py::init([](const std::vector<UnitSpec>& units, ProcessGroups groups,
                       int backward_passes_per_step, std::int64_t second_hop_bucket_bytes,
                       int prefetch_depth, bool reshard_after_forward, bool fills_idle_memory,
                       std::optional<at::ScalarType> reduce_dtype) {
             const py::gil_scoped_release no_gil;
             return Holder(new ShardEngine(
                 units, std::move(groups),
                 EngineOptions{.backward_passes_per_step = backward_passes_per_step,
                               .second_hop_bucket_bytes = second_hop_bucket_bytes,
                               .prefetch_depth = prefetch_depth,
                               .reshard_after_forward = reshard_after_forward,
                               .fills_idle_memory = fills_idle_memory,
                               .reduce_dtype = reduce_dtype.value_or(at::ScalarType::Undefined)}));
           }),
           py::arg("units"), py::arg("groups"), py::arg("backward_passes_per_step"),
           py::arg("second_hop_bucket_bytes"), py::arg("prefetch_depth"),
           py::arg("reshard_after_forward") = true, py::arg("fills_idle_memory") = false,
           py::arg("reduce_dtype") = py::none())
      .def("before_root_forward", &ShardEngine::before_root_forward, release())
      .def("after_root_forward", &ShardEngine::after_root_forward, py::arg("outputs"), release())
      .def("before_forward", &ShardEngine::before_forward, py::arg("unit"), release())
      .def("after_forward", &ShardEngine::after_forward, py::arg("unit"), py::arg("outputs"),
           release())
      .def("abandon_forward", &ShardEngine::abandon_forward, release())
      .def("hold_second_hop", &ShardEngine::hold_second_hop, py::arg("hold"))
      .def("finish_gradients", &ShardEngine::finish_gradients, release())
      .def("zero_gradients", &ShardEngine::zero_gradients, release())
      .def("set_loss_scale", &ShardEngine::set_loss_scale, py::arg("scale"))
      .def(
          "set_gradient_handles",
          [](ShardEngine& self, const std::vector<std::optional<at::Tensor>>& handles) {
            std::vector<at::Tensor> tensors;
            for (const auto& handle : handles) {
              tensors.push_back(handle.value_or(at::Tensor()));
            }
            self.set_gradient_handles(std::move(tensors));
          },
          py::arg("handles"))
      .def("gradient_flags",
           [](const ShardEngine& self) {
             std::string flags(self.store().parameters().size(), '\0');
             for (std::size_t i = 0; i < flags.size(); ++i) {
               flags[i] = self.has_gradient(static_cast<int>(i)) ? '\1' : '\0';
             }
             return py::bytes(flags);
           })
      .def("set_gradient", &ShardEngine::set_gradient, py::arg("parameter"), py::arg("full"),
           release())
      .def("end_step", &ShardEngine::end_step, py::arg("stepped"),
           py::arg("shards_are_written") = false, release())
      .def("weights_changed", &ShardEngine::weights_changed, release())
      .def("check_weights_may_change", &ShardEngine::check_weights_may_change, release())
      .def("begin_join", &ShardEngine::begin_join)
      .def("end_join", &ShardEngine::end_join, py::arg("failed"), release())
      .def("pin", &ShardEngine::pin, py::arg("unit"), release())
      .def("unpin", &ShardEngine::unpin, py::arg("unit"), py::arg("write_back"), release())
      .def("write_parameter", &ShardEngine::write_parameter, py::arg("parameter"), py::arg("full"),
           release())
      .def("gradient_arenas", &ShardEngine::gradient_arenas)
      .def("master_arenas", [](const ShardEngine& self) { return self.store().arenas(); })
      .def("shard_arenas",
           [](const ShardEngine& self) {
             std::vector<std::optional<at::Tensor>> arenas;
             for (const at::Tensor& arena : self.store().shard_arenas()) {
               arenas.push_back(arena.defined() ? std::optional(arena) : std::nullopt);
             }
             return arenas;
           })
      .def(
          "arena_of",
          [](const ShardEngine& self, int parameter) {
            const auto& place = self.store().parameters().at(static_cast<std::size_t>(parameter));
            return self.store().buffers().at(static_cast<std::size_t>(place.buffer)).arena;
          },
          py::arg("parameter"))
      .def(
          "arena_begin_of",
          [](const ShardEngine& self, int parameter) {
            const auto& place = self.store().parameters().at(static_cast<std::size_t>(parameter));
            return self.store().buffers().at(static_cast<std::size_t>(place.buffer)).arena_begin +
                   place.piece_in_slice;
          },
          py::arg("parameter"))
      .def(
          "piece_of",
          [](const ShardEngine& self, const at::Tensor& arena_like, int parameter) {
            return self.store().piece_of(arena_like, parameter);
          },
          py::arg("arena_like"), py::arg("parameter"))
      .def(
          "piece_from_full",
          [](const ShardEngine& self, int parameter, const at::Tensor& full) {
            return self.store().piece_from_full(parameter, full);
          },
          py::arg("parameter"), py::arg("full"))
      .def(
          "write_piece",
          [](const ShardEngine& self, const at::Tensor& arena_like, int parameter,
             const at::Tensor& full) { self.store().write_piece(arena_like, parameter, full); },
          py::arg("arena_like"), py::arg("parameter"), py::arg("full"), release())
      .def(
          "gather_full",
          [](ShardEngine& self, const at::Tensor& arena_like, int parameter,
             const std::string& tag) {
            return self.store().gather_full(arena_like, parameter, tag);
          },
          py::arg("arena_like"), py::arg("parameter"), py::arg("tag"), release())
      .def(
          "gather_masters",
          [](ShardEngine& self, int unit) { return self.store().gather_masters(unit); },
          py::arg("unit"), release())
      .def_property_readonly("num_units",
                             [](const ShardEngine& self) { return self.store().num_units(); })
      .def(
          "unit_name",
          [](const ShardEngine& self, int unit) { return self.store().unit_name(unit); },
          py::arg("unit"))
      .def_property_readonly("parameters",
                             [](const ShardEngine& self) { return self.store().parameters(); })
      .def(
          "is_gathered",
          [](const ShardEngine& self, int unit) { return self.schedule().is_gathered(unit); },
          py::arg("unit"))
      .def_property_readonly("groups", &ShardEngine::groups)
      .def("forward_plan", [](const ShardEngine& self) { return self.schedule().forward_plan(); })
      .def(
          "record_timeline",
          [](ShardEngine& self, std::size_t max_events) { self.timeline().record(max_events); },
          py::arg("max_events"))
      .def("take_timeline",
           [](ShardEngine& self) {
             constexpr std::array kLanes = {"compute", "gather", "hop 1", "hop 2", "step"};
             std::vector<std::tuple<std::string, std::string, double, double>> events;
             for (TimelineEvent& event : self.timeline().take_events()) {
               events.emplace_back(kLanes.at(static_cast<std::size_t>(event.lane)),
                                   std::move(event.name), event.begin_us, event.end_us);
             }
             return events;
           })
      .def("statistics", [](const ShardEngine& self) { return to_dict(self.statistics()); });
}

}  // namespace hopshard::python
