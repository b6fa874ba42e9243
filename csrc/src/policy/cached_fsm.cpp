#include <algorithm>
#include <utility>
#include <vector>

#include "policy/adaptive.hpp"
#include "policy/state_machine.hpp"

namespace polyspec {
namespace policy {
namespace {

// Lowest windows by n-gram, of all rows: a table of fixed size in which a later n-gram replaces an
// earlier one.
class Ngrams {
 public:
  struct Entry {
    uint64_t key = 0;    // 0: free
    int64_t window = 0;  // 0: the n-gram was read, without a draft after it so far
  };
  const Entry* find(uint64_t key) const {
    const Entry& entry = entries_[place(key)];
    return entry.key == key ? &entry : nullptr;
  }
  void read(uint64_t key) {
    Entry& entry = entries_[place(key)];
    if (entry.key != key) entry = {key, 0};
  }
  void learn(uint64_t key, int64_t window) { entries_[place(key)] = {key, window}; }
  void clear() { std::fill(entries_.begin(), entries_.end(), Entry{}); }

 private:
  static constexpr size_t kEntries = size_t{1} << 14;
  static size_t place(uint64_t key) { return static_cast<size_t>(key >> 50); }
  std::vector<Entry> entries_ = std::vector<Entry>(kEntries);
};

// Of the tokens [begin, begin + n), never 0. (The finalizer of splitmix64 after each token.)
uint64_t key_of(const int64_t* begin, int64_t n) {
  uint64_t key = 0;
  for (int64_t i = 0; i < n; ++i) {
    key += static_cast<uint64_t>(begin[i]) + 0x9e3779b97f4a7c15u;
    key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9u;
    key = (key ^ (key >> 27)) * 0x94d049bb133111ebu;
    key ^= key >> 31;
  }
  return key == 0 ? 1 : key;
}

class CachedFsm final : public AdaptivePolicy {
 public:
  explicit CachedFsm(PolicyOptions options)
      : AdaptivePolicy(std::move(options)), latest_(this->options()) {}

 private:
  struct Row {
    StateMachines machines;
    std::vector<int64_t> last;  // at most the last n tokens of the text
    uint64_t key = 0;           // of these, once there are n
  };

  void begin(int64_t row, const RoundReport& report) override {
    at_row(rows_, row) = Row{latest_, {}, 0};
    read(at_row(rows_, row), report);
  }

  void learn(int64_t row, const RoundReport& report) override {
    Row& own = at_row(rows_, row);
    const int64_t most = options().max_windows.back();
    for (int64_t i = 0; i < report.num_steps; ++i) {
      const StepReport& step = report.steps[i];
      if (step.level != count() || step.tokens == 0) continue;
      const bool whole = step.accepted == step.tokens;
      // The round began after this n-gram; of several blocks the first did.
      if (own.key != 0) ngrams_.learn(own.key, std::min(most, step.accepted + (whole ? 2 : 1)));
      break;
    }
    own.machines.move(options(), report);
    latest_ = own.machines;
    read(own, report);
  }

  // Enters the n-grams up to the last token but one; the last is looked up next.
  void read(Row& own, const RoundReport& report) {
    const int64_t n = options().ngram;
    const size_t before = own.last.size();
    own.last.insert(own.last.end(), report.tokens, report.tokens + report.num_tokens);
    const int64_t end = static_cast<int64_t>(own.last.size());
    if (own.key != 0 && end > static_cast<int64_t>(before)) ngrams_.read(own.key);
    for (int64_t at = std::max<int64_t>(n, static_cast<int64_t>(before) + 1); at < end; ++at) {
      ngrams_.read(key_of(own.last.data() + at - n, n));
    }
    own.key = end >= n ? key_of(own.last.data() + end - n, n) : 0;
    if (end > n) own.last.erase(own.last.begin(), own.last.begin() + (end - n));
  }

  void choose(const Choice& choice, int64_t* windows) override {
    const Row& own = at_row(rows_, choice.rows.front());
    const std::vector<int64_t>& states = own.machines.windows();
    std::copy(states.begin(), states.end(), windows);
    const Ngrams::Entry* entry = own.key == 0 ? nullptr : ngrams_.find(own.key);
    if (entry == nullptr) return;
    int64_t& lowest = windows[count() - 1];
    lowest = entry->window > 0 ? entry->window : std::min(2 * lowest, options().max_windows.back());
  }

  void forget() override {
    rows_.clear();
    ngrams_.clear();
    latest_ = StateMachines(options());
  }

  std::vector<Row> rows_;
  Ngrams ngrams_;
  StateMachines latest_;
};

}  // namespace

std::unique_ptr<WindowPolicy> make_cached_fsm(PolicyOptions options) {
  return std::make_unique<CachedFsm>(std::move(options));
}

}  // namespace policy
}  // namespace polyspec
