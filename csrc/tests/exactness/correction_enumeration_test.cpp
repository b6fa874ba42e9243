// A correction is drawn by rejection before it is drawn from the residual's masses (verify.hpp).
// Each try, by exact enumeration of its two draws after failed tries: the token that it gives has
// the residual's distribution, and it succeeds as often as the residual has mass, to 1e-12; so has
// the token that is drawn where all fail.
#include <cstdio>
#include <random>

#include "exactness/enumeration/outcomes.hpp"
#include "polyspec/verify_tree.hpp"

namespace {

using namespace enumeration;
using polyspec::kResidualTries;

constexpr double kExact = 1e-12;
constexpr uint64_t kAll = ~uint64_t{0};

struct Case {
  const char* name;
  polyspec::Rule rule = polyspec::Rule::kToken;
  int children = 0;  // of a tree's root, drawn from one distribution; 0: a block of one token
  bool statistics = false;
  bool one_hot = false;
  bool mapped = false;
  float top_p = 1.0f;
};

// A request with all draft tokens rejected: the token after them, as a function of its draws.
class Correction {
 public:
  Correction(const Case& test, int64_t vocab, uint64_t seed)
      : case_(test), vocab_(vocab), draws_(2 * kResidualTries) {
    std::mt19937_64 random(seed);
    const auto logit = [&] { return static_cast<float>(random() >> 40) / 8388608.0f * 4.0f; };
    for (int64_t x = 0; x < vocab; ++x) target_.push_back(logit());
    for (int64_t x = 0; x < vocab; ++x) draft_.push_back(logit());
    // The draft knows the ids in another order.
    for (int64_t x = 0; x < vocab; ++x)
      map_.push_back(static_cast<int32_t>(test.mapped ? vocab - 1 - x : x));
    sampling_.temperature.value = 0.8f;
    sampling_.top_p.value = test.top_p;
    p_ = sampled(target_, nullptr);
    const Distribution own = sampled(draft_, &statistics_);
    for (int64_t x = 0; x < vocab; ++x) q_.push_back(own[map_[x]]);
    // The draft token: of the tokens that p may give, the one with the draft's largest excess.
    for (int64_t x = 1; x < vocab; ++x) {
      if (p_[x] > 0.0 && (p_[y_] == 0.0 || q_[x] - p_[x] > q_[y_] - p_[y_])) y_ = x;
    }
    if (test.one_hot) {
      q_.assign(static_cast<size_t>(vocab), 0.0);
      q_[y_] = 1.0;
    }
    rows_.assign(target_.begin(), target_.end());
    for (int i = 1; i < 3; ++i) rows_.insert(rows_.end(), target_.begin(), target_.end());
  }

  bool rejects() const { return q_[y_] > p_[y_]; }
  int64_t rejected() const { return y_; }
  const Distribution& p() const { return p_; }
  uint64_t& token_draw(int64_t number) { return draws_[2 * number]; }
  uint64_t& test_draw(int64_t number) { return draws_[2 * number + 1]; }
  uint64_t& emit_draw() { return emit_; }

  // max(p - s q, 0), s as that many children leave it.
  Distribution residual() const {
    double scale = 1.0;
    Distribution left(p_.size());
    for (int child = 0;; ++child) {
      double total = 0.0;
      for (size_t x = 0; x < left.size(); ++x)
        total += left[x] = std::max(p_[x] - scale * q_[x], 0.0);
      if (child + 1 >= case_.children) return left;
      scale += total;
    }
  }

  int64_t run() { return case_.children > 0 ? run_tree() : run_block(); }

 private:
  Distribution sampled(const std::vector<float>& logits, polyspec::RowStatistics* statistics) {
    polyspec::RowStatistics unused;
    polyspec::SampleParams params;
    params.vocab = vocab_;
    params.logits = logits.data();
    params.logits_stride = vocab_;
    params.sampling = sampling_;
    return find_sample_distribution(params, statistics == nullptr ? &unused : statistics);
  }

  template <class Params>
  void fill(Params* params) {
    params->batch = 1;
    params->vocab = params->draft_vocab = vocab_;
    params->target_logits = rows_.data();
    params->target_stride[0] = 3 * vocab_;
    params->target_stride[1] = vocab_;
    params->draft_logits = case_.one_hot ? nullptr : draft_.data();
    if (case_.statistics) params->draft_statistics = &statistics_;
    if (case_.mapped) params->target_to_draft = map_.data();
    params->sampling = sampling_;
    params->draw.try_bits = draws_.data();
    params->tokens = tokens_;
    params->num_accepted = &accepted_;
    params->logprobs = logprobs_;
    params->status = &status_;
  }

  int64_t run_block() {
    polyspec::VerifyParams params;
    fill(&params);
    const uint64_t bits[] = {kAll, emit_};
    params.draw.bits = bits;
    params.draft_len = 1;
    params.draft_tokens = &y_;
    params.draft_tokens_stride = 1;
    params.draft_stride[0] = params.draft_stride[1] = vocab_;
    params.rule = case_.rule;
    CHECK(polyspec::verify(params).ok());
    return emitted();
  }

