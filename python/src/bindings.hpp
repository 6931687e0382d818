// The functions that fill hopshard._C, one per layer, called in this order by module.cpp.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string_view>

namespace hopshard::python {

/// "<version>+<hash of all C++ sources>"; ranks compare it at start-up.
[[nodiscard]] std::string_view build_id() noexcept;

void bind_core(pybind11::module_& m);
void bind_topology(pybind11::module_& m);
void bind_comm(pybind11::module_& m);
void bind_runtime(pybind11::module_& m);
void bind_optim(pybind11::module_& m);

}  // namespace hopshard::python
