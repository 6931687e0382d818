// The `c10d` backend runs over a ProcessGroup that torch made (Gloo is the embedded default).
// Groups are made in Python, because torch ships no Gloo headers; C++ only uses them. Next:
// registry.hpp.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>

#include "hopshard/comm/communicator.hpp"
#include "hopshard/comm/store.hpp"

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace hopshard {

/// Makes the process group of a part of a group; called by the members of the part only.
using MakeProcessGroup = std::function<c10::intrusive_ptr<c10d::ProcessGroup>(const Group&)>;

/// A communicator over an existing process group; include torch's ProcessGroup.hpp to call it.
///
/// Sums: reduce_scatter, and all_reduce of up to 1 MiB over all ranks, add in the order of the
/// group's ranks, bf16 and fp16 in fp32. Larger all_reduce sums run in the process group (bf16 and
/// fp16 as fp32 there): the same on all ranks, but in an order of its choice.
/// Scratch memory: reduce_scatter the size of its input; all_reduce max n * size() elements.
/// Time limits run from when all ranks have said what they issue, and hold for that as well: a call
/// that waits behind others may take longer. After any failure the communicator stays unusable and
/// tells its peers through the group's store, so that they fail too instead of waiting for their
/// limit.
///
/// @param process_group  its ranks are those of `group`, in the same order.
/// @param timeout        the time limit of calls that name none.
/// @param make_part      for split(), which throws ConfigError without it.
/// @param world_store    shared by all groups of the world, if there are several: a rank that fails
///                       in one group is then not called silent in another.
/// @param is_sole_user   nobody else issues operations on `process_group`: calls return at once.
///                       Otherwise each waits for a message from all ranks, so that operations of
///                       all users have the order of the program.
/// @throws InvalidArgument  null, or rank or size differ from the group's.
[[nodiscard]] CommunicatorPtr make_c10d_communicator(
    c10::intrusive_ptr<c10d::ProcessGroup> process_group, Group group,
    std::chrono::milliseconds timeout, MakeProcessGroup make_part = nullptr,
    StorePtr world_store = nullptr, bool is_sole_user = false);

/// torch's store as ours.
/// @throws InvalidArgument  null.
[[nodiscard]] StorePtr make_c10d_store(c10::intrusive_ptr<c10d::Store> store);

}  // namespace hopshard
