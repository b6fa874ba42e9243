// polyspec::sample and polyspec::verify by hand: small calls with results that can be worked out on
// paper.
#include <cmath>
#include <limits>
#include <vector>

#include "polyspec/verify.hpp"
#include "support/check.hpp"

namespace {

using polyspec::Result;
using polyspec::RowStatistics;
using polyspec::Rule;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr uint64_t kLeast = 0;  // a draw that accepts all that can be accepted, and the first token
constexpr uint64_t kMost =
    ~uint64_t{0};  // a draw that rejects all that can be rejected, and the last token

// One row through sample; the draw's bits may be set.
struct Sampled {
  explicit Sampled(std::vector<float> logits, polyspec::SamplingParams sampling = {},
                   uint64_t bits = kLeast) {
    polyspec::SampleParams p;
    p.batch = 1;
    p.vocab = static_cast<int64_t>(logits.size());
    p.logits = logits.data();
    p.logits_stride = p.vocab;
    p.sampling = sampling;
    p.draw.bits = &bits;
    p.tokens = &token;
    p.logprobs = &logprob;
    p.status = &status;
    p.statistics = &distribution;
    CHECK(polyspec::sample(p).ok());
  }
  int64_t token = -2;
  float logprob = 7.0f;
  int32_t status = -1;
  RowStatistics distribution{};
};

polyspec::SamplingParams filters(float temperature, int64_t top_k = 0, float top_p = 1.0f,
                                 float min_p = 0.0f) {
  polyspec::SamplingParams sampling;
  sampling.temperature.value = temperature;
  sampling.top_k.value = top_k;
  sampling.top_p.value = top_p;
  sampling.min_p.value = min_p;
  return sampling;
}

void test_greedy() {
  CHECK_EQ(1, Sampled({0.0f, 2.0f, 2.0f, 1.0f}, filters(0.0f)).token);  // lowest id on ties
  CHECK_EQ(0, Sampled({-0.0f, 0.0f}, filters(0.0f)).token);             // zeros of either sign tie
  CHECK_EQ(0.0f, Sampled({1.0f, 3.0f}, filters(0.0f)).logprob);
  CHECK_EQ(1, Sampled({-kInf, -1e30f}, filters(0.0f)).token);
  CHECK_EQ(0, Sampled({5.0f}, filters(0.0f)).token);
}

// Only tokens with probability can come out: try both ends of the inverse CDF.
void check_support(const std::vector<float>& logits, polyspec::SamplingParams sampling,
                   int64_t first, int64_t last) {
  CHECK_EQ(first, Sampled(logits, sampling, kLeast).token);
  CHECK_EQ(last, Sampled(logits, sampling, kMost).token);
}

void test_filters() {
  const std::vector<float> z = {std::log(0.1f), std::log(0.4f), std::log(0.3f), std::log(0.2f)};
  check_support(z, filters(1.0f), 0, 3);
  CHECK_NEAR(std::log(0.1), Sampled(z).logprob, 1e-6);
  check_support(z, filters(1.0f, 1), 1, 1);
  check_support(z, filters(1.0f, 2), 1, 2);
  check_support(z, filters(1.0f, 3), 1, 3);
  check_support(z, filters(1.0f, 4), 0, 3);
  check_support(z, filters(1.0f, 99), 0, 3);
  check_support(z, filters(1.0f, 0, 0.0f), 1, 1);  // the likeliest token always stays
  check_support(z, filters(1.0f, 0, 0.65f), 1, 2);
  check_support(z, filters(1.0f, 0, 0.75f), 1, 3);
  check_support(z, filters(1.0f, 0, 1.0f, 0.6f), 1, 2);
  check_support(z, filters(1.0f, 0, 1.0f, 1.0f), 1, 1);
  check_support(z, filters(1.0f, 2, 0.55f), 1, 1);  // top-p after top-k: .4/.7 > .55
  CHECK_NEAR(std::log(4.0 / 7.0), Sampled(z, filters(1.0f, 2)).logprob, 1e-6);
  CHECK_NEAR(std::log(16.0 / 25.0), Sampled(z, filters(0.5f, 2)).logprob, 1e-6);
  check_support({1.0f, 0.0f, 1.0f, 1.0f}, filters(1.0f, 2), 0, 3);  // ties at the edge are all kept
  CHECK_NEAR(std::log(1.0 / 3.0), Sampled({1.0f, 0.0f, 1.0f, 1.0f}, filters(1.0f, 2)).logprob,
             1e-6);
  check_support({-kInf, 1.0f, 1.0f, -kInf}, {}, 1, 2);
}

void check_failed(const Sampled& sampled, int32_t status) {
  CHECK_EQ(status, sampled.status);
  CHECK_EQ(-1, sampled.token);
  CHECK(std::isnan(sampled.logprob));
  CHECK_EQ(uint64_t{0}, sampled.distribution.mass);
}

void test_bad_rows() {
  for (const float temperature : {0.0f, 1.0f}) {
    check_failed(Sampled({0.0f, kNan}, filters(temperature)), polyspec::kStatusNan);
    check_failed(Sampled({-kNan, kInf}, filters(temperature)), polyspec::kStatusNan);
    check_failed(Sampled({0.0f, kInf}, filters(temperature)), polyspec::kStatusInf);
    check_failed(Sampled({-kInf, -kInf}, filters(temperature)), polyspec::kStatusEmptyRow);
  }
  for (const auto& bad :
       {filters(-1.0f), filters(kNan), filters(kInf), filters(1.0f, -1), filters(1.0f, 0, 1.5f),
        filters(1.0f, 0, kNan), filters(1.0f, 0, 1.0f, -0.5f)}) {
    check_failed(Sampled({0.0f, 1.0f}, bad), polyspec::kStatusBadParameter);
  }
}

// One request through verify. target: [k+1, v]; draft: [k, v], or empty for a deterministic
// proposal.
struct Verified {
  Verified(std::vector<float> target, std::vector<int64_t> drafted, std::vector<float> draft,
           std::vector<uint64_t> bits, Rule rule = Rule::kToken, float temperature = 1.0f,
           int64_t length = -1)
      : tokens(drafted.size() + 1, -2),
        logprobs(drafted.size() + 1, 7.0f),
        statistics(drafted.size() + 1) {
    polyspec::VerifyParams p;
    p.batch = 1;
    p.draft_len = static_cast<int64_t>(drafted.size());
    p.vocab = static_cast<int64_t>(target.size()) / (p.draft_len + 1);
    p.draft_vocab = p.vocab;
    p.target_logits = target.data();
    p.target_stride[0] = static_cast<int64_t>(target.size());
    p.target_stride[1] = p.vocab;
    p.draft_logits = draft.empty() ? nullptr : draft.data();
    p.draft_stride[0] = static_cast<int64_t>(draft.size());
    p.draft_stride[1] = p.vocab;
    p.draft_tokens = drafted.data();
    p.draft_tokens_stride = p.draft_len;
    if (length != -1) p.draft_lengths = &length;
    p.sampling.temperature.value = temperature;
    p.draw.bits = bits.data();
    p.rule = rule;
    p.tokens = tokens.data();
    p.num_accepted = &accepted;
    p.logprobs = logprobs.data();
    p.status = &status;
    p.statistics = statistics.data();
    CHECK_EQ(p.draft_len + 1, static_cast<int64_t>(bits.size()));
    CHECK(polyspec::verify(p).ok());
  }
  void check(int64_t want_accepted, int32_t want_status,
             const std::vector<int64_t>& want_tokens) const {
    CHECK_EQ(want_status, status);
    CHECK_EQ(want_accepted, accepted);
    CHECK_EQ(want_tokens.size(), tokens.size());
    for (size_t i = 0; i < tokens.size(); ++i) {
      CHECK_EQ(want_tokens[i], tokens[i]);
      CHECK_EQ(tokens[i] < 0, std::isnan(logprobs[i]));
      CHECK_EQ(tokens[i] < 0, statistics[i].mass == 0);
    }
  }
  std::vector<int64_t> tokens;
  std::vector<float> logprobs;
  std::vector<RowStatistics> statistics;
  int64_t accepted = -2;
  int32_t status = -1;
};

const std::vector<float> kHalves = {0.0f, 0.0f};                          // distribution (1/2, 1/2)
const std::vector<float> kTarget = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};  // three rows of it

