#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "policy/adaptive.hpp"
#include "policy/renewal_steps.hpp"

namespace polyspec {
namespace policy {
namespace {

constexpr size_t kPositions = 32;  // later positions count as the last
constexpr double kUnknown = 0.7;   // acceptance before anything was verified
constexpr double kUnknownWeight = 10;
constexpr double kSharedWeight = 30;  // of all rows in a row's estimate, in tokens
constexpr double kPooledWeight = 48;  // of all positions in a position's
constexpr double kSlower = 20;        // of a level's estimates of all rows, and of its positions
constexpr double kIdle = 0.97;        // a round in which a level verified nothing

double odds(double p) { return p / (1 - p); }

// Tokens accepted, and tokens that a verification came to.
struct Counts {
  double accepted = 0, reached = 0;

  void decay(double by) {
    accepted *= by;
    reached *= by;
  }
  void add(int64_t tokens, int64_t won) {
    accepted += static_cast<double>(won);
    reached += static_cast<double>(won + (won < tokens ? 1 : 0));
  }
  // With `weight` tokens of which a share of `prior` was accepted.
  double share(double prior, double weight) const {
    return (accepted + weight * prior) / (reached + weight);
  }
};

// One level over all rows.
struct Shared {
  Counts all;
  std::array<Counts, kPositions> at{};

  void add(double forgetting, int64_t tokens, int64_t won) {
    all.decay(forgetting);
    all.add(tokens, won);
    for (Counts& one : at) one.decay(forgetting);
    const int64_t reached = std::min(tokens, won + 1), last = kPositions - 1;
    for (int64_t j = 0; j < std::min(reached, last); ++j)
      at[static_cast<size_t>(j)].add(1, j < won);
    if (reached > last) at.back().add(reached - last, won - last);
  }
};

// Part of a chain, from a level downwards, with windows.
struct Candidate {
  Lengths block;                     // tokens that its topmost level emits; not kept for the target
  double tokens = 0;                 // the mean of that
  double seconds = 0;                // of a pass of that level and all below it
  int64_t window = 0;                // of that level
  const Candidate* below = nullptr;  // the rest of it; null: the drafter, or the level is alone

  bool cheaper(const Candidate& other) const {
    return seconds * other.tokens < other.seconds * tokens;
  }
  bool has(const int64_t* windows, const int64_t* end) const {
    const Candidate* part = this;
    for (; part != nullptr && windows != end; part = part->below, ++windows) {
      if (part->window != *windows) return false;
      if (part->window == 0) return true;  // no level below drafts
    }
    return true;
  }
};

// Candidates of one level; their memory is used again for the next choice.
class Candidates {
 public:
  void clear() { used_ = 0; }
  Candidate& add() {
    if (used_ == all_.size()) all_.emplace_back();
    return all_[used_++];
  }

  // The `most` cheapest, or all; valid until `clear`.
  const std::vector<const Candidate*>& cheapest(size_t most) {
    order_.clear();
    for (size_t i = 0; i < used_; ++i) order_.push_back(&all_[i]);
    if (order_.size() > most) {
      std::nth_element(order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(most),
                       order_.end(),
                       [](const Candidate* x, const Candidate* y) { return x->cheaper(*y); });
      order_.resize(most);
    }
    return order_;
  }

 private:
  std::deque<Candidate> all_;  // which does not move them as it grows
  size_t used_ = 0;
  std::vector<const Candidate*> order_;
};

class Joint final : public AdaptivePolicy {
 public:
  explicit Joint(PolicyOptions options) : AdaptivePolicy(std::move(options)) { forget(); }

 private:
  using Row = std::vector<Counts>;  // [n-1]

  void begin(int64_t row, const RoundReport&) override {
    at_row(rows_, row).assign(static_cast<size_t>(count()), {});
  }

  void learn(int64_t row, const RoundReport& report) override {
    Row& own = at_row(rows_, row);
    const double keep = options().forgetting;
    const double keep_shared = 1 - (1 - keep) / kSlower;
    std::vector<bool> verified(own.size(), false);
    for (int64_t i = 0; i < report.num_steps; ++i) {
      const StepReport& step = report.steps[i];
      const size_t at = static_cast<size_t>(step.level - 1);
      if (at >= own.size() || step.tokens == 0) continue;
      own[at].decay(keep);
      own[at].add(step.tokens, step.accepted);
      shared_[at].add(keep_shared, step.tokens, step.accepted);
      verified[at] = true;
    }
    for (size_t i = 0; i < own.size(); ++i) {
      if (verified[i]) continue;
      own[i].decay(kIdle);
      shared_[i].all.decay(kIdle);
    }
  }

  // [j]: the probability that the first j tokens of a block are accepted, j up to `most`; of
  // several rows the mean.
  void survival(const std::vector<int64_t>& rows, size_t level, int64_t most) {
    reach_.assign(static_cast<size_t>(most) + 1, 0.0);
    const double each = 1 / static_cast<double>(rows.size());
    for (const int64_t row : rows) {
      add_survival(at_row(rows_, row)[level], shared_[level], most, each);
    }
  }

  void add_survival(const Counts& own, const Shared& shared, int64_t most, double weight) {
    const double all = shared.all.share(kUnknown, kUnknownWeight);
    const double now = own.share(all, kSharedWeight);
    // How much better or worse a position does than all of them is slow to change; how well all of
    // them do is not: odds(position) odds(now) / odds(all).
    const double ratio = odds(now) / odds(all);
    double accepted = 0, reach = weight;
    reach_[0] += reach;
    for (size_t j = 0; j < static_cast<size_t>(most); ++j) {
      if (j < kPositions) {
        const double slow = shared.at[j].share(all, kPooledWeight);
        const double x = ratio * slow;
        accepted = std::min(options().max_acceptance, x / (1 - slow + x));
      }
      reach *= accepted;
      reach_[j + 1] += reach;
    }
  }

