// hopshard._C. Each layer's names are registered in bind_<layer>.cpp.
#include <torch/csrc/utils/pybind.h>

#include "bindings.hpp"

PYBIND11_MODULE(_C, m) {
  m.doc() = "Native part of hopshard; import hopshard instead.";
  hopshard::python::bind_core(m);
  hopshard::python::bind_topology(m);
  hopshard::python::bind_comm(m);
  hopshard::python::bind_runtime(m);
  hopshard::python::bind_optim(m);
}