void test_verify_greedy() {
  const std::vector<float> z = {0.0f, 1.0f, 2.0f, 2.0f, 1.0f, 0.0f};  // argmax 1, 0, 0
  for (const Rule rule : {Rule::kToken, Rule::kBlock}) {
    Verified(z, {1, 0}, {}, {0, 0, 0}, rule, 0.0f).check(2, 0, {1, 0, 0});
    Verified(z, {1, 1}, {}, {0, 0, 0}, rule, 0.0f).check(1, 0, {1, 0, -1});
    Verified(z, {0, 0}, {}, {0, 0, 0}, rule, 0.0f).check(0, 0, {1, -1, -1});
    Verified({0.0f, 1.0f}, {}, {}, {0}, rule, 0.0f).check(0, 0, {1});
    Verified(z, {1, 9}, {}, {0, 0, 0}, rule, 0.0f)
        .check(1, polyspec::kStatusTokenOutOfRange, {1, -1, -1});
  }
}

void test_verify_rules() {
  const std::vector<float> equal = {0.0f, 0.0f, 0.0f, 0.0f};
  for (const Rule rule : {Rule::kToken, Rule::kBlock}) {
    // Equal distributions are always accepted, the draw of 1 - 2^-53 too.
    Verified(kTarget, {1, 0}, equal, {kMost, kMost, kMost}, rule).check(2, 0, {1, 0, 1});
    // A deterministic proposal of probability 1/2 is a matter of the draw; if rejected, the other
    // token is drawn.
    Verified(kTarget, {1, 0}, {}, {kLeast, kLeast, kLeast}, rule).check(2, 0, {1, 0, 0});
    Verified(kTarget, {1, 0}, {}, {kMost, kMost, kMost}, rule).check(0, 0, {0, -1, -1});
    Verified(kTarget, {1, 0}, {}, {kMost, kMost, kMost}, rule, 1.0f, 0).check(0, 0, {1, -1, -1});
    Verified(kTarget, {1, 0}, {}, {0, 0, 0}, rule, 1.0f, 3)
        .check(0, polyspec::kStatusBadLength, {-1, -1, -1});
    Verified(kTarget, {1, -5}, {}, {kLeast, kLeast, kLeast}, rule)
        .check(1, polyspec::kStatusTokenOutOfRange,
               rule == Rule::kToken ? std::vector<int64_t>{1, -1, -1}
                                    : std::vector<int64_t>{-1, -1, -1});
    // The draft gives its token no probability: the token was drawn from another distribution.
    Verified(kTarget, {1, 0}, {0.0f, -kInf, 0.0f, 0.0f}, {0, 0, 0}, rule)
        .check(0, polyspec::kStatusDraftStatisticsMismatch, {-1, -1, -1});
    Verified(kTarget, {1, 0}, {kNan, 0.0f, 0.0f, 0.0f}, {0, 0, 0}, rule)
        .check(0, polyspec::kStatusNan | polyspec::kStatusDraftRow, {-1, -1, -1});
  }
  // A token that the target excludes is rejected at the least draw there is, and never drawn.
  Verified({-kInf, 0.0f, 0.0f, 0.0f}, {0}, {0.0f, 0.0f}, {kLeast, kLeast}).check(0, 0, {1, -1});
  // A fault after the first rejection is not read.
  Verified({0.0f, 0.0f, kNan, kNan}, {1}, {}, {kMost, kMost}).check(0, 0, {0, -1});
  Verified({0.0f, 0.0f, kNan, kNan}, {1}, {}, {kLeast, kMost})
      .check(1, polyspec::kStatusNan, {1, -1});
}

