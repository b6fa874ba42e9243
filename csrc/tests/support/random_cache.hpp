// Random calls of the operators of polyspec/kv_cache.hpp, as random_case.hpp for polyspec::sample.
// Caches are outputs: the calls change them. Between vectors there are gaps, some rows do not fit,
// and some tables and paths are damaged.
#pragma once

#include <algorithm>
#include <numeric>

#include "polyspec/kv_cache.hpp"
#include "support/random_case.hpp"

namespace cases {

// Vectors [n0, n1, n2, dim] in a block, with gaps.
struct Vectors {
  Vectors(int64_t n0, int64_t n1, int64_t n2, int64_t dim, int64_t gap) {
    stride[2] = dim + gap;
    stride[1] = stride[2] * n2 + gap;
    stride[0] = stride[1] * n1 + gap;
    elements = stride[0] * n0;
  }
  void put(Random& random, Block& block, int32_t element_size) {
    std::vector<unsigned char> bytes(static_cast<size_t>(elements * element_size));
    for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random.bits());
    at = block.put(bytes);
  }
  template <class Place, class Byte>
  void apply(Byte* base, Place* place) const {
    place->data = base + at;
    std::copy(stride, stride + 3, place->stride);
  }
  int64_t stride[3], elements;
  size_t at = kNone;
};

// The kinds of vectors of a cache.
struct Element {
  explicit Element(Random& random) {
    const int64_t dims[] = {1, 3, 8, 16, 64, 96, 128};
    const int32_t sizes[] = {1, 2, 4};
    const int64_t gaps[] = {0, 0, 8, 16, 1};
    key_dim = random.one_of(dims);
    value_dim = random.chance(0.6) ? key_dim : random.one_of(dims);
    size = random.one_of(sizes);
    gap = random.one_of(gaps);
    heads = 1 + random.below(4);
  }
  int64_t key_dim, value_dim, gap, heads;
  int32_t size;
};

// The new tokens of an append, and its row parameters.
class NewTokensCase {
 public:
  NewTokensCase(Random& random, Block& inputs, Block& outputs, const Element& element,
                int64_t capacity)
      : batch(1 + random.below(9)),
        tokens_(random.below(9)),
        element_(element),
        keys_(batch, element.heads, tokens_, element.key_dim, element.gap),
        values_(batch, element.heads, tokens_, element.value_dim, element.gap) {
    keys_.put(random, inputs, element.size);
    values_.put(random, inputs, element.size);
    std::vector<int64_t> lengths(static_cast<size_t>(batch)), counts(lengths);
    for (int64_t& length : lengths)
      length = random.below(capacity + 3) - (random.chance(0.05) ? capacity : 0);
    for (int64_t& count : counts) count = random.below(tokens_ + 2) - random.chance(0.03);
    lengths_ = inputs.put(lengths);
    if (random.chance(0.5)) counts_ = inputs.put(counts);
    new_lengths_ = outputs.reserve<int64_t>(static_cast<size_t>(batch));
    status_ = outputs.reserve<int32_t>(static_cast<size_t>(batch));
  }

  void apply(const unsigned char* in, unsigned char* out, polyspec::NewTokens* p) const {
    p->batch = batch;
    p->heads = element_.heads;
    p->tokens = tokens_;
    p->key_dim = element_.key_dim;
    p->value_dim = element_.value_dim;
    p->element_size = element_.size;
    keys_.apply(in, &p->keys);
    values_.apply(in, &p->values);
    Knobs::point(in, lengths_, &p->lengths);
    Knobs::point(in, counts_, &p->counts);
    Knobs::point(out, new_lengths_, &p->new_lengths);
    Knobs::point(out, status_, &p->status);
  }

  int64_t batch;

 private:
  int64_t tokens_;
  Element element_;
  Vectors keys_, values_;
  size_t lengths_, counts_ = kNone, new_lengths_, status_;
};

