// Random calls of polyspec::verify_tree, as random_case.hpp makes those of polyspec::sample. Most
// children are drawn from their draft row, or likely; a few are anything at all.
#pragma once

#include "polyspec/verify_tree.hpp"
#include "support/random_drafts.hpp"

namespace cases {

using polyspec::VerifyTreeParams;

class TreeCase {
 public:
  explicit TreeCase(uint64_t seed, int64_t forced_vocab = 0) : random_(seed + 0x7ee) {
    vocab = forced_vocab > 0 ? forced_vocab : random_vocab(random_);
    batch = forced_vocab > 0 ? 1 : 1 + random_.below(3);
    nodes_ = forced_vocab > 0 ? 3 : random_.below(12);
    depth_ = random_.chance(0.1) ? random_.below(nodes_ + 1) : nodes_;
    draft_vocab_ = random_.chance(0.6) ? vocab : 1 + random_.below(vocab);
    target_dtype_ = random_dtype(random_);
    draft_dtype_ = random_.chance(0.5) ? target_dtype_ : random_dtype(random_);
    knobs_.emplace_back(random_, inputs, batch, vocab, nodes_ + depth_ + 1);
    make_rows();
    const std::vector<int64_t> drafted = make_tree();
    const size_t emitted = static_cast<size_t>(batch * (depth_ + 1));
    tokens_ = outputs.reserve<int64_t>(emitted);
    accepted_ = outputs.reserve<int64_t>(static_cast<size_t>(batch));
    path_ = outputs.reserve<int64_t>(static_cast<size_t>(batch * depth_));
    rows_ = outputs.reserve<int64_t>(emitted);
    logprobs_ = outputs.reserve<float>(emitted);
    status_ = outputs.reserve<int32_t>(static_cast<size_t>(batch));
    statistics_ = random_.chance(0.8) ? outputs.reserve<RowStatistics>(emitted) : kNone;
    cuts_.emplace_back(random_, inputs, outputs, batch, vocab, drafted);
  }

  VerifyTreeParams params(const unsigned char* in, unsigned char* out) const {
    VerifyTreeParams p;
    p.batch = batch;
    p.nodes = nodes_;
    p.depth = depth_;
    p.vocab = vocab;
    p.draft_vocab = draft_vocab_;
    p.target_dtype = target_dtype_;
    p.target_logits = in + target_;
    p.target_stride[0] = target_stride_[0];
    p.target_stride[1] = target_stride_[1];
    Knobs::point(in, drafted_, &p.draft_tokens);
    Knobs::point(in, parents_, &p.parents);
    Knobs::point(in, counts_, &p.counts);
    p.draft_dtype = draft_dtype_;
    if (ids_ != kNone) {
      p.draft_logits = in + pool_;
      p.draft_stride = pool_stride_;
      p.num_draft_rows = pool_rows_;
    }
    Knobs::point(in, ids_, &p.draft_rows);
    Knobs::point(in, pool_statistics_, &p.draft_statistics);
    knobs_[0].apply(in, &p);
    Knobs::point(out, tokens_, &p.tokens);
    Knobs::point(out, accepted_, &p.num_accepted);
    Knobs::point(out, path_, &p.path);
    Knobs::point(out, rows_, &p.rows);
    Knobs::point(out, logprobs_, &p.logprobs);
    Knobs::point(out, status_, &p.status);
    Knobs::point(out, statistics_, &p.statistics);
    cuts_[0].apply(in, out, &p.cut);
    return p;
  }

  Block inputs, outputs;  // `outputs` stays poisoned: run over a copy of it
  int64_t batch, vocab;