// Rejected although the residual is nothing: drawn from p, with a note. A hair of difference in the
// distributions does it, at one draw in 2^52; here p(y)/q(y) < 1 by less than a unit of mass.
void test_zero_residual() {
  RowStatistics distribution{0.0f, -kInf, 0};
  const std::vector<float> target = {0.0f, 0.0f, 0.0f, 0.0f};
  const Sampled sampled(kHalves);
  distribution = sampled.distribution;
  distribution.mass -= 1;  // q is larger than p everywhere
  const uint64_t bits[] = {kMost, kLeast};
  const int64_t drafted = 1;
  int64_t tokens[2], accepted;
  float logprobs[2];
  int32_t status;
  polyspec::VerifyParams p;
  p.batch = 1;
  p.draft_len = 1;
  p.vocab = p.draft_vocab = 2;
  p.target_logits = target.data();
  p.target_stride[1] = 2;
  p.draft_logits = kHalves.data();
  p.draft_statistics = &distribution;
  p.draft_tokens = &drafted;
  p.draw.bits = bits;
  p.tokens = tokens;
  p.num_accepted = &accepted;
  p.logprobs = logprobs;
  p.status = &status;
  // Masses are near 2^62, beyond a double's 53 bits: give q more than rounding can hide.
  distribution.mass -= uint64_t{1} << 20;
  CHECK(polyspec::verify(p).ok());
  CHECK_EQ(int32_t{polyspec::kStatusZeroResidual}, status);
  CHECK_EQ(0, accepted);
  CHECK_EQ(0, tokens[0]);
  CHECK_EQ(-1, tokens[1]);
  CHECK_NEAR(std::log(0.5), logprobs[0], 1e-6);
}

