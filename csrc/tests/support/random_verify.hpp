// Random calls of polyspec::verify and polyspec::verify_tree, as random_case.hpp for
// polyspec::sample. A block is a tree with parents i - 1, so that one generator serves both. Most
// draft tokens are drawn from the row before them; a few are arbitrary.
#pragma once

#include <numeric>
#include <type_traits>

#include "polyspec/verify_tree.hpp"
#include "support/random_drafts.hpp"

namespace cases {

using polyspec::VerifyTreeParams;

// Params: VerifyParams of blocks, VerifyTreeParams of trees.
template <class Params>
class Verification {
 public:
  static constexpr bool kTree = std::is_same_v<Params, VerifyTreeParams>;

  explicit Verification(uint64_t seed, Extent extent = {}) : random_(seed + (kTree ? 1 : 0)) {
    vocab = extent.random() ? random_vocab(random_) : extent.vocab;
    batch = extent.random() ? 1 + random_.below(3) : extent.batch;
    nodes_ = extent.random() ? random_.below(kTree ? 12 : 6) : extent.drafted;
    if (!extent.random() && nodes_ == 0) nodes_ = kTree ? 3 : 1;
    depth_ = kTree && random_.chance(0.1) ? random_.below(nodes_ + 1) : nodes_;
    draft_rows_ = nodes_ + (kTree ? 1 : 0);
    draft_vocab_ = random_.chance(0.6) ? vocab : 1 + random_.below(vocab);
    target_dtype_ = random_dtype(random_);
    draft_dtype_ = random_.chance(0.5) ? target_dtype_ : random_dtype(random_);
    rule_ = static_cast<polyspec::Rule>(random_.below(2));
    deterministic_ = random_.chance(0.2);
    knobs_.emplace_back(random_, inputs, batch, vocab, nodes_ + 1 + (kTree ? depth_ : 0));
    make_map();
    make_logits();
    make_drafts();
    make_lengths();
    const size_t requests = static_cast<size_t>(batch);
    const size_t emitted = requests * static_cast<size_t>(depth_ + 1);
    tokens_ = outputs.reserve<int64_t>(emitted);
    accepted_ = outputs.reserve<int64_t>(requests);
    if (kTree) path_ = outputs.reserve<int64_t>(requests * static_cast<size_t>(depth_));
    if (kTree) rows_ = outputs.reserve<int64_t>(emitted);
    logprobs_ = outputs.reserve<float>(emitted);
    status_ = outputs.reserve<int32_t>(requests);
    statistics_ = random_.chance(0.8) ? outputs.reserve<RowStatistics>(emitted) : kNone;
    cuts_.emplace_back(random_, inputs, outputs, batch, vocab, drafted_);
    if (random_.chance(0.3))
      allowed_ = inputs.put(random_masks(random_, batch * (nodes_ + 1), vocab));
  }

  Params params(const unsigned char* in, unsigned char* out) const {
    Params p;
    p.batch = batch;
    p.vocab = vocab;
    p.draft_vocab = draft_vocab_;
    p.target_dtype = target_dtype_;
    p.target_logits = in + target_;
    for (int i = 0; i < 2; ++i) p.target_stride[i] = target_stride_[i];
    Knobs::point(in, allowed_, &p.allowed);
    p.allowed_stride[1] = (vocab + 31) / 32;
    p.allowed_stride[0] = (nodes_ + 1) * p.allowed_stride[1];
    p.draft_dtype = draft_dtype_;
    if (!deterministic_) p.draft_logits = in + draft_;
    Knobs::point(in, draft_statistics_, &p.draft_statistics);
    Knobs::point(in, map_, &p.target_to_draft);
    Knobs::point(in, draft_tokens_, &p.draft_tokens);
    if constexpr (kTree) {
      p.nodes = nodes_;
      p.depth = depth_;
      p.draft_stride = draft_stride_[1];
      p.num_draft_rows = deterministic_ ? 0 : batch * draft_rows_;
      Knobs::point(in, ids_, &p.draft_rows);
      Knobs::point(in, parents_, &p.parents);
      Knobs::point(in, lengths_, &p.counts);
      Knobs::point(out, path_, &p.path);
      Knobs::point(out, rows_, &p.rows);
    } else {
      p.draft_len = nodes_;
      for (int i = 0; i < 2; ++i) p.draft_stride[i] = draft_stride_[i];
      p.draft_tokens_stride = tokens_stride();
      Knobs::point(in, lengths_, &p.draft_lengths);
    }
    p.rule = rule_;
    knobs_[0].apply(in, &p);
    Knobs::point(out, tokens_, &p.tokens);
    Knobs::point(out, accepted_, &p.num_accepted);
    Knobs::point(out, logprobs_, &p.logprobs);
    Knobs::point(out, status_, &p.status);
    Knobs::point(out, statistics_, &p.statistics);
    cuts_[0].apply(in, out, &p.cut);
    return p;
  }