class AppendCase {
 public:
  explicit AppendCase(uint64_t seed, Extent = {})
      : random_(seed),
        element_(random_),
        capacity_(1 + random_.below(40)),
        new_(random_, inputs, outputs, element_, capacity_),
        keys_(new_.batch, element_.heads, capacity_, element_.key_dim, element_.gap),
        values_(new_.batch, element_.heads, capacity_, element_.value_dim, element_.gap),
        ring_(random_.chance(0.4)),
        sinks_(ring_ ? random_.below(capacity_) : 0) {
    keys_.put(random_, outputs, element_.size);
    values_.put(random_, outputs, element_.size);
  }

  polyspec::AppendParams params(const unsigned char* in, unsigned char* out) const {
    polyspec::AppendParams p;
    new_.apply(in, out, &p.in);
    p.capacity = capacity_;
    p.ring = ring_;
    p.sinks = sinks_;
    keys_.apply(out, &p.keys);
    values_.apply(out, &p.values);
    return p;
  }

  Block inputs, outputs;  // run over a copy of `outputs`

 private:
  Random random_;
  Element element_;
  int64_t capacity_;
  NewTokensCase new_;
  Vectors keys_, values_;
  bool ring_;
  int64_t sinks_;
};

class PagedAppendCase {
 public:
  explicit PagedAppendCase(uint64_t seed, Extent = {})
      : random_(seed + 0x9a6e),
        element_(random_),
        page_size_(1 + random_.below(9)),
        max_pages_(1 + random_.below(4)),
        new_(random_, inputs, outputs, element_, page_size_ * max_pages_),
        pages_(new_.batch * max_pages_ + random_.below(20)),
        keys_(pages_, element_.heads, page_size_, element_.key_dim, element_.gap),
        values_(pages_, element_.heads, page_size_, element_.value_dim, element_.gap) {
    keys_.put(random_, outputs, element_.size);
    values_.put(random_, outputs, element_.size);
    std::vector<int32_t> ids(static_cast<size_t>(pages_));
    std::iota(ids.begin(), ids.end(), 0);
    for (size_t i = ids.size(); i > 1; --i)
      std::swap(ids[i - 1], ids[static_cast<size_t>(random_.below(static_cast<int64_t>(i)))]);
    ids.resize(static_cast<size_t>(new_.batch * max_pages_));
    for (int32_t& id : ids) {
      const int32_t odd[] = {-1, static_cast<int32_t>(pages_), INT32_MAX};
      if (random_.chance(0.03)) id = random_.one_of(odd);
    }
    table_ = inputs.put(ids);
  }

  polyspec::PagedAppendParams params(const unsigned char* in, unsigned char* out) const {
    polyspec::PagedAppendParams p;
    new_.apply(in, out, &p.in);
    p.pages = pages_;
    p.page_size = page_size_;
    p.max_pages = max_pages_;
    keys_.apply(out, &p.keys);
    values_.apply(out, &p.values);
    Knobs::point(in, table_, &p.block_table);
    p.block_table_stride = max_pages_;
    return p;
  }

  Block inputs, outputs;  // run over a copy of `outputs`

 private:
  Random random_;
  Element element_;
  int64_t page_size_, max_pages_;
  NewTokensCase new_;
  int64_t pages_;
  Vectors keys_, values_;
  size_t table_;
};

