#include "../backends.hpp"

namespace hopshard::detail {

BackendInfo describe_mpi() { return {"mpi", "Open MPI", "this build does not have it", nullptr}; }

}  // namespace hopshard::detail
