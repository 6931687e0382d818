// Empty: the ranks of MPI are processes, not threads. The suite runs on them in tests/cpp/mpi/.
#include "backends.hpp"

namespace hopshard::testing {

std::vector<Backend> mpi_backends() { return {}; }

}  // namespace hopshard::testing