// Its inputs hold addresses, for one address of its outputs: inputs_for.
class CompactTreeCase {
 public:
  explicit CompactTreeCase(uint64_t seed, Extent = {})
      : random_(seed + 0xc0de),
        element_(random_),
        batch_(1 + random_.below(9)),
        capacity_(1 + random_.below(40)),
        path_len_(random_.below(9)) {
    const int64_t layers = 1 + random_.below(3);
    for (int64_t layer = 0; layer < layers; ++layer) {
      for (auto* one : {&keys_, &values_}) {
        const int64_t dim = one == &keys_ ? element_.key_dim : element_.value_dim;
        one->emplace_back(batch_, element_.heads, capacity_, dim, element_.gap);
        one->back().put(random_, outputs, element_.size);
      }
    }
    std::vector<int64_t> lengths(static_cast<size_t>(batch_));
    std::vector<int64_t> path(static_cast<size_t>(batch_ * path_len_), -1);
    for (int64_t b = 0; b < batch_; ++b) {
      lengths[static_cast<size_t>(b)] = random_.below(capacity_ + 1) - random_.chance(0.03);
      int64_t node = random_.below(2);
      for (int64_t i = 0; i < path_len_ && !random_.chance(0.15); ++i) {
        path[static_cast<size_t>(b * path_len_ + i)] = node;
        node += 1 + random_.below(3);
        if (random_.chance(0.02)) node -= 3;
      }
    }
    lengths_ = inputs.put(lengths);
    path_ = inputs.put(path);
    key_bases_ = inputs.reserve<void*>(keys_.size());
    value_bases_ = inputs.reserve<void*>(values_.size());
    new_lengths_ = outputs.reserve<int64_t>(static_cast<size_t>(batch_));
    status_ = outputs.reserve<int32_t>(static_cast<size_t>(batch_));
  }

  std::vector<unsigned char> inputs_for(unsigned char* out) const {
    std::vector<unsigned char> bytes = inputs.bytes;
    for (size_t layer = 0; layer < keys_.size(); ++layer) {
      const unsigned char* bases[] = {out + keys_[layer].at, out + values_[layer].at};
      std::memcpy(bytes.data() + key_bases_ + layer * sizeof(void*), &bases[0], sizeof(void*));
      std::memcpy(bytes.data() + value_bases_ + layer * sizeof(void*), &bases[1], sizeof(void*));
    }
    return bytes;
  }

  polyspec::CompactTreeParams params(const unsigned char* in, unsigned char* out) const {
    polyspec::CompactTreeParams p;
    p.layers = static_cast<int64_t>(keys_.size());
    p.batch = batch_;
    p.heads = element_.heads;
    p.capacity = capacity_;
    p.key_dim = element_.key_dim;
    p.value_dim = element_.value_dim;
    p.element_size = element_.size;
    Knobs::point(in, key_bases_, &p.keys);
    Knobs::point(in, value_bases_, &p.values);
    std::copy(keys_[0].stride, keys_[0].stride + 3, p.key_stride);
    std::copy(values_[0].stride, values_[0].stride + 3, p.value_stride);
    p.alignment = 16;
    for (const auto* all : {&keys_, &values_}) {
      for (const Vectors& one : *all) {
        while (one.at % static_cast<size_t>(p.alignment) != 0) p.alignment /= 2;
      }
    }
    p.path_len = path_len_;
    Knobs::point(in, lengths_, &p.lengths);
    Knobs::point(in, path_, &p.path);
    Knobs::point(out, new_lengths_, &p.new_lengths);
    Knobs::point(out, status_, &p.status);
    return p;
  }

  Block inputs, outputs;  // run over a copy of `outputs`

 private:
  Random random_;
  Element element_;
  int64_t batch_, capacity_, path_len_;
  std::vector<Vectors> keys_, values_;
  size_t lengths_, path_, key_bases_, value_bases_, new_lengths_, status_;
};

