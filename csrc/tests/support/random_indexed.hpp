// The random calls of random_verify.hpp with their rows and parameters elsewhere: the target's rows
// and the draft tokens without gaps, draft rows in a pool, parameters at slots. Each request must
// get the results of the rectangular call, unless it has no row for a bonus.
#pragma once

#include <algorithm>

#include "support/random_verify.hpp"

namespace cases {

template <class Params>
class Indexed {
 public:
  static constexpr bool kTree = Verification<Params>::kTree;

  explicit Indexed(uint64_t seed, Extent extent = {})
      : inputs(),
        outputs(),
        rectangular(seed, extent),
        batch(rectangular.batch),
        vocab(rectangular.vocab),
        random_(~seed) {
    inputs = rectangular.inputs;
    outputs = rectangular.outputs;
    std::vector<unsigned char> unused(outputs.bytes.size());
    from_ = rectangular.params(rectangular.inputs.bytes.data(), unused.data());
    wild = random_.chance(0.2);
    const int64_t* lengths = nullptr;
    if constexpr (kTree) {
      nodes_ = from_.nodes;
      lengths = from_.counts;
    } else {
      nodes_ = from_.draft_len;
      lengths = from_.draft_lengths;
    }
    for (int64_t b = 0; b < batch; ++b)
      lengths_.push_back(lengths != nullptr ? lengths[b] : nodes_);
    const int64_t kinds = 1 + random_.below(kTree ? 3 : 7);  // one of them at least
    if ((kinds & 1) != 0) pack();
    if ((kinds & 2) != 0) move_to_slots();
    if constexpr (!kTree) {
      if ((kinds & 4) != 0) pool_draft_rows();
    }
  }

  Params params(const unsigned char* in, unsigned char* out) const {
    Params p = rectangular.params(in, out);
    if (offsets_ != kNone) {
      p.target_logits = in + target_;
      p.target_stride[0] = kUnread;
      p.target_stride[1] = target_stride_;
      p.num_rows = num_rows_;
      p.allowed_stride[0] = kUnread;
      Knobs::point(in, allowed_, &p.allowed);
      Knobs::point(in, offsets_, &p.offsets);
      Knobs::point(in, tokens_, &p.draft_tokens);
      if constexpr (kTree) {
        p.counts = nullptr;
        Knobs::point(in, parents_, &p.parents);
        Knobs::point(in, ids_, &p.draft_rows);
      } else {
        p.draft_lengths = nullptr;
        Knobs::point(in, counts_, &p.draft_lengths);
        p.draft_tokens_stride = kUnread;
      }
    }
    if constexpr (!kTree) {
      if (ids_ != kNone) {
        p.draft_logits = pool_ == kNone ? nullptr : in + pool_;
        p.draft_stride[0] = kUnread;
        p.draft_stride[1] = pool_stride_;
        p.num_draft_rows = pool_rows_;
        p.draft_rows_stride = ids_stride_;
        Knobs::point(in, ids_, &p.draft_rows);
        Knobs::point(in, pool_statistics_, &p.draft_statistics);
      }
    }
    if (slots_ == kNone) return p;
    Knobs::point(in, slots_, &p.slots);
    p.num_slots = num_slots_;
    repoint(in, temperature_, &p.sampling.temperature.data);
    repoint(in, top_k_, &p.sampling.top_k.data);
    repoint(in, top_p_, &p.sampling.top_p.data);
    repoint(in, min_p_, &p.sampling.min_p.data);
    repoint(in, seed_, &p.draw.seed.data);
    repoint(in, position_, &p.draw.position.data);
    repoint(in, round_, &p.draw.round.data);
    repoint(in, room_, &p.cut.room.data);
    repoint(in, eos_, &p.cut.eos);
    return p;
  }

  Block inputs, outputs;
  Verification<Params> rectangular;
  int64_t batch, vocab;
  bool wild = false;  // ids, slots and offsets of any value: not the rectangular call's results
  bool bare = false;  // some requests have no row for a bonus: not all of its results

 private:
  static constexpr int64_t kUnread = int64_t{1} << 60;

  // The numbers 0 ... count - 1 in random order.
  std::vector<int64_t> shuffled(int64_t count) {
    std::vector<int64_t> made(static_cast<size_t>(count));
    std::iota(made.begin(), made.end(), 0);
    for (size_t i = made.size(); i > 1; --i)
      std::swap(made[i - 1], made[static_cast<size_t>(random_.below(static_cast<int64_t>(i)))]);
    return made;
  }

