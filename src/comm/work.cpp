#include "hopshard/comm/work.hpp"

namespace hopshard {
namespace {

class FinishedWork final : public Work {
 public:
  void wait() override {}
  bool test() override { return true; }
};

}  // namespace

WorkPtr make_finished_work() { return std::make_unique<FinishedWork>(); }

}  // namespace hopshard