template <class Change>
void check_invalid(Change change) {
  const std::vector<float> logits(4, 0.0f);
  const int64_t drafted = 0;
  int64_t tokens[2] = {-2, -2}, accepted = -2;
  float logprobs[2];
  int32_t status;
  polyspec::VerifyParams p;
  p.batch = p.draft_len = 1;
  p.vocab = p.draft_vocab = 2;
  p.target_logits = p.draft_logits = logits.data();
  p.draft_tokens = &drafted;
  p.tokens = tokens;
  p.num_accepted = &accepted;
  p.logprobs = logprobs;
  p.status = &status;
  change(p);
  const Result result = polyspec::verify(p);
  CHECK(result.code == Result::Code::kInvalidArgument);
  CHECK(result.message[0] != '\0');
  CHECK_EQ(-2, tokens[0]);
}

void test_arguments() {
  using Params = polyspec::VerifyParams;
  check_invalid([](Params& p) { p.batch = -1; });
  check_invalid([](Params& p) { p.draft_len = -1; });
  check_invalid([](Params& p) { p.vocab = 0; });
  check_invalid([](Params& p) { p.vocab = int64_t{1} << 31; });
  check_invalid([](Params& p) { p.draft_vocab = 3; });
  check_invalid([](Params& p) { p.draft_vocab = 0; });
  check_invalid([](Params& p) { p.target_logits = nullptr; });
  check_invalid([](Params& p) { p.draft_tokens = nullptr; });
  check_invalid([](Params& p) { p.tokens = nullptr; });
  check_invalid([](Params& p) { p.target_dtype = static_cast<polyspec::DType>(3); });
  check_invalid([](Params& p) { p.draft_dtype = static_cast<polyspec::DType>(-1); });
  check_invalid([](Params& p) { p.rule = static_cast<Rule>(2); });
  check_invalid([](Params& p) { p.draw.level = 0; });
  check_invalid([](Params& p) { p.draw.level = 1 << 16; });
  CHECK(polyspec::verify(Params{}).code == Result::Code::kInvalidArgument);  // vocab 0
  Params empty;
  empty.vocab = 1;
  CHECK(polyspec::verify(empty).ok());  // no requests: nothing to do, nothing needed
  polyspec::SampleParams sample;
  CHECK(polyspec::sample(sample).code == Result::Code::kInvalidArgument);
  sample.vocab = 1;
  CHECK(polyspec::sample(sample).ok());
  sample.ahead = -1;
  CHECK(polyspec::sample(sample).code == Result::Code::kInvalidArgument);
}

