// Random calls of the operators of polyspec/layer.hpp and polyspec/attention.hpp, as
// random_case.hpp for polyspec::sample.
#pragma once

#include "polyspec/attention.hpp"
#include "polyspec/layer.hpp"
#include "support/random_cache.hpp"

namespace cases {

// The base of the cases of layers: a type, and values of it.
class LayerCase {
 public:
  explicit LayerCase(uint64_t seed)
      : random_(seed), dtype_(random_.chance(0.5) ? DType::kFloat32 : DType::kBFloat16) {}

  Block inputs, outputs;

 protected:
  size_t size() const { return dtype_ == DType::kFloat32 ? 4 : 2; }
  size_t put(int64_t count, float scale = 1.0f) { return put_in(inputs, count, scale); }
  size_t put_in(Block& block, int64_t count, float scale = 1.0f) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = scale * random_.normal();
    return put_logits(block, dtype_, values);
  }
  size_t reserve(int64_t count) {
    return outputs.reserve<unsigned char>(static_cast<size_t>(count) * size());
  }
  // Numbers that are not finite, and large numbers.
  float odd(float value) {
    const float values[] = {kInf, -kInf, kNan, 3e38f, 1e-39f, -0.0f};
    return random_.chance(0.002) ? random_.one_of(values) : value;
  }
  // The least negative numbers: sums of them, weighted, may be -0.
  size_t put_least(int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = random_.chance(0.5) ? -1e-45f : -0.0f;
    return put_logits(inputs, dtype_, values);
  }
  size_t put_odd(int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    const bool some = random_.chance(0.3);
    for (float& value : values) value = some ? odd(random_.normal()) : 4.0f * random_.normal();
    return put_logits(inputs, dtype_, values);
  }

  Random random_;
  DType dtype_;
};

class RmsNormCase : public LayerCase {
 public:
  explicit RmsNormCase(uint64_t seed, Extent = {})
      : LayerCase(seed + 0x40), tokens_(1 + random_.below(5)) {
    const int64_t widths[] = {1, 7, 16, 50, 513, 896, 2049, 4096, 4097, 9000};
    width_ = random_.one_of(widths);
    x_ = put_odd(tokens_ * width_);
    weight_ = put(width_);
    if (random_.chance(0.5)) {
      residual_ = put(tokens_ * width_);
      sum_ = reserve(tokens_ * width_);
    }
    y_ = reserve(tokens_ * width_);
  }
  polyspec::RmsNormParams params(const unsigned char* in, unsigned char* out) const {
    polyspec::RmsNormParams p;
    p.tokens = tokens_;
    p.width = width_;
    p.dtype = dtype_;
    p.epsilon = 1e-5f;
    p.x = in + x_;
    p.weight = in + weight_;
    if (residual_ != kNone) {
      p.residual = in + residual_;
      p.sum = out + sum_;
    }
    p.y = out + y_;
    return p;
  }

 private:
  int64_t tokens_, width_;
  size_t x_, weight_, y_, residual_ = kNone, sum_ = kNone;
};

class GatedCase : public LayerCase {
 public:
  explicit GatedCase(uint64_t seed, Extent = {})
      : LayerCase(seed + 0x6a), tokens_(random_.below(5)), width_(random_.below(700)) {
    x_ = put_odd(tokens_ * 2 * width_);
    y_ = reserve(tokens_ * width_);
  }
  polyspec::GatedParams params(const unsigned char* in, unsigned char* out) const {
    return {tokens_, width_, dtype_, in + x_, out + y_};
  }

 private:
  int64_t tokens_, width_;
  size_t x_, y_;
};