 private:
  // The pool's rows are the target's with noise, those of all requests in one order.
  void make_rows() {
    target_stride_[1] = vocab + random_.below(3);
    target_stride_[0] = target_stride_[1] * (nodes_ + 1) + random_.below(5);
    pool_stride_ = draft_vocab_ + random_.below(3);
    pool_rows_ = batch * (nodes_ + 1);
    const bool faults = random_.chance(0.2);
    const float noises[] = {0.0f, 0.3f, 2.0f};
    const float noise = random_.one_of(noises);
    std::vector<float> target(static_cast<size_t>(batch * target_stride_[0]), kNan);
    std::vector<float> pool(static_cast<size_t>(pool_rows_ * pool_stride_), kNan);
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t i = 0; i <= nodes_; ++i) {
        float* p = target.data() + b * target_stride_[0] + i * target_stride_[1];
        random_row(random_, p, vocab, faults);
        float* q = pool.data() + (b * (nodes_ + 1) + i) * pool_stride_;
        for (int64_t j = 0; j < draft_vocab_; ++j) q[j] = p[j] + noise * random_.normal();
      }
    }
    target_ = put_logits(inputs, target_dtype_, target);
    pool_ = put_logits(inputs, draft_dtype_, pool);
  }

  // Returns the nodes' tokens.
  std::vector<int64_t> make_tree() {
    const size_t all = static_cast<size_t>(batch * nodes_);
    std::vector<int64_t> parents(all), tokens(all), counts(static_cast<size_t>(batch), nodes_);
    std::vector<int64_t> ids(static_cast<size_t>(pool_rows_));
    std::vector<RowStatistics> statistics(static_cast<size_t>(pool_rows_));
    for (size_t i = 0; i < ids.size(); ++i)
      ids[i] = random_.chance(0.4) ? -1 : static_cast<int64_t>(i);
    const bool by_ids = random_.chance(0.8);
    for (int64_t b = 0; b < batch; ++b) {
      if (random_.chance(0.3))
        counts[static_cast<size_t>(b)] = random_.below(nodes_ + 1) - (random_.chance(0.05) ? 1 : 0);
      for (int64_t i = 0; i < nodes_; ++i) {
        const size_t at = static_cast<size_t>(b * nodes_ + i);
        parents[at] = random_.below(random_.chance(0.5) ? i + 1 : 1 + i / 3) - 1;
        const int64_t row = b * (nodes_ + 1) + parents[at] + 1;
        tokens[at] = drawn(b, row, by_ids && ids[static_cast<size_t>(row)] >= 0, &statistics);
        if (random_.chance(0.01)) parents[at] = random_.chance(0.5) ? i : -2;
        if (random_.chance(0.01)) tokens[at] = random_.chance(0.5) ? vocab : -1;
      }
    }
    for (int64_t& id : ids) {
      const int64_t odd[] = {-2, pool_rows_, INT64_MAX};
      if (random_.chance(0.01)) id = random_.one_of(odd);
    }
    drafted_ = inputs.put(tokens);
    parents_ = inputs.put(parents);
    if (random_.chance(0.7)) counts_ = inputs.put(counts);
    if (by_ids) {
      ids_ = inputs.put(ids);
      if (random_.chance(0.4)) pool_statistics_ = inputs.put(statistics);
    }
    return tokens;
  }

  // A token of the pool's row, or of the target's; notes the pool's statistics.
  int64_t drawn(int64_t b, int64_t row, bool from_pool, std::vector<RowStatistics>* statistics) {
    const DType dtype = from_pool ? draft_dtype_ : target_dtype_;
    const int64_t at = from_pool
                           ? row * pool_stride_
                           : b * target_stride_[0] + (row - b * (nodes_ + 1)) * target_stride_[1];
    const size_t offset = static_cast<size_t>(at * (dtype == DType::kFloat32 ? 4 : 2));
    const Drafted drafted =
        draft_token(inputs, knobs_[0], b, dtype, from_pool ? draft_vocab_ : vocab,
                    (from_pool ? pool_ : target_) + offset, random_.bits());
    if (from_pool) (*statistics)[static_cast<size_t>(row)] = drafted.statistics;
    return drafted.token;
  }

  Random random_;
  int64_t nodes_, depth_, draft_vocab_;
  int64_t target_stride_[2], pool_stride_ = 0, pool_rows_ = 0;
  DType target_dtype_, draft_dtype_;
  std::vector<Knobs> knobs_;
  size_t target_, pool_, drafted_, parents_;
  size_t counts_ = kNone, ids_ = kNone, pool_statistics_ = kNone;
  size_t tokens_, accepted_, path_, rows_, logprobs_, status_, statistics_;
  std::vector<Cuts> cuts_;
};

}  // namespace cases
