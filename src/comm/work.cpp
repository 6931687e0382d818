#include "hopshard/comm/work.hpp"

#include "hopshard/core/error.hpp"
#include "hopshard/core/log.hpp"

namespace hopshard {
namespace {

class FinishedWork final : public Work {
 public:
  void wait() override {}
  bool test() override { return true; }
};

}  // namespace

std::exception_ptr find_cause(Work& work, std::exception_ptr cause) noexcept {
  try {
    work.wait();
  } catch (const ScheduleError&) {
    return cause ? cause : std::current_exception();
  } catch (const TimeoutError&) {
    return cause ? cause : std::current_exception();
  } catch (const std::exception& error) {
    HOPSHARD_LOG(kDebug, "a work of a failed group: ", error.what());
  }
  return cause;
}

WorkPtr make_finished_work() { return std::make_unique<FinishedWork>(); }

}  // namespace hopshard