  // Rows [.., width] of a dtype as bytes, 0xff where none is set.
  struct RowBytes {
    RowBytes(DType dtype, int64_t rows, int64_t row_stride)
        : size(dtype == DType::kFloat32 ? 4 : 2),
          stride(row_stride),
          bytes(static_cast<size_t>(rows * stride) * size, 0xff) {}
    void set(int64_t row, const void* from, int64_t at, int64_t width) {
      std::memcpy(bytes.data() + static_cast<size_t>(row * stride) * size,
                  static_cast<const unsigned char*>(from) + static_cast<size_t>(at) * size,
                  static_cast<size_t>(width) * size);
    }
    size_t size;
    int64_t stride;
    std::vector<unsigned char> bytes;
  };

  // The target's rows, and the entries of each: a request's last entry has no draft token.
  void pack() {
    std::vector<int64_t> offsets{0};
    const bool counted = !kTree && random_.chance(0.5);  // with lengths, and any number of rows
    for (const int64_t length : lengths_) {
      const int64_t more = counted ? random_.below(4) : 1;
      bare = bare || more == 0;
      offsets.push_back(offsets.back() + std::max<int64_t>(length + more, 0));
    }
    if (counted) counts_ = inputs.put(lengths_);
    first_ = {offsets.begin(), offsets.end() - 1};
    num_rows_ = offsets.back();
    target_stride_ = vocab + random_.below(3);
    RowBytes rows(from_.target_dtype, num_rows_, target_stride_);
    // Rows of the target that the rectangular call has as well.
    const auto rows_of = [&](size_t b) {
      return std::min({lengths_[b] + 1, nodes_ + 1, offsets[b + 1] - offsets[b]});
    };
    for (size_t b = 0; b < lengths_.size(); ++b) {
      for (int64_t i = 0; i < rows_of(b); ++i) {
        const int64_t at =
            static_cast<int64_t>(b) * from_.target_stride[0] + i * from_.target_stride[1];
        rows.set(first_[b] + i, from_.target_logits, at, vocab);
      }
    }
    if (from_.allowed != nullptr) {
      const int64_t words = from_.allowed_stride[1];
      std::vector<int32_t> masks(static_cast<size_t>(num_rows_ * words));
      for (size_t b = 0; b < lengths_.size(); ++b) {
        const int32_t* from = from_.allowed + static_cast<int64_t>(b) * from_.allowed_stride[0];
        const int64_t rows_here = std::max<int64_t>(rows_of(b), 0);
        std::copy(from, from + rows_here * words, masks.begin() + first_[b] * words);
      }
      allowed_ = inputs.put(masks);
    }
    if (wild && random_.chance(0.5)) {
      const int64_t odd[] = {-1, num_rows_ + 1, 0, num_rows_, INT64_MIN, INT64_MAX};
      offsets[static_cast<size_t>(random_.below(batch + 1))] = random_.one_of(odd);
    }
    target_ = inputs.put(rows.bytes);
    offsets_ = inputs.put(offsets);
    tokens_ = put_table(from_.draft_tokens, rectangular.tokens_stride(), nodes_);
    if constexpr (kTree) {
      parents_ = put_table(from_.parents, nodes_, nodes_);
      ids_ = put_table(from_.draft_rows, nodes_ + 1, nodes_ + 1);
    }
  }

  // A table by draft token or by row of the target, of which a request has `most`.
  size_t put_table(const int64_t* from, int64_t stride, int64_t most) {
    if (from == nullptr) return kNone;
    std::vector<int64_t> made(static_cast<size_t>(num_rows_), -7);
    for (size_t b = 0; b < lengths_.size(); ++b) {
      const int64_t count = std::min(lengths_[b] + (most > nodes_ ? 1 : 0), most);
      for (int64_t i = 0; i < count; ++i)
        made[static_cast<size_t>(first_[b] + i)] = from[static_cast<int64_t>(b) * stride + i];
    }
    return inputs.put(made);
  }

