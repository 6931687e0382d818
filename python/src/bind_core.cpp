// Errors, version, environment. The exception tree mirrors include/hopshard/core/error.hpp.
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "bindings.hpp"
#include "hopshard/core/env.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/core/log.hpp"
#include "hopshard/core/version.hpp"

namespace hopshard::python {

namespace py = pybind11;

namespace {

// In the order of LogLevel.
constexpr std::array<std::string_view, 5> kLogLevelNames = {"debug", "info", "warning", "error",
                                                            "off"};

void bind_errors(py::module_& m) {
  // Translators are asked in reverse order of registration, so a derived class comes after its
  // base.
  const auto error = py::register_exception<Error>(m, "Error", PyExc_RuntimeError);
  py::register_exception<ConfigError>(m, "ConfigError", error);
  py::register_exception<InvalidArgument>(m, "InvalidArgument", error);
  const auto comm_error = py::register_exception<CommError>(m, "CommError", error);
  py::register_exception<TimeoutError>(m, "TimeoutError", comm_error);
  py::register_exception<ScheduleError>(m, "ScheduleError", error);
  py::register_exception<ShardedError>(m, "ShardedError", error);
  // Users see and except these as hopshard.X; pickling across processes needs the same name.
  for (const char* name : {"Error", "ConfigError", "InvalidArgument", "CommError", "TimeoutError",
                           "ScheduleError", "ShardedError"}) {
    m.attr(name).attr("__module__") = "hopshard";
  }
}

void bind_env(py::module_& m) {
  py::class_<Env>(m, "Env")
      .def_property_readonly(
          "timeout_s",
          [](const Env& self) { return static_cast<double>(self.timeout.count()) / 1000.0; })
      .def_readonly("ranks_per_node", &Env::ranks_per_node)
      .def_property_readonly("log_level", [](const Env& self) {
        return kLogLevelNames.at(static_cast<std::size_t>(self.log_level));
      });
  m.def("env", &env, py::return_value_policy::reference);
  m.def("env_variables", [] {
    py::list rows;
    for (const EnvVariable& variable : env_variables()) {
      rows.append(
          py::make_tuple(variable.name, variable.legal, variable.default_value, variable.meaning));
    }
    return rows;
  });
  m.def(
      "set_log_level",
      [](const std::string& name) {
        const auto found = std::find(kLogLevelNames.begin(), kLogLevelNames.end(), name);
        HOPSHARD_CHECK(found != kLogLevelNames.end(), InvalidArgument, "log level '", name,
                       "' is none of debug, info, warning, error, off");
        set_log_level(static_cast<LogLevel>(found - kLogLevelNames.begin()));
      },
      py::arg("name"), "The level of this process, instead of HOPSHARD_LOG_LEVEL's.");
  m.def("set_process_log_rank", &set_process_log_rank, py::arg("global_rank"));
}

}  // namespace

void bind_core(py::module_& m) {
  bind_errors(m);
  bind_env(m);
  m.attr("__version__") = version();
  m.attr("build_id") = build_id();
}

}  // namespace hopshard::python
