// The Communicator over a SharedGroup.
#pragma once

#include <memory>

#include "connect.hpp"
#include "shared_group.hpp"

namespace hopshard::detail::shm {

/// @param shared  null: a group of one rank.
[[nodiscard]] CommunicatorPtr make_shm_communicator(const ConnectOptions& options,
                                                    const Restrictions& restrictions,
                                                    std::shared_ptr<SharedGroup> shared);

}  // namespace hopshard::detail::shm