  void pool_draft_rows() {
    const std::vector<int64_t> place = shuffled(batch * nodes_ + 3);
    const bool none = from_.draft_logits == nullptr;
    pool_rows_ = none ? 0 : static_cast<int64_t>(place.size());
    pool_stride_ = from_.draft_vocab + random_.below(3);
    RowBytes pool(from_.draft_dtype, pool_rows_, pool_stride_);
    std::vector<RowStatistics> statistics(static_cast<size_t>(pool_rows_));
    const bool ragged = offsets_ != kNone;
    ids_stride_ = ragged ? kUnread : nodes_ + random_.below(2);
    std::vector<int64_t> ids(static_cast<size_t>(ragged ? num_rows_ : batch * (nodes_ + 1)),
                             int64_t{1} << 50);
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t first = ragged ? first_[static_cast<size_t>(b)] : b * ids_stride_;
      for (int64_t i = 0; i < std::min(lengths_[static_cast<size_t>(b)], nodes_); ++i) {
        const int64_t row = place[static_cast<size_t>(b * nodes_ + i)];
        int64_t& id = ids[static_cast<size_t>(first + i)];
        id = none ? -1 : row;
        if (!none) {
          pool.set(row, from_.draft_logits, b * from_.draft_stride[0] + i * from_.draft_stride[1],
                   from_.draft_vocab);
          if (from_.draft_statistics != nullptr)
            statistics[static_cast<size_t>(row)] = from_.draft_statistics[b * nodes_ + i];
        }
        const int64_t odd[] = {-1, -1, -1, -2, pool_rows_, INT64_MIN, INT64_MAX};
        if (wild && random_.chance(0.3)) id = random_.one_of(odd);
      }
    }
    if (!none) pool_ = inputs.put(pool.bytes);
    if (!none && from_.draft_statistics != nullptr) pool_statistics_ = inputs.put(statistics);
    ids_ = inputs.put(ids);
  }

  void move_to_slots() {
    num_slots_ = batch + random_.below(4);
    std::vector<int64_t> slots = shuffled(num_slots_);
    slots.resize(static_cast<size_t>(batch));
    temperature_ = scatter(slots, from_.sampling.temperature.data);
    top_k_ = scatter(slots, from_.sampling.top_k.data);
    top_p_ = scatter(slots, from_.sampling.top_p.data);
    min_p_ = scatter(slots, from_.sampling.min_p.data);
    seed_ = scatter(slots, from_.draw.seed.data);
    position_ = scatter(slots, from_.draw.position.data);
    round_ = scatter(slots, from_.draw.round.data);
    room_ = scatter(slots, from_.cut.room.data);
    if (from_.cut.eos_stride != 0) eos_ = scatter(slots, from_.cut.eos, from_.cut.eos_count);
    const int64_t odd[] = {-1, num_slots_, INT64_MIN, INT64_MAX};
    if (wild && random_.chance(0.5))
      slots[static_cast<size_t>(random_.below(batch))] = random_.one_of(odd);
    slots_ = inputs.put(slots);
  }

  template <class T>
  size_t scatter(const std::vector<int64_t>& slots, const T* each, int64_t width = 1) {
    if (each == nullptr) return kNone;
    std::vector<T> all(static_cast<size_t>(num_slots_ * width), static_cast<T>(77));
    for (size_t b = 0; b < slots.size(); ++b)
      std::copy_n(each + static_cast<int64_t>(b) * width, width, all.begin() + slots[b] * width);
    return inputs.put(all);
  }

  template <class T>
  static void repoint(const unsigned char* in, size_t at, const T** pointer) {
    if (at != kNone) Knobs::point(in, at, pointer);
  }

  Random random_;
  Params from_;  // over the memory of `rectangular`
  std::vector<int64_t> lengths_, first_;
  int64_t nodes_ = 0, num_rows_ = 0, target_stride_ = 0, num_slots_ = 0;
  int64_t pool_rows_ = 0, pool_stride_ = 0, ids_stride_ = 0;
  size_t target_ = kNone, tokens_ = kNone, offsets_ = kNone, parents_ = kNone, ids_ = kNone;
  size_t counts_ = kNone;
  size_t pool_ = kNone, pool_statistics_ = kNone, allowed_ = kNone;
  size_t slots_ = kNone, temperature_ = kNone, top_k_ = kNone, top_p_ = kNone, min_p_ = kNone;
  size_t seed_ = kNone, position_ = kNone, round_ = kNone, room_ = kNone, eos_ = kNone;
};

using IndexedVerifyCase = Indexed<VerifyParams>;
using IndexedTreeCase = Indexed<VerifyTreeParams>;

}  // namespace cases
