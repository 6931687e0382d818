// This process's place among those that mpirun started.
#pragma once

#include "hopshard/comm/communicator.hpp"
#include "hopshard/comm/store.hpp"

namespace hopshard::testing {

struct ProcessWorld {
  int rank = 0;
  int size = 1;
  StorePtr store;            ///< Of all processes.
  CommunicatorPtr everyone;  ///< For what tests tell each other.
};
ProcessWorld& process_world();

/// Connects `group` over MPI; each call with fresh keys.
CommunicatorPtr connect_processes(const Group& group,
                                  std::chrono::milliseconds timeout = std::chrono::seconds(30));

/// One number of each process.
std::vector<std::int64_t> gather_numbers(std::int64_t mine);

}  // namespace hopshard::testing
