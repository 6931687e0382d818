// Where ranks that cannot talk to each other yet leave addresses and keys. Next: registry.hpp.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <string_view>

namespace hopshard {

/// Keys that every rank can write and read; values are bytes.
///
/// Threads: all members may be called from any thread.
class Store {
 public:
  virtual ~Store() = default;

  /// Writes, replacing what was there. @throws CommError
  virtual void set(const std::string& key, std::string_view value) = 0;
  /// Waits until the key is there.
  /// @throws TimeoutError  naming the key; CommError: the store is gone.
  [[nodiscard]] virtual std::string get(const std::string& key,
                                        std::chrono::milliseconds timeout) = 0;
  /// Does not wait. @throws CommError
  [[nodiscard]] virtual bool has(const std::string& key) = 0;
};
using StorePtr = std::shared_ptr<Store>;

/// For ranks that are threads of one process.
[[nodiscard]] StorePtr make_memory_store();

/// `store` with "<prefix>/" before every key. @throws InvalidArgument  null.
[[nodiscard]] StorePtr make_prefix_store(StorePtr store, std::string prefix);

}  // namespace hopshard