class LengthsCase {
 public:
  explicit LengthsCase(uint64_t seed, Extent = {}) : random_(seed + 0x1e9) {
    batch_ = 1 + random_.below(random_.chance(0.9) ? 9 : 600);
    tokens_ = random_.below(6);
    const auto some = [&](Block* block) {
      std::vector<int64_t> values(static_cast<size_t>(batch_));
      for (int64_t& value : values) value = random_.below(9) - 2;
      return block->put(values);
    };
    lengths_ = some(&outputs);
    if (random_.chance(0.5)) base_ = some(&outputs);
    if (random_.chance(0.5)) most_ = some(&inputs);
    if (random_.chance(0.5)) counts_ = some(&inputs);
    if (random_.chance(0.5)) return;
    above_ = some(&inputs);
    first_ = some(&inputs);
    rest_ = outputs.reserve<int64_t>(static_cast<size_t>(3 * batch_));
  }
  polyspec::LengthsParams params(const unsigned char* in, unsigned char* out) const {
    polyspec::LengthsParams p;
    p.batch = batch_;
    p.tokens = tokens_;
    Knobs::point(out, lengths_, &p.lengths);
    Knobs::point(out, base_, &p.base);
    Knobs::point(in, most_, &p.most);
    Knobs::point(in, counts_, &p.counts);
    Knobs::point(in, above_, &p.above);
    Knobs::point(in, first_, &p.first);
    Knobs::point(out, rest_, &p.rest);
    return p;
  }

  Block inputs, outputs;  // run over a copy of `outputs`

 private:
  Random random_;
  int64_t batch_, tokens_;
  size_t lengths_, base_ = kNone, most_ = kNone, counts_ = kNone, above_ = kNone, first_ = kNone,
                   rest_ = kNone;
};

// Rows out of slots or a ring, or into a ring with its window.
class CopyRowsCase {
 public:
  explicit CopyRowsCase(uint64_t seed, Extent = {}) : random_(seed + 0x40b5) {
    const int64_t bytes[] = {1, 2, 6, 8, 24, 64, 256};
    const int64_t gaps[] = {0, 0, 16, 1};
    batch_ = 1 + random_.below(9);
    width_ = random_.below(9);
    slots_ = 1 + random_.below(12);
    put_ = random_.chance(0.5);
    ring_ = put_ || random_.chance(0.5);
    const int64_t size = random_.one_of(bytes), gap = random_.one_of(gaps);
    const auto rows = [&](Block* block, int64_t count) {
      Vectors made(batch_, 1, count, size, gap);
      made.put(random_, *block, 1);
      return made;
    };
    const auto some = [&](Block* block) {
      std::vector<int64_t> values(static_cast<size_t>(batch_));
      for (int64_t& value : values) value = random_.below(30) - 5;
      return block->put(values);
    };
    bytes_ = size;
    from_ = rows(&inputs, put_ ? width_ : slots_);
    to_ = rows(&outputs, put_ ? slots_ : width_);
    if (random_.chance(0.8)) at_ = some(&inputs);
    if (random_.chance(0.5)) less_ = some(&inputs);
    plus_ = random_.below(5) - 2;
    if (!put_) return;
    if (random_.chance(0.5)) lowest_ = some(&inputs);
    if (random_.chance(0.5)) begin_ = some(&outputs);
    if (random_.chance(0.5)) end_ = some(&outputs);
    kept_ = some(&inputs);
    const auto few = [&](int64_t most) {
      std::vector<int64_t> values(static_cast<size_t>(batch_));
      for (int64_t& value : values) value = random_.below(most);
      return inputs.put(values);
    };
    if (random_.chance(0.5)) part_ = few(2);
    if (random_.chance(0.5)) skip_ = few(6);
  }
  polyspec::CopyRowsParams params(const unsigned char* in, unsigned char* out) const {
    polyspec::CopyRowsParams p;
    p.batch = batch_;
    p.width = width_;
    p.slots = slots_;
    p.bytes = bytes_;
    p.plus = plus_;
    p.ring = ring_;
    p.put = put_;
    p.from = in + from_.at;
    p.to = out + to_.at;
    for (int axis = 0; axis < 2; ++axis) {
      p.from_stride[axis] = from_.stride[2 * axis];
      p.to_stride[axis] = to_.stride[2 * axis];
    }
    Knobs::point(in, at_, &p.at);
    Knobs::point(in, less_, &p.less);
    Knobs::point(in, part_, &p.part);
    Knobs::point(in, skip_, &p.skip);
    Knobs::point(in, lowest_, &p.lowest);
    Knobs::point(in, kept_, &p.kept);
    Knobs::point(out, begin_, &p.begin);
    Knobs::point(out, end_, &p.end);
    return p;
  }