// The draw of a token after others that are drawn already.
void test_ahead() {
  const std::vector<float> logits(1000, 0.0f);
  int64_t token = -2;
  float logprob;
  int32_t status;
  polyspec::SampleParams p;
  p.batch = 1;
  p.vocab = 1000;
  p.logits = logits.data();
  p.tokens = &token;
  p.logprobs = &logprob;
  p.status = &status;
  p.draw.position.value = 7;
  CHECK(polyspec::sample(p).ok());
  const int64_t wanted = token;
  p.draw.position.value = 4;
  CHECK(polyspec::sample(p).ok());
  CHECK(token != wanted);
  p.ahead = 3;
  CHECK(polyspec::sample(p).ok());
  CHECK_EQ(wanted, token);
  CHECK_EQ(0, status);
  p.draw.position.value = INT64_MAX - 2;  // the token has none
  CHECK(polyspec::sample(p).ok());
  CHECK_EQ(polyspec::kStatusBadParameter, status);
  CHECK_EQ(-1, token);
}

// Results in columns of tables are equal to contiguous results.
void test_strides() {
  constexpr int64_t kBatch = 5, kVocab = 40, kWidth = 3, kStatistics = 4;
  std::vector<float> logits(kBatch * kVocab);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i * 7 % 11);
  std::vector<int64_t> tokens(kBatch * kWidth, -2), next(kBatch, -2), wanted(kBatch, -2);
  std::vector<int32_t> status(kBatch * kWidth, -3), codes(kBatch);
  std::vector<RowStatistics> statistics(kBatch * kStatistics), rows(kBatch);
  std::vector<float> logprobs(kBatch);
  polyspec::SampleParams p;
  p.batch = kBatch;
  p.vocab = p.logits_stride = kVocab;
  p.logits = logits.data();
  p.draw.seed.value = 3;
  p.logprobs = logprobs.data();
  p.tokens = wanted.data();
  p.status = codes.data();
  p.statistics = rows.data();
  CHECK(polyspec::sample(p).ok());
  p.tokens = tokens.data();
  p.status = status.data();
  p.statistics = statistics.data();
  p.next_ids = next.data();
  p.stride = kWidth;
  p.statistics_stride = kStatistics;
  CHECK(polyspec::sample(p).ok());
  CHECK(next == wanted);
  for (int64_t i = 0; i < kBatch * kWidth; ++i) {
    const size_t at = static_cast<size_t>(i), row = static_cast<size_t>(i / kWidth);
    CHECK_EQ(i % kWidth == 0 ? wanted[row] : -2, tokens[at]);
    CHECK_EQ(i % kWidth == 0 ? 0 : -3, status[at]);
  }
  for (int64_t i = 0; i < kBatch * kStatistics; ++i) {
    const RowStatistics& one = rows[static_cast<size_t>(i / kStatistics)];
    CHECK_EQ(i % kStatistics == 0 ? one.mass : 0, statistics[static_cast<size_t>(i)].mass);
  }
  p.stride = 0;
  CHECK_EQ(std::string("stride: expected >= 1, given 0"), std::string(polyspec::sample(p).message));
}

}  // namespace

int main() {
  test_greedy();
  test_filters();
  test_bad_rows();
  test_verify_greedy();
  test_verify_rules();
  test_zero_residual();
  test_arguments();
  test_ahead();
  test_strides();
  return 0;
}
