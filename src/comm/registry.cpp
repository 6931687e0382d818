#include "hopshard/comm/registry.hpp"

#include "./backends/backends.hpp"
#include "hopshard/core/error.hpp"

namespace hopshard {

const std::vector<BackendInfo>& backends() {
  static const std::vector<BackendInfo> list = {
      {"local", "ranks as threads of one process; the reference", std::nullopt},
      {"recording", "counts calls and bytes, over another backend or alone", std::nullopt},
      {"c10d", "any torch process group; Gloo comes with torch", std::nullopt},
      detail::describe_shm(),
      detail::describe_mpi(),
      detail::describe_nccl(),
      detail::describe_ofi(),
  };
  return list;
}

const BackendInfo& require_backend(std::string_view name) {
  std::string known;
  for (const BackendInfo& backend : backends()) {
    if (backend.name == name) {
      HOPSHARD_CHECK(!backend.why_not, ConfigError, "backend '", name,
                     "' is not available: ", *backend.why_not);
      return backend;
    }
    known += known.empty() ? "" : ", ";
    known += backend.name;
  }
  throw ConfigError(detail::concatenate("unknown backend '", name, "'; this build knows ", known));
}

CommunicatorPtr connect_backend(std::string_view name, const ConnectOptions& options) {
  const BackendInfo& backend = require_backend(name);
  HOPSHARD_CHECK(backend.connect != nullptr, ConfigError, "backend '", name,
                 "' is not connected through a store; see hopshard/comm/", name, ".hpp");
  options.group.validate();
  HOPSHARD_CHECK(options.timeout.count() > 0, InvalidArgument, name, ": group '",
                 options.group.name, "': the time limit must be positive, got ",
                 options.timeout.count(), " ms");
  return backend.connect(options);
}

}  // namespace hopshard
