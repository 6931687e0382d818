#include "hopshard/comm/work.hpp"

namespace hopshard {
namespace {

class FinishedWork final : public Work {
 public:
  void wait() override {}
};

}  // namespace

WorkPtr make_finished_work() { return std::make_unique<FinishedWork>(); }

}  // namespace hopshard