  void choose(const Choice& choice, int64_t* windows) override {
    std::copy(options().windows.begin(), options().windows.end(), windows);
    const int64_t batch = choice.batch;
    if (times().at(1, batch).seconds(0) <= 0) return;  // no times yet
    shared_by_ = static_cast<int64_t>(choice.rows.size());
    const std::vector<const Candidate*>* below = nullptr;
    for (int32_t level = count(); level >= 1; --level) {
      const size_t i = static_cast<size_t>(level - 1);
      const int64_t most = options().max_windows[i];
      const WidthTimes& verify = times().at(level, batch);
      int64_t longest = most;
      if (below != nullptr) {
        for (const Candidate* one : *below) {
          // Where a window is cut to its limit, blocks are longer than it.
          const int64_t rounds = std::max<int64_t>(1, most / (one->window + 1));
          longest = std::max(longest, rounds * (static_cast<int64_t>(one->block.size()) - 1));
        }
      }
      survival(choice.rows, i, longest + 1);
      Candidates& found = found_[i];
      found.clear();
      if (!(choice.some && level == 1)) {
        pending_.assign(1, 1.0);
        add(found, verify, level, 0, 0, nullptr);
      }
      if (level == count()) {
        const WidthTimes& draft = times().at(levels(), batch);
        for (int64_t k = 1; k <= most; ++k) {
          pending_.assign(static_cast<size_t>(k) + 1, 0.0);
          pending_.back() = 1;
          add(found, verify, level, k, draft.seconds(k), nullptr);
        }
      } else {
        for (const Candidate* one : *below) add_rounds(found, verify, level, *one);
      }
      if (level > 1) below = &found.cheapest(level == 2 && count() == 2 ? kKept : kKeptDeep);
    }
    settle(choice.now, windows);
  }

  // r rounds of `one`, for every r that fills the window, until more of them have cost more per
  // token a few times.
  void add_rounds(Candidates& found, const WidthTimes& verify, int32_t level,
                  const Candidate& one) {
    const int64_t most = options().max_windows[static_cast<size_t>(level - 1)];
    const int64_t block = one.window + 1;
    double least = 0;
    int32_t dearer = 0;
    pending_.assign(1, 1.0);
    for (int64_t r = 1; r == 1 || (r * block <= most && dearer < kDearer); ++r) {
      join(pending_, one.block, &joined_);
      while (joined_.size() > 1 && joined_.back() < kNegligible) joined_.pop_back();
      std::swap(pending_, joined_);
      const Candidate& made = add(found, verify, level, std::min(r * block, most),
                                  static_cast<double>(r) * one.seconds, &one);
      const double each = made.seconds / made.tokens;
      dearer = least > 0 && each >= least ? dearer + 1 : 0;
      least = least > 0 ? std::min(least, each) : each;
    }
  }

  // With `pending_`, the distribution of its pending tokens.
  const Candidate& add(Candidates& found, const WidthTimes& verify, int32_t level, int64_t window,
                       double gathered, const Candidate* below) {
    Candidate& made = found.add();
    const auto survives = [this](size_t j) { return reach_[j]; };
    made.seconds = gathered + verify.between(mean_of_most(pending_, shared_by_));
    made.tokens = emitted_mean(pending_, survives);
    if (level > 1) emitted(pending_, survives, &made.block);
    made.window = window;
    made.below = below;
    return made;
  }

  // The best windows, or the present windows where the best are hardly better: each change may cost
  // a device a new graph, and the estimates are not exact.
  void settle(const std::vector<int64_t>& now, int64_t* windows) {
    const Candidate *best = nullptr, *same = nullptr;
    for (const Candidate* one : found_[0].cheapest(SIZE_MAX)) {
      if (best == nullptr || one->cheaper(*best)) best = one;
      if (same == nullptr && one->has(now.data(), now.data() + now.size())) same = one;
    }
    if (same != nullptr &&
        same->seconds * best->tokens * kWorthwhile <= best->seconds * same->tokens) {
      best = same;
    }
    for (; best != nullptr; best = best->below) *windows++ = best->window;
  }

  bool by_times() const override { return true; }

  void forget() override {
    rows_.clear();
    shared_.assign(static_cast<size_t>(count()), {});
    found_.resize(static_cast<size_t>(count()));
  }

  // Candidates of a level that the one above tries; of longer chains fewer.
  static constexpr size_t kKept = 17, kKeptDeep = 6;
  static constexpr double kWorthwhile = 0.997;  // of the seconds per token of the windows in use
  static constexpr int32_t kDearer = 2;         // numbers of rounds beyond the best that are tried
  static constexpr double kNegligible = 1e-7;   // probability of a length
  std::vector<Row> rows_;
  std::vector<Shared> shared_;  // [n-1]
  // Room for a choice.
  std::vector<Candidates> found_;  // [n-1]
  Lengths reach_, pending_, joined_;
  int64_t shared_by_ = 1;  // rows; the longest decides the time of a pass
};

}  // namespace

std::unique_ptr<WindowPolicy> make_joint(PolicyOptions options) {
  return std::make_unique<Joint>(std::move(options));
}

}  // namespace policy
}  // namespace polyspec
