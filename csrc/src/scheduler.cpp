#include "polyspec/scheduler.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace polyspec {
namespace {

constexpr size_t kMaxWindows = (1u << 16) - 2;  // levels < 2^16, see draw_bits

void check_windows(const std::vector<int64_t>& windows) {
  for (size_t i = 0; i < windows.size(); ++i) {
    if (windows[i] < 0) {
      throw std::invalid_argument("window of level " + std::to_string(i + 1) +
                                  " must be >= 0, got " + std::to_string(windows[i]));
    }
  }
}

}  // namespace

Scheduler::Scheduler(std::vector<int64_t> windows, std::vector<int64_t> rounds)
    : windows_(std::move(windows)), rounds_(std::move(rounds)) {
  if (windows_.empty() || windows_.size() > kMaxWindows) {
    throw std::invalid_argument("a chain needs 1 to " + std::to_string(kMaxWindows) +
                                " windows, one for each level but the last, got " +
                                std::to_string(windows_.size()));
  }
  check_windows(windows_);
  if (rounds_.empty()) rounds_.assign(windows_.size(), 0);
  if (rounds_.size() != windows_.size()) {
    throw std::invalid_argument("expected " + std::to_string(windows_.size()) +
                                " rounds, one for each window, got " +
                                std::to_string(rounds_.size()));
  }
  for (size_t i = 0; i < rounds_.size(); ++i) {
    if (rounds_[i] < 0) {
      throw std::invalid_argument("rounds of level " + std::to_string(i + 1) +
                                  " must be >= 0, got " + std::to_string(rounds_[i]));
    }
  }
  pending_.resize(windows_.size());
}

void Scheduler::start(int64_t max_new_tokens) {
  if (max_new_tokens < 0) {
    throw std::invalid_argument("max_new_tokens must be >= 0, got " +
                                std::to_string(max_new_tokens));
  }
  pending_.assign(windows_.size(), Pending{});
  committed_ = 0;
  max_new_tokens_ = max_new_tokens;
  ended_ = false;
}

Step Scheduler::next() const {
  if (done()) return {};
  // The lowest level whose round has begun. A level above it must not run: its verdict would throw
  // the tokens of that round away, which is lossless only if nobody has looked at them. Only
  // set_windows can make this matter.
  size_t lowest = pending_.size() - 1;
  while (lowest > 0 && pending_[lowest].count == 0 && !pending_[lowest].closed) --lowest;

  int64_t room = max_new_tokens_ - committed_;  // >= 1 at every level reached below
  int64_t wanted = 0;
  for (size_t i = 0; i < pending_.size(); ++i) {
    const Pending& pending = pending_[i];
    const int64_t want = std::min(windows_[i], room - 1);
    const bool full = pending.count >= want || (rounds_[i] > 0 && pending.blocks >= rounds_[i]);
    if (i >= lowest && (full || pending.closed)) {
      return {Step::Kind::kVerify, static_cast<int32_t>(i) + 1, pending.count};
    }
    wanted = want - pending.count;
    room -= 1 + pending.count;
  }
  return {Step::Kind::kDraft, levels(), wanted};
}

void Scheduler::report(int32_t level, int64_t emitted, bool eos) {
  const Step step = next();
  if (step.kind == Step::Kind::kDone) throw std::logic_error("report() after the request is done");
  if (level != step.level) {
    throw std::logic_error("report() for level " + std::to_string(level) +
                           ", but next() names level " + std::to_string(step.level));
  }
  const bool draft = step.kind == Step::Kind::kDraft;
  // A pending EOS, when accepted, is the last token emitted; when rejected, its correction stands
  // in its place.
  const bool bonus = !draft && !pending_[level - 1].eos;
  const int64_t least = draft ? 0 : 1;
  const int64_t most = step.count + (bonus ? 1 : 0);
  if (emitted < least || emitted > most) {
    throw std::logic_error("level " + std::to_string(level) + " must emit " +
                           std::to_string(least) + " to " + std::to_string(most) + " tokens, got " +
                           std::to_string(emitted));
  }
  if (eos && emitted == 0)
    throw std::logic_error("an EOS must be among the emitted tokens, got none");

  if (!draft) pending_[level - 1] = Pending{};
  if (level == 1) {
    committed_ += emitted;
    ended_ = eos;
    return;
  }
  Pending& above = pending_[level - 2];
  above.count += emitted;
  ++above.blocks;
  above.eos = eos;
  above.closed = eos || (draft && emitted < step.count);
}

void Scheduler::set_windows(std::vector<int64_t> windows) {
  if (windows.size() != windows_.size()) {
    throw std::invalid_argument("expected " + std::to_string(windows_.size()) + " windows, got " +
                                std::to_string(windows.size()));
  }
  check_windows(windows);
  windows_ = std::move(windows);
}

int64_t Scheduler::pending(int32_t level) const {
  if (level < 1 || level >= levels()) {
    throw std::out_of_range("level must be in [1, " + std::to_string(levels() - 1) + "], got " +
                            std::to_string(level));
  }
  return pending_[level - 1].count;
}

}  // namespace polyspec
