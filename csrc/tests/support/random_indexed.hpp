// The random calls of random_verify.hpp with their rows and parameters elsewhere: draft rows in a
// pool, parameters at slots, the target's rows without gaps. What each request is to get is what it
// gets from the rectangular call.
#pragma once

#include "support/random_slots.hpp"
#include "support/random_verify.hpp"

namespace cases {

class IndexedVerifyCase {
 public:
  explicit IndexedVerifyCase(uint64_t seed, int64_t forced_vocab = 0)
      : inputs(),
        outputs(),
        rectangular(seed, forced_vocab),
        batch(rectangular.batch),
        vocab(rectangular.vocab),
        random_(~seed) {
    inputs = rectangular.inputs;
    outputs = rectangular.outputs;
    std::vector<unsigned char> unused(outputs.bytes.size());
    from_ = rectangular.params(rectangular.inputs.bytes.data(), unused.data());
    const int64_t kinds = 1 + random_.below(7);  // one of them at least
    wild = random_.chance(0.2);
    find_lengths();
    if ((kinds & 1) != 0) pack_target();
    if ((kinds & 2) != 0) pool_draft_rows();
    if ((kinds & 4) != 0) slots_.emplace_back(random_, inputs, from_, wild);
  }

  VerifyParams params(const unsigned char* in, unsigned char* out) const {
    VerifyParams p = rectangular.params(in, out);
    if (target_ != kNone) {
      p.target_logits = in + target_;
      p.target_stride[0] = kUnread;
      p.target_stride[1] = target_stride_;
      p.draft_lengths = nullptr;
      p.num_rows = num_rows_;
      p.draft_tokens_stride = kUnread;
    }
    Knobs::point(in, offsets_, &p.offsets);
    if (tokens_ != kNone) Knobs::point(in, tokens_, &p.draft_tokens);
    if (ids_ != kNone) {
      p.draft_logits = pool_ == kNone ? nullptr : in + pool_;
      p.draft_stride[0] = kUnread;
      p.draft_stride[1] = pool_stride_;
      p.num_draft_rows = pool_rows_;
      p.draft_rows_stride = ids_stride_;
      Knobs::point(in, ids_, &p.draft_rows);
      Knobs::point(in, pool_statistics_, &p.draft_statistics);
    }
    for (const RandomSlots& slots : slots_) slots.apply(in, &p);
    return p;
  }

  Block inputs, outputs;
  VerifyCase rectangular;
  int64_t batch, vocab;
  bool wild = false;  // ids, slots and offsets of any value: not the rectangular call's results

 private:
  static constexpr int64_t kUnread = int64_t{1} << 60;

  void find_lengths() {
    for (int64_t b = 0; b < batch; ++b) {
      lengths_.push_back(from_.draft_lengths != nullptr ? from_.draft_lengths[b] : from_.draft_len);
    }
  }

  void pack_target() {
    const size_t size = from_.target_dtype == DType::kFloat32 ? 4 : 2;
    std::vector<int64_t> offsets{0}, tokens;
    for (const int64_t length : lengths_) offsets.push_back(offsets.back() + length + 1);
    num_rows_ = offsets.back();
    target_stride_ = vocab + random_.below(3);
    std::vector<unsigned char> rows(static_cast<size_t>(num_rows_ * target_stride_) * size, 0xff);
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t i = 0; i <= lengths_[static_cast<size_t>(b)]; ++i) {
        const bool known = i <= from_.draft_len;
        tokens.push_back(i < from_.draft_len && i < lengths_[static_cast<size_t>(b)]
                             ? from_.draft_tokens[b * from_.draft_tokens_stride + i]
                             : -7);
        const size_t at =
            static_cast<size_t>((offsets[static_cast<size_t>(b)] + i) * target_stride_);
        const size_t from =
            static_cast<size_t>(b * from_.target_stride[0] + i * from_.target_stride[1]);
        if (known) {
          std::memcpy(rows.data() + at * size,
                      static_cast<const unsigned char*>(from_.target_logits) + from * size,
                      static_cast<size_t>(vocab) * size);
        }
      }
    }
    first_ = {offsets.begin(), offsets.end() - 1};
    if (wild && random_.chance(0.5)) {
      const int64_t odd[] = {-1, num_rows_ + 1, 0, num_rows_, INT64_MIN, INT64_MAX};
      offsets[static_cast<size_t>(random_.below(batch + 1))] = random_.one_of(odd);
    }
    target_ = inputs.put(rows);
    tokens_ = inputs.put(tokens);
    offsets_ = inputs.put(offsets);
  }

  void pool_draft_rows() {
    const size_t size = from_.draft_dtype == DType::kFloat32 ? 4 : 2;
    const int64_t k = from_.draft_len;
    std::vector<int64_t> place(static_cast<size_t>(batch * k + 3));
    std::iota(place.begin(), place.end(), 0);
    for (size_t i = place.size(); i > 1; --i)
      std::swap(place[i - 1], place[static_cast<size_t>(random_.below(static_cast<int64_t>(i)))]);
    const bool none = from_.draft_logits == nullptr;
    pool_rows_ = none ? 0 : static_cast<int64_t>(place.size());
    pool_stride_ = from_.draft_vocab + random_.below(3);
    std::vector<unsigned char> pool(static_cast<size_t>(pool_rows_ * pool_stride_) * size, 0xff);
    std::vector<RowStatistics> statistics(static_cast<size_t>(pool_rows_));
    const bool ragged = offsets_ != kNone;
    ids_stride_ = ragged ? kUnread : k + random_.below(2);
    std::vector<int64_t> ids(static_cast<size_t>(ragged ? num_rows_ : batch * (k + 1)),
                             int64_t{1} << 50);
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t length = std::min(lengths_[static_cast<size_t>(b)], k);
      for (int64_t i = 0; i < length; ++i) {
        const int64_t row = place[static_cast<size_t>(b * k + i)];
        int64_t& id = ids[static_cast<size_t>(
            (ragged ? first_[static_cast<size_t>(b)] : b * ids_stride_) + i)];
        id = none ? -1 : row;
        if (!none) {
          const size_t from =
              static_cast<size_t>(b * from_.draft_stride[0] + i * from_.draft_stride[1]);
          std::memcpy(pool.data() + static_cast<size_t>(row * pool_stride_) * size,
                      static_cast<const unsigned char*>(from_.draft_logits) + from * size,
                      static_cast<size_t>(from_.draft_vocab) * size);
          if (from_.draft_statistics != nullptr)
            statistics[static_cast<size_t>(row)] = from_.draft_statistics[b * k + i];
        }
        const int64_t odd[] = {-1, -1, -1, -2, pool_rows_, INT64_MIN, INT64_MAX};
        if (wild && random_.chance(0.3)) id = random_.one_of(odd);
      }
    }
    if (!none) pool_ = inputs.put(pool);
    if (!none && from_.draft_statistics != nullptr) pool_statistics_ = inputs.put(statistics);
    ids_ = inputs.put(ids);
  }

  Random random_;
  VerifyParams from_;  // over the memory of `rectangular`
  std::vector<int64_t> lengths_, first_;
  int64_t num_rows_ = 0, target_stride_ = 0;
  int64_t pool_rows_ = 0, pool_stride_ = 0, ids_stride_ = 0;
  size_t target_ = kNone, tokens_ = kNone, offsets_ = kNone;
  size_t pool_ = kNone, pool_statistics_ = kNone, ids_ = kNone;
  std::vector<RandomSlots> slots_;  // one, or none
};

}  // namespace cases
