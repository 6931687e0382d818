// libfabric's objects behind move-only handles, and the one check of its return codes. Next:
// rail.hpp.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

#include <memory>
#include <string_view>

#include "hopshard/core/error.hpp"

namespace hopshard::detail::ofi {

struct FreeInfo {
  void operator()(fi_info* info) const noexcept { fi_freeinfo(info); }
};
using InfoPtr = std::unique_ptr<fi_info, FreeInfo>;

/// All of libfabric's objects begin with a `fid`, by which they are closed.
struct CloseFid {
  template <typename Object>
  void operator()(Object* object) const noexcept {
    fi_close(&object->fid);
  }
};
template <typename Object>
using Handle = std::unique_ptr<Object, CloseFid>;

/// `code` is what a libfabric call returned: below 0 it failed.
inline void check(long code, std::string_view call, std::string_view where) {
  HOPSHARD_CHECK(code >= 0, CommError, "ofi: ", call, " failed on ", where, ": ",
                 fi_strerror(static_cast<int>(-code)), " (", code, ")");
}

}  // namespace hopshard::detail::ofi