class RotaryCase : public LayerCase {
 public:
  // `multiplied`: x is to be a 4-bit product.
  explicit RotaryCase(uint64_t seed, Extent = {}, bool appends = false, bool multiplied = false)
      : LayerCase(seed + 0x20),
        batch_(1 + random_.below(4)),
        tokens_(1 + random_.below(6)),
        heads_(1 + random_.below(6)),
        groups_(1 + random_.below(3)),
        angles_(1 + random_.below(20)) {
    const int64_t widths[] = {2, 6, 32, 64, 128, 130, 512};
    width_ = random_.one_of(widths);
    if (multiplied) {
      const int64_t heads[] = {64, 64, 128, 128, 256, 96};
      width_ = random_.one_of(heads);
      dtype_ = DType::kBFloat16;
      heads_ = 1 + random_.below(3);
      groups_ = width_ == 64 ? 1 + random_.below(2) : 1;
      tokens_ = 1 + random_.below(random_.chance(0.3) ? 20 : 6);
      if (random_.chance(0.4)) batch_ = 1;
    }
    const int64_t features = (heads_ + 2 * groups_) * width_;
    x_ = put_odd(batch_ * tokens_ * features);
    cosine_ = put(angles_ * width_);
    sine_ = put(angles_ * width_);
    // Of all tokens, of a row's tokens, of a row, or the first of a row; some are outside.
    const int64_t strides[][2] = {{tokens_, 1}, {0, 1}, {1, 0}, {1, 0}};
    const int64_t kind = random_.below(4);
    std::copy(strides[kind], strides[kind] + 2, position_stride_);
    position_step_ = kind == 3;
    std::vector<int64_t> positions(static_cast<size_t>(batch_ * tokens_));
    for (int64_t& position : positions) position = random_.below(angles_ + 4) - 2;
    if (random_.chance(0.1)) positions[0] = random_.chance(0.5) ? INT64_MAX : INT64_MIN;
    positions_ = inputs.put(positions);
    if (random_.chance(0.5)) bias_ = put(features);
    if (random_.chance(multiplied ? 0.1 : 0.4)) {
      query_norm_ = put(width_);
      key_norm_ = put(width_);
    }
    query_ = reserve(batch_ * heads_ * tokens_ * width_);
    if (appends) return;
    key_ = reserve(batch_ * groups_ * tokens_ * width_);
    value_ = reserve(batch_ * groups_ * tokens_ * width_);
  }
  polyspec::RotaryParams params(const unsigned char* in, unsigned char* out) const {
    polyspec::RotaryParams p;
    p.batch = batch_;
    p.tokens = tokens_;
    p.heads = heads_;
    p.groups = groups_;
    p.width = width_;
    p.dtype = dtype_;
    p.x = in + x_;
    p.epsilon = 1e-6f;
    p.angles = angles_;
    p.cosine = in + cosine_;
    p.sine = in + sine_;
    Knobs::point(in, positions_, &p.positions);
    std::copy(position_stride_, position_stride_ + 2, p.position_stride);
    p.position_step = position_step_;
    if (bias_ != kNone) p.bias = in + bias_;
    if (query_norm_ != kNone) {
      p.query_norm = in + query_norm_;
      p.key_norm = in + key_norm_;
    }
    p.query = out + query_;
    if (key_ != kNone) {
      p.key = out + key_;
      p.value = out + value_;
    }
    return p;
  }

 protected:
  int64_t batch_, tokens_, heads_, groups_, angles_, width_;
  int64_t position_stride_[2], position_step_;
  size_t x_, cosine_, sine_, positions_, query_;
  size_t bias_ = kNone, query_norm_ = kNone, key_norm_ = kNone, key_ = kNone, value_ = kNone;
};

