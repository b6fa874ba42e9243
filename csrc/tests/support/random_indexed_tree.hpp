// The random calls of random_tree.hpp with their rows and parameters elsewhere: the target's rows
// and the nodes without gaps, parameters at slots. What each request is to get is what it gets from
// the rectangular call.
#pragma once

#include "support/random_slots.hpp"
#include "support/random_tree.hpp"

namespace cases {

class IndexedTreeCase {
 public:
  explicit IndexedTreeCase(uint64_t seed, int64_t forced_vocab = 0)
      : rectangular(seed, forced_vocab),
        batch(rectangular.batch),
        vocab(rectangular.vocab),
        random_(~seed) {
    inputs = rectangular.inputs;
    outputs = rectangular.outputs;
    std::vector<unsigned char> unused(outputs.bytes.size());
    from_ = rectangular.params(rectangular.inputs.bytes.data(), unused.data());
    const int64_t kinds = 1 + random_.below(3);  // one of them at least
    wild = random_.chance(0.2);
    if ((kinds & 1) != 0) pack();
    if ((kinds & 2) != 0) slots_.emplace_back(random_, inputs, from_, wild);
  }

  VerifyTreeParams params(const unsigned char* in, unsigned char* out) const {
    VerifyTreeParams p = rectangular.params(in, out);
    if (offsets_ != kNone) {
      p.target_logits = in + target_;
      p.target_stride[0] = kUnread;
      p.target_stride[1] = target_stride_;
      p.counts = nullptr;
      p.num_rows = num_rows_;
      Knobs::point(in, offsets_, &p.offsets);
      Knobs::point(in, tokens_, &p.draft_tokens);
      Knobs::point(in, parents_, &p.parents);
      Knobs::point(in, ids_, &p.draft_rows);
    }
    for (const RandomSlots& slots : slots_) slots.apply(in, &p);
    return p;
  }

  Block inputs, outputs;
  TreeCase rectangular;
  int64_t batch, vocab;
  bool wild = false;  // slots and offsets of any value: not the rectangular call's results

 private:
  static constexpr int64_t kUnread = int64_t{1} << 60;

  void pack() {
    const size_t size = from_.target_dtype == DType::kFloat32 ? 4 : 2;
    target_stride_ = vocab + random_.below(3);
    std::vector<int64_t> offsets{0}, tokens, parents, ids;
    std::vector<unsigned char> rows;
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t count = from_.counts != nullptr ? from_.counts[b] : from_.nodes;
      offsets.push_back(offsets.back() + count + 1);
      for (int64_t i = 0; i <= count; ++i) {
        const bool node = i < count;  // the last entry is no node's
        tokens.push_back(node ? from_.draft_tokens[b * from_.nodes + i] : -7);
        parents.push_back(node ? from_.parents[b * from_.nodes + i] : -7);
        if (from_.draft_rows != nullptr) ids.push_back(from_.draft_rows[b * (from_.nodes + 1) + i]);
        const unsigned char* const row =
            static_cast<const unsigned char*>(from_.target_logits) +
            static_cast<size_t>(b * from_.target_stride[0] + i * from_.target_stride[1]) * size;
        rows.insert(rows.end(), row, row + static_cast<size_t>(vocab) * size);
        rows.resize(tokens.size() * static_cast<size_t>(target_stride_) * size, 0xff);
      }
    }
    num_rows_ = offsets.back();
    if (wild && random_.chance(0.5)) {
      const int64_t odd[] = {-1, num_rows_ + 1, 0, num_rows_, INT64_MIN, INT64_MAX};
      offsets[static_cast<size_t>(random_.below(batch + 1))] = random_.one_of(odd);
    }
    target_ = inputs.put(rows);
    tokens_ = inputs.put(tokens);
    parents_ = inputs.put(parents);
    if (from_.draft_rows != nullptr) ids_ = inputs.put(ids);
    offsets_ = inputs.put(offsets);
  }

  Random random_;
  VerifyTreeParams from_;  // over the memory of `rectangular`
  int64_t num_rows_ = 0, target_stride_ = 0;
  size_t offsets_ = kNone, target_ = kNone, tokens_ = kNone, parents_ = kNone, ids_ = kNone;
  std::vector<RandomSlots> slots_;  // one, or none
};

}  // namespace cases
