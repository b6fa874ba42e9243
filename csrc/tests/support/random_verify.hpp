// Random calls of polyspec::verify, as random_case.hpp makes those of polyspec::sample.
#pragma once

#include "support/random_drafts.hpp"

namespace cases {

// A call of polyspec::verify. Most draft tokens are drawn from the draft's distribution; a few are
// anything at all.
class VerifyCase {
 public:
  explicit VerifyCase(uint64_t seed, int64_t forced_vocab = 0) : random_(seed) {
    vocab = forced_vocab > 0 ? forced_vocab : random_vocab(random_);
    batch = forced_vocab > 0 ? 1 : 1 + random_.below(3);
    length_ = forced_vocab > 0 ? 1 : random_.below(6);
    rule_ = static_cast<polyspec::Rule>(random_.below(2));
    deterministic_ = random_.chance(0.2);
    draft_vocab_ = random_.chance(0.6) ? vocab : 1 + random_.below(vocab);
    target_dtype_ = random_dtype(random_);
    draft_dtype_ = random_.chance(0.5) ? target_dtype_ : random_dtype(random_);
    knobs_.emplace_back(random_, inputs, batch, vocab, length_ + 1);
    make_map();
    make_logits();
    make_draft();
    const size_t rows = static_cast<size_t>(batch * (length_ + 1));
    tokens_ = outputs.reserve<int64_t>(rows);
    accepted_ = outputs.reserve<int64_t>(static_cast<size_t>(batch));
    logprobs_ = outputs.reserve<float>(rows);
    status_ = outputs.reserve<int32_t>(static_cast<size_t>(batch));
    statistics_ = random_.chance(0.8) ? outputs.reserve<RowStatistics>(rows) : kNone;
    cuts_.emplace_back(random_, inputs, outputs, batch, vocab, drafted_);
  }

  VerifyParams params(const unsigned char* in, unsigned char* out) const {
    VerifyParams p;
    p.batch = batch;
    p.draft_len = length_;
    p.vocab = vocab;
    p.draft_vocab = draft_vocab_;
    p.target_dtype = target_dtype_;
    p.target_logits = in + target_;
    p.draft_dtype = draft_dtype_;
    p.draft_logits = deterministic_ ? nullptr : in + draft_;
    for (int i = 0; i < 2; ++i) {
      p.target_stride[i] = target_stride_[i];
      p.draft_stride[i] = draft_stride_[i];
    }
    Knobs::point(in, draft_statistics_, &p.draft_statistics);
    Knobs::point(in, map_, &p.target_to_draft);
    Knobs::point(in, draft_tokens_, &p.draft_tokens);
    p.draft_tokens_stride = length_ + 1;
    Knobs::point(in, lengths_, &p.draft_lengths);
    knobs_[0].apply(in, &p);
    p.rule = rule_;
    Knobs::point(out, tokens_, &p.tokens);
    Knobs::point(out, accepted_, &p.num_accepted);
    Knobs::point(out, logprobs_, &p.logprobs);
    Knobs::point(out, status_, &p.status);
    Knobs::point(out, statistics_, &p.statistics);
    cuts_[0].apply(in, out, &p.cut);
    return p;
  }

  Block inputs, outputs;  // `outputs` stays poisoned: run over a copy of it
  int64_t batch, vocab;

 private:
  // Identity, or a random injection of the draft's ids into the target's.
  void make_map() {
    to_target_.resize(static_cast<size_t>(draft_vocab_));
    for (int64_t j = 0; j < draft_vocab_; ++j) to_target_[static_cast<size_t>(j)] = j;
    if (random_.chance(0.6)) return;
    std::vector<int64_t> ids(static_cast<size_t>(vocab));
    for (int64_t i = 0; i < vocab; ++i) ids[static_cast<size_t>(i)] = i;
    std::vector<int32_t> map(static_cast<size_t>(vocab), -1);
    for (int64_t j = 0; j < draft_vocab_; ++j) {
      std::swap(ids[static_cast<size_t>(j)],
                ids[static_cast<size_t>(j + random_.below(vocab - j))]);
      to_target_[static_cast<size_t>(j)] = ids[static_cast<size_t>(j)];
      map[static_cast<size_t>(to_target_[static_cast<size_t>(j)])] = static_cast<int32_t>(j);
    }
    map_ = inputs.put(map);
  }

