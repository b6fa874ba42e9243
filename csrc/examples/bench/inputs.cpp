#include "inputs.hpp"

#include <algorithm>
#include <cmath>
#include <random>
#include <stdexcept>

#include "textbook.hpp"

namespace {

constexpr float kSpread = 3.0f;  // deviation of the draft's logits
constexpr uint64_t kDraftLevel = 2;

void require(const polyspec::Result& result) {
  if (!result.ok()) throw std::runtime_error(result.message);
}

// Draft logits [v] plus as much of the noise [v] as gives the wanted acceptance. It falls from 1 at
// size 0; 14 halvings of [0, 16] find it to a thousandth.
std::vector<float> calibrated(const float* draft, const std::vector<float>& noise,
                              const Shape& shape) {
  const std::vector<double> q = textbook::statistics(draft, shape.vocab, shape.sampling);
  std::vector<float> target(noise.size());
  float low = 0.0f, high = 16.0f;
  for (int halving = 0; halving < 14; ++halving) {
    const float size = (low + high) / 2;
    for (size_t i = 0; i < target.size(); ++i) target[i] = draft[i] + size * noise[i];
    const std::vector<double> p = textbook::statistics(target.data(), shape.vocab, shape.sampling);
    double overlap = 0.0;  // the probability that a token drawn from q is accepted
    for (size_t i = 0; i < p.size(); ++i) overlap += std::min(p[i], q[i]);
    (overlap > shape.acceptance ? low : high) = size;
  }
  return target;
}

}  // namespace

Inputs::Inputs(const Shape& wanted) : shape(wanted) {
  const int64_t rows = shape.batch * shape.draft_len;
  const size_t v = static_cast<size_t>(shape.vocab);
  std::mt19937_64 engine(shape.seed);
  std::normal_distribution<float> normal;
  draft.resize(static_cast<size_t>(rows) * v);
  for (float& z : draft) z = kSpread * normal(engine);
  for (int64_t row = 0; row < rows; ++row) {
    std::vector<float> noise(v);
    for (float& z : noise) z = normal(engine);
    const std::vector<float> verified = calibrated(draft.data() + row * shape.vocab, noise, shape);
    target.insert(target.end(), verified.begin(), verified.end());
    if ((row + 1) % shape.draft_len != 0) continue;
    for (size_t i = 0; i < v; ++i) target.push_back(kSpread * normal(engine));  // the bonus row
  }
  tokens.resize(static_cast<size_t>(rows));
  statistics.resize(static_cast<size_t>(rows));
  seeds.resize(static_cast<size_t>(shape.batch));
  out_tokens.resize(static_cast<size_t>(shape.batch * (shape.draft_len + 1)));
  logprobs.resize(out_tokens.size());
  accepted.resize(static_cast<size_t>(shape.batch));
  status.resize(static_cast<size_t>(shape.batch));
}

void Inputs::load(uint64_t turn, const polyspec::Stream& stream) {
  const int64_t k = shape.draft_len;
  for (int64_t i = 0; i < shape.batch; ++i) {
    seeds[static_cast<size_t>(i)] =
        (shape.seed << 40) + turn * static_cast<uint64_t>(shape.batch) + static_cast<uint64_t>(i);
  }
  std::vector<float> unused(tokens.size());
  std::vector<int32_t> fine(tokens.size());
  for (int64_t request = 0; request < shape.batch; ++request) {
    std::vector<int64_t> positions(static_cast<size_t>(k));
    for (int64_t i = 0; i < k; ++i) positions[static_cast<size_t>(i)] = i;
    polyspec::SampleParams params;
    params.batch = k;
    params.vocab = shape.vocab;
    params.logits = draft.data() + request * k * shape.vocab;
    params.logits_stride = shape.vocab;
    params.sampling = shape.sampling;
    params.draw.seed.value = seeds[static_cast<size_t>(request)];
    params.draw.position.data = positions.data();
    params.draw.level = kDraftLevel;
    params.tokens = tokens.data() + request * k;
    params.logprobs = unused.data();
    params.status = fine.data();
    params.statistics = statistics.data() + request * k;
    require(polyspec::sample(params, stream));
  }
  if (std::any_of(fine.begin(), fine.end(), [](int32_t bits) { return bits != 0; })) {
    throw std::runtime_error("a draft row has no distribution");
  }
}

polyspec::VerifyParams Inputs::verify(polyspec::Rule rule, bool with_statistics) {
  polyspec::VerifyParams params;
  params.batch = shape.batch;
  params.draft_len = shape.draft_len;
  params.vocab = params.draft_vocab = shape.vocab;
  params.target_logits = target.data();
  params.target_stride[0] = (shape.draft_len + 1) * shape.vocab;
  params.target_stride[1] = shape.vocab;
  params.draft_logits = draft.data();
  params.draft_stride[0] = shape.draft_len * shape.vocab;
  params.draft_stride[1] = shape.vocab;
  params.draft_statistics = with_statistics ? statistics.data() : nullptr;
  params.draft_tokens = tokens.data();
  params.draft_tokens_stride = shape.draft_len;
  params.sampling = shape.sampling;
  params.draw.seed.data = seeds.data();
  params.rule = rule;
  params.tokens = out_tokens.data();
  params.num_accepted = accepted.data();
  params.logprobs = logprobs.data();
  params.status = status.data();
  return params;
}

polyspec::SampleParams Inputs::sample() {
  polyspec::SampleParams params;
  params.batch = shape.batch;
  params.vocab = shape.vocab;
  params.logits = target.data();
  params.logits_stride = (shape.draft_len + 1) * shape.vocab;
  params.sampling = shape.sampling;
  params.draw.seed.data = seeds.data();
  params.tokens = out_tokens.data();
  params.logprobs = logprobs.data();
  params.status = status.data();
  return params;
}
