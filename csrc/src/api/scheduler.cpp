#include "polyspec/scheduler.hpp"

#include <stdexcept>
#include <string>
#include <utility>

#include "core/schedule_row.hpp"

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
  shape_.levels = static_cast<int32_t>(windows_.size()) + 1;
  words_.assign(static_cast<size_t>(shape_.words()), 0);
  for (size_t i = 0; i < windows_.size(); ++i) {
    int64_t* own = words_.data() + shape_.level_at(static_cast<int32_t>(i) + 1);
    own[RoundShape::kWindow] = windows_[i];
    own[RoundShape::kBound] = rounds_[i];
  }
}

void Scheduler::start(int64_t max_new_tokens) {
  if (max_new_tokens < 0) {
    throw std::invalid_argument("max_new_tokens must be >= 0, got " +
                                std::to_string(max_new_tokens));
  }
  for (int32_t level = 1; level < levels(); ++level) {
    int64_t* own = words_.data() + shape_.level_at(level);
    own[RoundShape::kPending] = own[RoundShape::kBlocks] = own[RoundShape::kClosed] = 0;
  }
  words_[RoundShape::kRoom] = max_new_tokens;
  words_[RoundShape::kTailPending] = 0;
  committed_ = 0;
}

Step Scheduler::next() const {
  Step step;
  step.level = core::due_level(shape_, words_.data(), &step.count, &step.of_tail);
  if (step.level > 0) step.kind = step.level == levels() ? Step::Kind::kDraft : Step::Kind::kVerify;
  return step;
}

void Scheduler::report(int32_t level, int64_t emitted, bool eos) {
  const Step step = next();
  if (step.kind == Step::Kind::kDone) throw std::logic_error("report() after the request is done");
  if (level != step.level) {
    throw std::logic_error("report() for level " + std::to_string(level) +
                           ", but next() names level " + std::to_string(step.level));
  }
  const bool draft = step.kind == Step::Kind::kDraft;
  // A pending EOS, when accepted, is the last token emitted; when rejected, its correction replaces
  // it.
  const bool bonus = !draft && words_[shape_.level_at(level) + RoundShape::kClosed] != 2;
  const int64_t least = draft ? 0 : 1;
  const int64_t most = step.count + (bonus ? 1 : 0);
  if (emitted < least || emitted > most) {
    throw std::logic_error("level " + std::to_string(level) + " must emit " +
                           std::to_string(least) + " to " + std::to_string(most) + " tokens, got " +
                           std::to_string(emitted));
  }
  if (eos && emitted == 0)
    throw std::logic_error("an EOS must be among the emitted tokens, got none");
  core::advance(shape_, words_.data(), level, step.count, step.of_tail, emitted, eos);
  if (level == 1) committed_ += emitted;
}

void Scheduler::set_windows(std::vector<int64_t> windows) {
  if (windows.size() != windows_.size()) {
    throw std::invalid_argument("expected " + std::to_string(windows_.size()) + " windows, got " +
                                std::to_string(windows.size()));
  }
  check_windows(windows);
  windows_ = std::move(windows);
  for (size_t i = 0; i < windows_.size(); ++i) {
    words_[shape_.level_at(static_cast<int32_t>(i) + 1) + RoundShape::kWindow] = windows_[i];
  }
}

void Scheduler::set_tail(int64_t tail) {
  if (tail < 0) throw std::invalid_argument("tail must be >= 0, got " + std::to_string(tail));
  if (tail > 0 && levels() == 2)
    throw std::invalid_argument("a tail needs three levels, got 2 with a tail of " +
                                std::to_string(tail));
  words_[RoundShape::kTailWindow] = tail;
}

int64_t Scheduler::pending(int32_t level) const {
  if (level < 1 || level >= levels()) {
    throw std::out_of_range("level must be in [1, " + std::to_string(levels() - 1) + "], got " +
                            std::to_string(level));
  }
  return words_[shape_.level_at(level) + RoundShape::kPending];
}

}  // namespace polyspec