  // Elements from a request's draft tokens to the next one's: of blocks with a gap.
  int64_t tokens_stride() const { return nodes_ + (kTree ? 0 : 1); }

  Block inputs, outputs;  // `outputs` stays poisoned: run over a copy of it
  int64_t batch, vocab;

 private:
  // Identity, or a random injection of the draft's ids into the target's.
  void make_map() {
    to_target_.resize(static_cast<size_t>(draft_vocab_));
    std::iota(to_target_.begin(), to_target_.end(), 0);
    if (random_.chance(0.6)) return;
    std::vector<int64_t> ids(static_cast<size_t>(vocab));
    std::iota(ids.begin(), ids.end(), 0);
    std::vector<int32_t> map(static_cast<size_t>(vocab), -1);
    for (size_t j = 0; j < to_target_.size(); ++j) {
      std::swap(ids[j],
                ids[j + static_cast<size_t>(random_.below(vocab - static_cast<int64_t>(j)))]);
      to_target_[j] = ids[j];
      map[static_cast<size_t>(ids[j])] = static_cast<int32_t>(j);
    }
    map_ = inputs.put(map);
  }

  // The draft's logits are the target's plus noise; without noise both distributions are equal.
  void make_logits() {
    target_stride_[1] = vocab + random_.below(3);
    target_stride_[0] = target_stride_[1] * (nodes_ + 1) + random_.below(5);
    draft_stride_[1] = draft_vocab_ + random_.below(3);
    draft_stride_[0] = draft_stride_[1] * draft_rows_ + (kTree ? 0 : random_.below(5));
    const bool faults = random_.chance(0.3);
    const float noises[] = {0.0f, 0.3f, 0.3f, 2.0f};
    const float noise = random_.one_of(noises);
    std::vector<float> target(static_cast<size_t>(batch * target_stride_[0]), kNan);
    std::vector<float> draft(static_cast<size_t>(batch * draft_stride_[0]), kNan);
    std::vector<float> any(static_cast<size_t>(vocab));
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t i = 0; i <= nodes_; ++i) {
        float* p = target.data() + b * target_stride_[0] + i * target_stride_[1];
        random_row(random_, p, vocab, faults);
        if (i == draft_rows_) break;
        float* q = draft.data() + b * draft_stride_[0] + i * draft_stride_[1];
        const bool unrelated = random_.chance(0.1);
        if (unrelated) random_row(random_, any.data(), vocab, faults);
        for (size_t j = 0; j < to_target_.size(); ++j) {
          const size_t id = static_cast<size_t>(to_target_[j]);
          q[j] = unrelated ? any[id] : p[id] + noise * random_.normal();
        }
      }
    }
    target_ = put_logits(inputs, target_dtype_, target);
    draft_ = put_logits(inputs, draft_dtype_, draft);
  }

  // Draft tokens, the statistics of their rows, and of trees parents and draft rows.
  void make_drafts() {
    std::vector<int64_t> tokens(static_cast<size_t>(batch * tokens_stride()), kUnread);
    std::vector<int64_t> parents(static_cast<size_t>(batch * nodes_));
    std::vector<int64_t> ids(static_cast<size_t>(batch * draft_rows_));
    std::vector<RowStatistics> statistics(ids.size());
    std::iota(ids.begin(), ids.end(), 0);
    for (int64_t& id : ids) id = kTree && random_.chance(0.4) ? -1 : id;
    const bool careless = random_.chance(0.05);
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t i = 0; i < nodes_; ++i) {
        int64_t& parent = parents[static_cast<size_t>(b * nodes_ + i)];
        parent = i - 1;
        if (kTree) parent = random_.below(random_.chance(0.5) ? i + 1 : 1 + i / 3) - 1;
        int64_t& token = tokens[static_cast<size_t>(b * tokens_stride() + i)];
        const size_t row = static_cast<size_t>(b * draft_rows_ + parent + 1);
        const bool chosen = kTree && (deterministic_ || ids[row] < 0);
        token = drawn(b, parent + 1, !chosen, &statistics[row]);
        if (careless || random_.chance(0.02))
          token = random_.below(vocab + 2) - (random_.chance(0.1) ? 1 : 0);
        if (kTree && random_.chance(0.01)) parent = random_.chance(0.5) ? i : -2;
      }
    }
    for (int64_t& id : ids) {
      const int64_t odd[] = {-2, static_cast<int64_t>(ids.size()), INT64_MAX};
      if (kTree && random_.chance(0.01)) id = random_.one_of(odd);
    }
    drafted_ = tokens;
    draft_tokens_ = inputs.put(tokens);
    if (kTree) parents_ = inputs.put(parents);
    if (kTree && !deterministic_) ids_ = inputs.put(ids);
    if (random_.chance(0.1)) forge(statistics);
    if (!deterministic_ && random_.chance(0.4)) draft_statistics_ = inputs.put(statistics);
  }

  // A token of the draft's row, with its statistics stored, or of the target's.
  int64_t drawn(int64_t b, int64_t row, bool by_draft, RowStatistics* statistics) {
    const DType dtype = by_draft ? draft_dtype_ : target_dtype_;
    const int64_t* stride = by_draft ? draft_stride_ : target_stride_;
    const int64_t bytes = (b * stride[0] + row * stride[1]) * (dtype == DType::kFloat32 ? 4 : 2);
    const Drafted drafted =
        draft_token(inputs, knobs_[0], b, dtype, by_draft ? draft_vocab_ : vocab,
                    (by_draft ? draft_ : target_) + static_cast<size_t>(bytes), random_.bits());
    if (!by_draft) return drafted.token;
    *statistics = drafted.statistics;
    return to_target_[static_cast<size_t>(drafted.token)];
  }

  // How many draft tokens each request has; a few cannot be.
  void make_lengths() {
    if (random_.chance(0.4)) return;
    std::vector<int64_t> lengths(static_cast<size_t>(batch));
    for (int64_t& one : lengths) {
      one = random_.chance(0.5) ? nodes_ : random_.below(nodes_ + 1);
      if (random_.chance(0.03)) one = random_.chance(0.5) ? nodes_ + 1 : -1;
    }
    lengths_ = inputs.put(lengths);
  }

  // Distributions that are not the rows': every backend must give the same result.
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

  static constexpr int64_t kUnread = -7;  // in gaps
  Random random_;
  int64_t nodes_, depth_, draft_vocab_;  // draft tokens of a request, of its longest path
  int64_t draft_rows_;                   // of a request
  int64_t target_stride_[2], draft_stride_[2];
  polyspec::Rule rule_;
  bool deterministic_;  // all draft tokens
  DType target_dtype_, draft_dtype_;
  std::vector<Knobs> knobs_;
  std::vector<int64_t> to_target_;  // target id of each draft id
  std::vector<int64_t> drafted_;    // draft tokens, and kUnread in the gaps
  size_t target_, draft_, draft_tokens_;
  size_t map_ = kNone, draft_statistics_ = kNone, lengths_ = kNone, parents_ = kNone, ids_ = kNone;
  size_t allowed_ = kNone;
  size_t tokens_, accepted_, logprobs_, status_, statistics_, path_ = kNone, rows_ = kNone;
  std::vector<Cuts> cuts_;
};

using VerifyCase = Verification<VerifyParams>;
using TreeCase = Verification<VerifyTreeParams>;

}  // namespace cases
