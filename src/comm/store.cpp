#include "hopshard/comm/store.hpp"

#include <condition_variable>
#include <map>
#include <mutex>
#include <utility>

#include "hopshard/core/error.hpp"

namespace hopshard {
namespace {

class MemoryStore final : public Store {
 public:
  void set(const std::string& key, std::string_view value) override {
    {
      const std::lock_guard lock(mutex_);
      values_[key] = value;
    }
    changed_.notify_all();
  }

  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    const bool found = changed_.wait_for(lock, timeout, [&] { return values_.contains(key); });
    HOPSHARD_CHECK(found, TimeoutError, "no rank wrote '", key, "' within ", timeout.count(),
                   " ms");
    return values_[key];
  }

  bool has(const std::string& key) override {
    const std::lock_guard lock(mutex_);
    return values_.contains(key);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

class PrefixStore final : public Store {
 public:
  PrefixStore(StorePtr inner, std::string prefix)
      : inner_(std::move(inner)), prefix_(std::move(prefix)) {}

  void set(const std::string& key, std::string_view value) override {
    inner_->set(named(key), value);
  }
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    return inner_->get(named(key), timeout);
  }
  bool has(const std::string& key) override { return inner_->has(named(key)); }

 private:
  [[nodiscard]] std::string named(const std::string& key) const { return prefix_ + "/" + key; }

  StorePtr inner_;
  std::string prefix_;
};

}  // namespace

StorePtr make_memory_store() { return std::make_shared<MemoryStore>(); }

StorePtr make_prefix_store(StorePtr store, std::string prefix) {
  HOPSHARD_CHECK(store != nullptr, InvalidArgument, "the store behind the prefix '", prefix,
                 "' is null");
  return std::make_shared<PrefixStore>(std::move(store), std::move(prefix));
}

}  // namespace hopshard
