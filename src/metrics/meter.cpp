// One mutex is enough: a rank counts a few hundred times per step.
#include "hopshard/metrics/meter.hpp"

#include <algorithm>

namespace hopshard {

void Meter::add(std::string_view name, std::int64_t amount) {
  const std::lock_guard lock(mutex_);
  const auto found = counters_.find(name);
  if (found == counters_.end()) {
    counters_.emplace(name, amount);
  } else {
    found->second += amount;
  }
}

void Meter::record_peak(std::string_view name, std::int64_t value) {
  const std::lock_guard lock(mutex_);
  const auto found = counters_.find(name);
  if (found == counters_.end()) {
    counters_.emplace(name, value);
  } else {
    found->second = std::max(found->second, value);
  }
}

std::int64_t Meter::value(std::string_view name) const {
  const std::lock_guard lock(mutex_);
  const auto found = counters_.find(name);
  return found == counters_.end() ? 0 : found->second;
}

std::map<std::string, std::int64_t> Meter::counters() const {
  const std::lock_guard lock(mutex_);
  return {counters_.begin(), counters_.end()};
}

void Meter::reset() {
  const std::lock_guard lock(mutex_);
  counters_.clear();
}

ScopedTimer::ScopedTimer(Meter& meter, std::string_view name)
    : meter_(meter), name_(name), start_(std::chrono::steady_clock::now()) {}

ScopedTimer::~ScopedTimer() {
  const auto elapsed = std::chrono::steady_clock::now() - start_;
  meter_.add(name_ + "_us", std::chrono::duration_cast<std::chrono::microseconds>(elapsed).count());
  meter_.add(name_ + "_calls");
}

}  // namespace hopshard
