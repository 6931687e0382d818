#include "peers.hpp"

#include <algorithm>
#include <sstream>
#include <thread>
#include <utility>

#include "../../describe.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/core/log.hpp"

namespace hopshard::detail {
namespace {

using std::chrono::milliseconds;

// The keys of a group's store. "news" is set with every other one that a healthy group lacks, so
// that watching costs one look-up.
constexpr const char* kNews = "news";
constexpr const char* kFailure = "failure";
constexpr const char* kGivenUp = "given_up";

std::string key_of(const char* what, int member) { return concatenate(what, '/', member); }

// Values are numbers and texts, one after the other; a text is its length, a blank and its bytes.
void put_text(std::ostream& out, const std::string& text) { out << text.size() << ' ' << text; }

std::string take_text(std::istream& in) {
  std::size_t size = 0;
  in >> size;
  in.get();
  std::string text(size, '\0');
  in.read(text.data(), static_cast<std::streamsize>(size));
  return text;
}

std::string encode(const Progress& progress) {
  std::ostringstream out;
  out << progress.num_issued << ' ' << progress.calls.size();
  for (const auto& [sequence, call] : progress.calls) {
    out << ' ' << sequence << ' ';
    put_text(out, call);
  }
  return out.str();
}

Progress decode_progress(const std::string& value) {
  std::istringstream in(value);
  Progress progress;
  std::size_t num_calls = 0;
  in >> progress.num_issued >> num_calls;
  for (std::size_t i = 0; i < num_calls && in; ++i) {
    std::int64_t sequence = 0;
    in >> sequence;
    progress.calls[sequence] = take_text(in);
  }
  return progress;
}

/// "the ranks issued different operations: ..." of one text per member.
std::string difference_text(const Group& group, const std::vector<std::string>& calls) {
  std::string text = "the ranks issued different operations:";
  for (std::size_t member = 0; member < calls.size(); ++member) {
    text += concatenate(member == 0 ? " " : "; ", "global rank ", group.ranks[member], ": ",
                        calls[member]);
  }
  return text + ". All ranks must issue the same operations in the same order";
}

}  // namespace

Peers::Peers(StorePtr store, Group group) : store_(std::move(store)), group_(std::move(group)) {}

void Peers::set(const std::string& key, const std::string& value) noexcept {
  try {
    store_->set(key, value);
  } catch (const std::exception& error) {
    HOPSHARD_LOG(kDebug, "group '", group_.name, "' could not write to its store: ", error.what());
  }
}

std::optional<std::string> Peers::find(const std::string& key) noexcept {
  try {
    if (store_->has(key)) {
      return store_->get(key, milliseconds(1000));  // It is there; the limit is never reached.
    }
  } catch (const std::exception& error) {
    HOPSHARD_LOG(kDebug, "group '", group_.name, "' could not read its store: ", error.what());
  }
  return std::nullopt;
}

void Peers::say_here() noexcept { set(key_of("here", group_.rank), "1"); }

std::vector<int> Peers::global_ranks_not_here() noexcept {
  std::vector<int> missing;
  for (int member = 0; member < group_.size(); ++member) {
    if (!find(key_of("here", member))) {
      missing.push_back(group_.ranks[static_cast<std::size_t>(member)]);
    }
  }
  return missing;
}

bool Peers::have_news() noexcept {
  try {
    return store_->has(kNews);
  } catch (const std::exception&) {
    return false;
  }
}

void Peers::report(const NcclFailure& failure) noexcept {
  if (find(kFailure) || find(kGivenUp)) {
    return;
  }
  std::ostringstream out;
  out << static_cast<int>(failure.kind) << ' ' << failure.sequence << ' ';
  put_text(out, failure.cause);
  set(kFailure, out.str());
  set(kNews, "1");
}

void Peers::report(const GivenUp& given_up) noexcept {
  if (find(kFailure) || find(kGivenUp)) {
    return;
  }
  set(kGivenUp, concatenate(given_up.sequence, ' ', given_up.member, ' ', given_up.limit.count()));
  set(kNews, "1");
}

std::optional<NcclFailure> Peers::failure() noexcept {
  const auto value = find(kFailure);
  if (!value) {
    return std::nullopt;
  }
  std::istringstream in(*value);
  int kind = 0;
  NcclFailure failure;
  in >> kind >> failure.sequence;
  failure.kind = static_cast<FailureKind>(kind);
  failure.cause = take_text(in);
  return failure;
}

std::optional<GivenUp> Peers::given_up() noexcept {
  const auto value = find(kGivenUp);
  if (!value) {
    return std::nullopt;
  }
  std::istringstream in(*value);
  GivenUp given_up;
  milliseconds::rep limit = 0;
  in >> given_up.sequence >> given_up.member >> limit;
  given_up.limit = milliseconds(limit);
  return given_up;
}

void Peers::publish(const Progress& progress) noexcept {
  set(key_of("progress", group_.rank), encode(progress));
}

void Peers::leave(const Progress& progress) noexcept {
  publish(progress);
  set(key_of("left", group_.rank), std::to_string(progress.num_issued));
  set(kNews, "1");
}

std::optional<int> Peers::left_before(std::int64_t num_needed) noexcept {
  for (int member = 0; member < group_.size(); ++member) {
    const auto num_issued = member == group_.rank ? std::nullopt : find(key_of("left", member));
    if (num_issued && std::stoll(*num_issued) < num_needed) {
      return group_.ranks[static_cast<std::size_t>(member)];
    }
  }
  return std::nullopt;
}

std::optional<Progress> Peers::progress_of(int member) noexcept {
  const auto value = find(key_of("progress", member));
  return value ? std::optional(decode_progress(*value)) : std::nullopt;
}

NcclFailure Peers::diagnose(const GivenUp& given_up, const Progress& progress,
                            milliseconds grace) noexcept {
  publish(progress);
  const auto size = static_cast<std::size_t>(group_.size());
  std::vector<std::optional<Progress>> known(size);
  const auto deadline = std::chrono::steady_clock::now() + grace;
  milliseconds pause{1};
  for (bool in_time = true; in_time;) {
    in_time = std::chrono::steady_clock::now() < deadline;
    bool complete = true;
    for (std::size_t member = 0; member < size; ++member) {
      if (!known[member]) {
        known[member] = progress_of(static_cast<int>(member));
      }
      complete = complete && known[member].has_value();
    }
    if (complete) {
      break;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, milliseconds(50));
  }

  std::vector<std::string> calls(size);
  std::optional<std::string> first;
  bool differ = false;
  std::vector<int> missing;
  std::vector<int> silent;
  for (std::size_t member = 0; member < size; ++member) {
    if (!known[member]) {
      silent.push_back(group_.ranks[member]);
      calls[member] = "no sign of life";
      continue;
    }
    const auto call = known[member]->calls.find(given_up.sequence);
    if (known[member]->num_issued <= given_up.sequence) {
      missing.push_back(group_.ranks[member]);
      calls[member] = "nothing yet";
    } else if (call == known[member]->calls.end()) {
      calls[member] = "(long ago)";
    } else {
      calls[member] = call->second;
      differ = differ || (first && *first != call->second);
      first = first ? first : call->second;
    }
  }
  NcclFailure failure{FailureKind::kTimeout, given_up.sequence, {}};
  if (differ) {
    failure.kind = FailureKind::kSchedule;
    failure.cause = difference_text(group_, calls);
    return failure;
  }
  const std::string waited =
      concatenate(" within the ", given_up.limit.count(), " ms that rank ",
                  group_.ranks[static_cast<std::size_t>(given_up.member)], " waited");
  if (!silent.empty()) {
    failure.cause = concatenate(name_global_ranks(silent), " did not arrive", waited,
                                " and gives no sign of life; look whether its process has died");
  }
  if (!missing.empty()) {
    failure.cause += (failure.cause.empty() ? "" : "; ") +
                     did_not_arrive(missing, given_up.limit,
                                    group_.ranks[static_cast<std::size_t>(given_up.member)]);
  }
  if (failure.cause.empty()) {
    failure.cause =
        concatenate("all ranks arrived, but NCCL did not finish", waited,
                    "; raise the time limit, or look at the network with NCCL_DEBUG=INFO. Ranks "
                    "that issue in different orders over several communicators also end like this");
  }
  return failure;
}

void Peers::publish_call(std::int64_t sequence, const std::string& call) noexcept {
  set(concatenate("call/", sequence, '/', group_.rank), call);
}

std::optional<std::string> Peers::compare_calls(std::int64_t sequence) noexcept {
  std::vector<std::string> calls;
  // The last ones first: they are the likeliest to be missing, and then one look-up is enough.
  for (int member = group_.size() - 1; member >= 0; --member) {
    auto call = find(concatenate("call/", sequence, '/', member));
    if (!call) {
      return std::nullopt;
    }
    calls.insert(calls.begin(), std::move(*call));
  }
  const bool agree = std::all_of(calls.begin(), calls.end(),
                                 [&](const std::string& call) { return call == calls.front(); });
  return agree ? std::string() : difference_text(group_, calls);
}

}  // namespace hopshard::detail
