// Stands in for the backend where the build has no MPI.
#include "../backends.hpp"

namespace hopshard::detail {

BackendInfo describe_mpi() {
  return {"mpi", "Open MPI, for ranks that mpirun or srun started; CPU memory",
          HOPSHARD_BACKEND_MISSING, nullptr};
}

}  // namespace hopshard::detail