// Some rows do not fit, and some have lengths and counts that are none.
class RotaryAppendCase : public RotaryCase {
 public:
  explicit RotaryAppendCase(uint64_t seed, Extent = {}, bool multiplied = false)
      : RotaryCase(seed, {}, true, multiplied),
        capacity_(1 + random_.below(12)),
        keys_(batch_, groups_, capacity_, width_, random_.chance(0.5) ? 0 : 3),
        values_(batch_, groups_, capacity_, width_, 0) {
    keys_.put(random_, outputs, static_cast<int32_t>(size()));
    values_.put(random_, outputs, static_cast<int32_t>(size()));
    std::vector<int64_t> lengths(static_cast<size_t>(batch_)), counts(lengths);
    for (int64_t& length : lengths) length = random_.below(capacity_ + 3) - random_.chance(0.1);
    for (int64_t& count : counts) count = random_.below(tokens_ + 2) - random_.chance(0.05);
    lengths_ = inputs.put(lengths);
    if (random_.chance(0.5)) counts_ = inputs.put(counts);
    status_ = outputs.reserve<int32_t>(static_cast<size_t>(batch_));
  }
  polyspec::RotaryAppendParams params(const unsigned char* in, unsigned char* out) const {
    polyspec::RotaryAppendParams p;
    p.turn = RotaryCase::params(in, out);
    p.capacity = capacity_;
    keys_.apply(out, &p.keys);
    values_.apply(out, &p.values);
    Knobs::point(in, lengths_, &p.lengths);
    Knobs::point(in, counts_, &p.counts);
    Knobs::point(out, status_, &p.status);
    return p;
  }

 private:
  int64_t capacity_;
  Vectors keys_, values_;
  size_t lengths_, counts_ = kNone, status_;
};

// A call, and a second one of a head alone. Rows of keys and of values begin at multiples of 16
// bytes.
class AttentionCase : public LayerCase {
 public:
  struct Params {
    polyspec::AttentionParams all, alone;

    void use(void* workspace, int64_t bytes) {
      CHECK(polyspec::attention_workspace_bytes(all) <= bytes);
      all.workspace = alone.workspace = workspace;
    }
    polyspec::Result run(const polyspec::Stream& stream) const {
      const polyspec::Result result = polyspec::attention(all, stream);
      return result.ok() ? polyspec::attention(alone, stream) : result;
    }
  };