  Block inputs, outputs;  // run over a copy of `outputs`

 private:
  Random random_;
  int64_t batch_, width_, slots_, bytes_ = 1, plus_ = 0;
  bool ring_, put_;
  Vectors from_{0, 0, 0, 0, 0}, to_{0, 0, 0, 0, 0};
  size_t at_ = kNone, less_ = kNone, part_ = kNone, skip_ = kNone, lowest_ = kNone, kept_ = kNone,
         begin_ = kNone, end_ = kNone;
};

// A pool in some state, for reserve_pages or truncate_pages. Rows are more than a CTA has threads
// in some cases.
template <bool kReserve>
class PagesCase {
 public:
  explicit PagesCase(uint64_t seed, Extent = {}) : random_(seed + 0xba6) {
    batch_ = 1 + random_.below(random_.chance(0.7) ? 20 : 600);
    page_size_ = 1 + random_.below(5);
    max_pages_ = 1 + random_.below(6);
    pages_ = 1 + random_.below(2 * batch_ * max_pages_);
    std::vector<int32_t> free(static_cast<size_t>(pages_));
    std::iota(free.begin(), free.end(), 0);
    std::vector<int32_t> table(static_cast<size_t>(batch_ * max_pages_), -1);
    std::vector<int64_t> held(static_cast<size_t>(batch_), 0), lengths(held);
    int64_t free_count = pages_;
    for (int64_t b = 0; b < batch_; ++b) {
      int64_t& of_row = held[static_cast<size_t>(b)];
      for (int64_t n = random_.below(max_pages_ + 1); n > 0 && free_count > 0; --n)
        table[static_cast<size_t>(b * max_pages_ + of_row++)] =
            free[static_cast<size_t>(--free_count)];
      lengths[static_cast<size_t>(b)] = random_.below(page_size_ * max_pages_ + 3) - 1;
    }
    if (random_.chance(0.1)) held[static_cast<size_t>(random_.below(batch_))] = max_pages_ + 1;
    if (random_.chance(0.1))
      table[static_cast<size_t>(random_.below(batch_ * max_pages_))] = INT32_MAX;
    if (random_.chance(0.05)) free_count = pages_ + 1;
    lengths_ = inputs.put(lengths);
    table_ = outputs.put(table);
    held_ = outputs.put(held);
    free_ = outputs.put(free);
    free_count_ = outputs.put(std::vector<int64_t>{free_count});
    status_ = outputs.reserve<int32_t>(static_cast<size_t>(batch_));
  }

  // A separate type: two operators have these parameters.
  struct Params : polyspec::PagesParams {};
  Params params(const unsigned char* in, unsigned char* out) const {
    Params p;
    p.batch = batch_;
    p.pages = pages_;
    p.page_size = page_size_;
    p.max_pages = max_pages_;
    Knobs::point(in, lengths_, &p.lengths);
    Knobs::point(out, table_, &p.block_table);
    p.block_table_stride = max_pages_;
    Knobs::point(out, held_, &p.held);
    Knobs::point(out, free_, &p.free_pages);
    Knobs::point(out, free_count_, &p.free_count);
    Knobs::point(out, status_, &p.status);
    return p;
  }

  Block inputs, outputs;  // run over a copy of `outputs`

 private:
  Random random_;
  int64_t batch_, page_size_, max_pages_, pages_;
  size_t lengths_, table_, held_, free_, free_count_, status_;
};

// The inputs of a call with its outputs at `out`.
template <class Case>
std::vector<unsigned char> inputs_for(const Case& call, unsigned char*) {
  return call.inputs.bytes;
}
inline std::vector<unsigned char> inputs_for(const CompactTreeCase& call, unsigned char* out) {
  return call.inputs_for(out);
}

}  // namespace cases