  // The draft's logits are the target's plus noise; without noise both distributions are equal.
  void make_logits() {
    target_stride_[1] = vocab + random_.below(3);
    target_stride_[0] = target_stride_[1] * (length_ + 1) + random_.below(5);
    draft_stride_[1] = draft_vocab_ + random_.below(3);
    draft_stride_[0] = draft_stride_[1] * length_ + random_.below(5);
    const bool faults = random_.chance(0.3);
    const float noises[] = {0.0f, 0.3f, 0.3f, 2.0f};
    const float noise = random_.one_of(noises);
    std::vector<float> target(static_cast<size_t>(batch * target_stride_[0]), kNan);
    std::vector<float> draft(static_cast<size_t>(batch * draft_stride_[0]), kNan);
    std::vector<float> any(static_cast<size_t>(vocab));
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t i = 0; i <= length_; ++i) {
        float* p = target.data() + b * target_stride_[0] + i * target_stride_[1];
        random_row(random_, p, vocab, faults);
        if (i == length_) break;
        float* q = draft.data() + b * draft_stride_[0] + i * draft_stride_[1];
        const bool unrelated = random_.chance(0.1);
        if (unrelated) random_row(random_, any.data(), vocab, faults);
        for (int64_t j = 0; j < draft_vocab_; ++j) {
          q[j] = unrelated ? any[static_cast<size_t>(j)]
                           : p[to_target_[static_cast<size_t>(j)]] + noise * random_.normal();
        }
      }
    }
    target_ = put_logits(inputs, target_dtype_, target);
    draft_ = put_logits(inputs, draft_dtype_, draft);
  }

  // Draft tokens, their distributions and the ragged lengths.
  void make_draft() {
    std::vector<int64_t> tokens(static_cast<size_t>(batch * (length_ + 1)),
                                -7);  // the gap is not to be read
    std::vector<RowStatistics> statistics(static_cast<size_t>(batch * length_));
    const bool careless = random_.chance(0.1);
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t i = 0; i < length_; ++i) {
        const int64_t offset = (b * draft_stride_[0] + i * draft_stride_[1]) *
                               (draft_dtype_ == DType::kFloat32 ? 4 : 2);
        const Drafted drafted = draft_token(inputs, knobs_[0], b, draft_dtype_, draft_vocab_,
                                            draft_ + static_cast<size_t>(offset), random_.bits());
        int64_t y = to_target_[static_cast<size_t>(drafted.token)];
        if (careless || random_.chance(0.03))
          y = random_.below(vocab + 2) - (random_.chance(0.1) ? 1 : 0);
        tokens[static_cast<size_t>(b * (length_ + 1) + i)] = y;
        statistics[static_cast<size_t>(b * length_ + i)] = drafted.statistics;
      }
    }
    draft_tokens_ = inputs.put(tokens);
    drafted_ = tokens;
    if (random_.chance(0.1)) forge(statistics);
    if (random_.chance(0.4)) draft_statistics_ = inputs.put(statistics);
    if (random_.chance(0.5)) return;
    std::vector<int64_t> lengths(static_cast<size_t>(batch));
    for (int64_t& one : lengths)
      one = random_.chance(0.03) ? length_ + 1 : random_.below(length_ + 1);
    lengths_ = inputs.put(lengths);
  }

  // Distributions that are not the rows': whatever comes of them comes of them in every backend.
  void forge(std::vector<RowStatistics>& statistics) {
    for (RowStatistics& distribution : statistics) {
      const int64_t kind = random_.below(5);
      const float shifts[] = {0.01f, 1.0f, 1e4f};
      if (kind == 0) distribution.max -= random_.one_of(shifts);
      if (kind == 1) distribution.mass += static_cast<uint64_t>(random_.below(int64_t{1} << 40));
      if (kind == 2) std::swap(distribution, statistics.front());
      if (kind == 3) distribution.threshold = distribution.max;
      if (kind == 4) distribution = {static_cast<float>(random_.normal()), -kInf, random_.bits()};
    }
  }

  Random random_;
  int64_t length_, draft_vocab_;
  int64_t target_stride_[2], draft_stride_[2];
  polyspec::Rule rule_;
  bool deterministic_;
  DType target_dtype_, draft_dtype_;
  std::vector<Knobs> knobs_;
  std::vector<int64_t> to_target_;  // target id of each draft id
  std::vector<int64_t> drafted_;    // draft tokens, and -7 in the gaps
  size_t target_, draft_, draft_tokens_;
  size_t map_ = kNone, draft_statistics_ = kNone, lengths_ = kNone;
  size_t tokens_, accepted_, logprobs_, status_, statistics_;
  std::vector<Cuts> cuts_;
};

}  // namespace cases