  explicit AttentionCase(uint64_t seed, Extent = {})
      : LayerCase(seed + 0xa7), batch_(1 + random_.below(3)), groups_(1 + random_.below(2)) {
    const int64_t widths[] = {32, 64, 96, 128, 224, 256}, shares[] = {1, 1, 2, 3, 7};
    const int64_t some[] = {1, 1, 2, 4, 9, 20},
                  lengths[] = {1, 7, 41, 128, 129, 499, 513, 1100, 4613};
    width_ = random_.one_of(widths);
    value_width_ = random_.chance(0.7) ? width_ : random_.one_of(widths);
    heads_ = groups_ * random_.one_of(shares);
    tokens_ = random_.one_of(some);
    length_ = random_.one_of(lengths);
    while (batch_ > 1 && batch_ * heads_ * tokens_ * length_ > 40000) --batch_;
    while (tokens_ > 1 && heads_ * tokens_ * length_ > 90000) --tokens_;
    causal_ = length_ >= tokens_ && random_.chance(0.3);
    query_ = put(batch_ * heads_ * tokens_ * width_, 2.0f);
    key_ = put(batch_ * groups_ * length_ * width_, 0.3f);
    value_ = random_.chance(0.1) ? put_least(batch_ * groups_ * length_ * value_width_)
                                 : put(batch_ * groups_ * length_ * value_width_);
    if (random_.chance(0.4)) {
      const float lowest = dtype_ == DType::kFloat32 ? -3.4028235e38f : -3.3895314e38f;
      std::vector<float> mask(static_cast<size_t>(batch_ * tokens_ * length_));
      const float hidden = random_.chance(0.5) ? -kInf : lowest;
      const double share = random_.unit();
      for (float& value : mask) value = random_.chance(share) ? hidden : 0.0f;
      // The first keys, from all tokens or all but the last.
      const int64_t first = random_.chance(0.4) ? random_.below(length_ + 1) : 0;
      const int64_t rows = batch_ * tokens_ - (random_.chance(0.3) ? 1 : 0);
      for (int64_t row = 0; row < rows; ++row)
        std::fill_n(mask.begin() + row * length_, first, hidden);
      mask_ = put_logits(inputs, dtype_, mask);
    }
    if (!causal_ && random_.chance(0.6)) {
      std::vector<int64_t> before(static_cast<size_t>(batch_));
      for (int64_t& one : before) one = random_.below(length_ + 3) - (random_.chance(0.1) ? 2 : 0);
      lengths_ = inputs.put(before);
    }
    out_ = reserve(batch_ * tokens_ * heads_ * value_width_);
    head_ = random_.below(heads_);
    alone_ = reserve(batch_ * tokens_ * value_width_);
  }
  Params params(const unsigned char* in, unsigned char* out) const {
    polyspec::AttentionParams p;
    p.batch = batch_;
    p.heads = heads_;
    p.groups = groups_;
    p.tokens = tokens_;
    p.length = length_;
    p.width = width_;
    p.value_width = value_width_;
    p.dtype = dtype_;
    p.causal = causal_;
    p.scale = 0.25f;
    p.query = in + query_;
    p.key = in + key_;
    p.value = in + value_;
    Knobs::point(in, lengths_, &p.lengths);
    if (mask_ != kNone) p.mask = in + mask_;
    const auto set = [](int64_t (&stride)[3], int64_t n1, int64_t n2, int64_t dim) {
      stride[2] = dim;
      stride[1] = n2 * dim;
      stride[0] = n1 * n2 * dim;
    };
    set(p.query_stride, heads_, tokens_, width_);
    set(p.key_stride, groups_, length_, width_);
    set(p.value_stride, groups_, length_, value_width_);
    p.mask_stride[0] = tokens_ * length_;
    p.mask_stride[1] = length_;
    p.out = out + out_;
    Params both{p, p};
    const int64_t group = head_ / (heads_ / groups_);
    both.alone.heads = both.alone.groups = 1;
    both.alone.query = in + query_ + static_cast<size_t>(head_ * p.query_stride[1]) * size();
    both.alone.key = in + key_ + static_cast<size_t>(group * p.key_stride[1]) * size();
    both.alone.value = in + value_ + static_cast<size_t>(group * p.value_stride[1]) * size();
    both.alone.out = out + alone_;
    return both;
  }
  // In bfloat16 a CUDA device adds in another order: takes numbers within rounding from
  // `expected`. Weights and sums are float32 there too, of values that are below 6. The head alone
  // has to have the bits that it has beside the others.
  void allow_rounding(const std::vector<unsigned char>& expected,
                      std::vector<unsigned char>* made) const {
    if (dtype_ != DType::kBFloat16) return;
    for (int64_t i = 0; i < batch_ * tokens_ * heads_ * value_width_; ++i) {
      const size_t at = out_ + 2 * static_cast<size_t>(i);
      const int64_t row = i / value_width_ / heads_, head = i / value_width_ % heads_;
      const size_t alone = alone_ + 2 * static_cast<size_t>(row * value_width_ + i % value_width_);
      const float wanted = bfloat16_at(expected, at), got = bfloat16_at(*made, at);
      const bool same =
          head != head_ || std::memcmp(made->data() + at, made->data() + alone, 2) == 0;
      if (!same || !(std::fabs(got - wanted) <= 0x1p-7f * std::fabs(wanted) + 1e-4f ||
                     (std::isnan(got) && std::isnan(wanted))))
        return;  // for the bits to be compared
      for (const size_t of : {at, alone}) {
        if (of == at || head == head_) std::memcpy(made->data() + of, expected.data() + of, 2);
      }
    }
  }

 private:
  static float bfloat16_at(const std::vector<unsigned char>& bytes, size_t at) {
    polyspec::core::BFloat16 value;
    std::memcpy(&value, bytes.data() + at, sizeof(value));
    return polyspec::core::to_float(value);
  }
  int64_t batch_, groups_, heads_, tokens_, length_, width_, value_width_;
  int64_t head_;  // alone
  bool causal_;
  size_t query_, key_, value_, out_, alone_, mask_ = kNone, lengths_ = kNone;
};

// Replaces outputs within the rounding of a device by `expected`.
template <class Case>
void allow_rounding(const Case&, const std::vector<unsigned char>&, std::vector<unsigned char>*) {}
inline void allow_rounding(const AttentionCase& call, const std::vector<unsigned char>& expected,
                           std::vector<unsigned char>* made) {
  call.allow_rounding(expected, made);
}

}  // namespace cases
