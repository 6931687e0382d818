// MPI's header and the one way to call it: an error code becomes a CommError with MPI's own text.
#pragma once

// The C++ bindings were removed from the standard; without these the header brings them along.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <string_view>

namespace hopshard::detail::mpi {

/// @throws CommError  naming the call, unless `code` is MPI_SUCCESS.
void check(int code, std::string_view call);

}  // namespace hopshard::detail::mpi

/// HOPSHARD_MPI(MPI_Isend, buffer, ...) calls it and throws CommError if it fails.
#define HOPSHARD_MPI(function, ...) ::hopshard::detail::mpi::check(function(__VA_ARGS__), #function)