  int64_t run_tree() {
    polyspec::VerifyTreeParams params;
    fill(&params);
    const int64_t nodes[] = {y_, y_}, parents[] = {-1, -1}, ids[] = {0, 0, 0};
    int64_t path[2], rows[3];
    const uint64_t bits[] = {kAll, kAll, emit_, emit_, emit_};
    params.rule = case_.rule;
    params.nodes = case_.children;
    params.depth = 1;
    params.draw.bits = bits + 2 - case_.children;
    params.draft_tokens = nodes;
    params.parents = parents;
    params.draft_rows = ids;
    params.num_draft_rows = 1;
    params.draft_stride = vocab_;
    params.path = path;
    params.rows = rows;
    CHECK(polyspec::verify_tree(params).ok());
    return emitted();
  }

  int64_t emitted() const {
    CHECK_EQ(0, status_);
    CHECK_EQ(0, accepted_);
    return tokens_[0];
  }

  Case case_;
  int64_t vocab_, y_ = 0;
  polyspec::SamplingParams sampling_;
  std::vector<float> target_, draft_, rows_;
  std::vector<int32_t> map_;
  Distribution p_, q_;
  polyspec::RowStatistics statistics_{};
  std::vector<uint64_t> draws_;
  uint64_t emit_ = 0;
  int64_t tokens_[3], accepted_ = 0;
  float logprobs_[3];
  int32_t status_ = 0;
};

// First bits that draw each token of a distribution, and then 2^64, as fractions of it.
std::vector<double> running_sums(const Distribution& distribution) {
  std::vector<double> sums{0.0};
  for (double share : distribution) sums.push_back(sums.back() + share);
  return sums;
}

// Largest differences from the residual's distribution over the tries, and from its mass.
void prove(const Case& test, int64_t vocab, uint64_t seed, double* worst, int* cases) {
  Correction correction(test, vocab, seed);
  if (!correction.rejects()) return;
  const Distribution left = correction.residual();
  const Distribution expected = normalised(left);
  double mass = 0.0;
  int64_t first = -1, second = -1;  // tokens that may be drawn
  for (int64_t x = 0; x < vocab; ++x) {
    mass += left[x];
    if (left[x] < 1e-3) continue;
    (first < 0 ? first : second) = x;
  }
  if (second < 0) return;  // which try gave the only token is unknown
  ++*cases;
  const std::vector<double> sums = running_sums(correction.p());
  const auto inside = [&](int64_t x) {  // bits in the middle of the bits that draw x from p
    return static_cast<uint64_t>((sums[x] + 0.5 * correction.p()[x]) * kTwo64);
  };
  const auto fail = [&](int64_t number) {
    correction.token_draw(number) = inside(correction.rejected());
    correction.test_draw(number) = kAll;
  };
  for (int64_t j = 0; j < kResidualTries; ++j) fail(j);

  std::vector<uint64_t> first_bits;
  const Distribution behind = find_distribution(
      [&](uint64_t bits) {
        correction.emit_draw() = bits;
        return correction.run();
      },
      expected, &first_bits);
  for (int64_t x = 0; x < vocab; ++x) *worst = std::max(*worst, std::fabs(behind[x] - expected[x]));

  for (int64_t j = 0; j < kResidualTries; ++j) {
    Distribution given(static_cast<size_t>(vocab), 0.0);
    for (int64_t x = 0; x < vocab; ++x) {
      if (correction.p()[x] == 0.0) continue;
      const int64_t other = x == first ? second : first;
      correction.emit_draw() = first_bits[other];  // the token if the try fails
      correction.token_draw(j) = inside(x);
      const Edge edge = find_edge(
          [&](uint64_t bits) {
            correction.test_draw(j) = bits;
            const int64_t token = correction.run();
            CHECK(token == x || token == other);
            return token == x;
          },
          left[x] / correction.p()[x]);
      given[x] = correction.p()[x] * edge.fraction();
      // The bits that draw x from p are the same in `sample`.
      for (const double end : {1e-9, 1.0 - 1e-9}) {
        correction.test_draw(j) = 0;
        correction.token_draw(j) =
            static_cast<uint64_t>((sums[x] + end * correction.p()[x]) * kTwo64);
        CHECK_EQ(left[x] > 0.0 ? x : other, correction.run());
      }
    }
    double total = 0.0;
    for (double share : given) total += share;
    *worst = std::max(*worst, std::fabs(total - mass));
    for (int64_t x = 0; x < vocab; ++x) *worst = std::max(*worst, std::fabs(given[x] - left[x]));
    fail(j);
  }
}

}  // namespace

int main() {
  using polyspec::Rule;
  const Case all[] = {
      {"token rule", Rule::kToken},
      {"token rule, statistics handed over", Rule::kToken, 0, true},
      {"token rule, deterministic proposal", Rule::kToken, 0, false, true},
      {"token rule, top-p, id map", Rule::kToken, 0, false, false, true, 0.8f},
      {"block rule", Rule::kBlock},
      {"tree, one child", Rule::kToken, 1},
      {"tree, one child, statistics handed over", Rule::kToken, 1, true},
      {"tree, two children", Rule::kToken, 2},
      {"tree by the block rule, one child", Rule::kBlock, 1},
      {"tree, two children, top-p, id map", Rule::kToken, 2, true, false, true, 0.8f},
  };
  for (const Case& test : all) {
    double worst = 0.0;
    int cases = 0;
    for (uint64_t seed = 0; seed < 60; ++seed)
      prove(test, static_cast<int64_t>(3 + seed % 4), seed, &worst, &cases);
    std::printf("%-45s %2d cases, furthest %.1e\n", test.name, cases, worst);
    CHECK_BELOW(kExact, worst);
    CHECK_ABOVE(2, cases);
  }
  return 0;
}
