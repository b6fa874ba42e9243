// Random 4-bit products on CUDA, and their plain sums.
#pragma once

#include <algorithm>

#include "core/layer_math.hpp"
#include "core/row.hpp"
#include "polyspec/int4.hpp"
#include "support/random_layer.hpp"

namespace cases {

// A matrix, activations, and of the outputs the packed matrix, y, and y of some row alone.
class Int4Case {
 public:
  explicit Int4Case(uint64_t seed)
      : random_(seed + 0x1e4), dtype_(random_.chance(0.5) ? DType::kBFloat16 : DType::kFloat16) {
    const int64_t outputs[] = {1, 7, 16, 31, 33, 64, 65, 100, 128, 192, 192};
    const int64_t tokens[] = {1, 2, 5, 8, 9, 16, 17, 24, 32, 33, 40, 64, 65, 100};
    const int32_t groups[] = {32, 64, 128, 128, 256};
    shape_.group = random_.one_of(groups);
    shape_.outputs = random_.one_of(outputs);
    shape_.inputs = shape_.group * (1 + random_.below(random_.chance(0.3) ? 40 : 9));
    // Two launches of streamed weights from 33 on.
    tokens_ = random_.chance(0.3) ? 33 + random_.below(32) : random_.one_of(tokens);
    if (random_.chance(0.05)) {  // CTAs of 64 outputs
      shape_.outputs = 8192 + random_.below(70);
      shape_.inputs = 2 * shape_.group;
    }
    // Whole tiles are multiplied.
    const auto too_large = [&] {
      return (shape_.outputs + 31) / 32 * 32 * shape_.inputs * ((tokens_ + 7) / 8 * 8) > 3000000;
    };
    while (shape_.inputs > 9 * shape_.group && too_large()) shape_.inputs -= shape_.group;
    while (tokens_ > 1 && too_large()) tokens_ /= 2;
    while (shape_.inputs > 2 * shape_.group && too_large()) shape_.inputs -= shape_.group;
    x_stride_ = shape_.inputs + 8 * random_.below(3);
    y_stride_ = shape_.outputs + random_.below(3);
    row_ = random_.below(tokens_);

    values_.resize(static_cast<size_t>(shape_.outputs * shape_.inputs));
    for (uint8_t& value : values_) value = static_cast<uint8_t>(random_.below(16));
    const auto count = static_cast<size_t>(shape_.outputs * groups_of());
    for (size_t i = 0; i < count; ++i) {
      scales_.push_back(0.02f * random_.normal());
      zeros_.push_back(0.05f * random_.normal());
    }
    std::vector<float> x(static_cast<size_t>((tokens_ - 1) * x_stride_ + shape_.inputs));
    for (float& value : x) value = random_.normal() * (random_.chance(0.01) ? 60.0f : 1.0f);
    for (const float value : x)
      x_.push_back(dtype_ == DType::kBFloat16 ? bfloat16_bits(value) : float16_bits(value));
    values_at_ = inputs.put(values_);
    scales_at_ = inputs.put(scales_);
    zeros_at_ = inputs.put(zeros_);
    x_at_ = inputs.put(x_);
    const int64_t bytes = polyspec::int4_packed_bytes(shape_, polyspec::Stream::Device::kCuda);
    packed_at_ = outputs_of(bytes);
    y_at_ = outputs_of(2 * ((tokens_ - 1) * y_stride_ + shape_.outputs));
    alone_at_ = outputs_of(2 * shape_.outputs);
    gated_at_ = outputs_of(tokens_ * shape_.outputs);
    if (dtype_ != DType::kBFloat16) return;
    const auto put = [&](int64_t count) {
      std::vector<uint16_t> more(static_cast<size_t>(count));
      for (uint16_t& value : more) value = bfloat16_bits(random_.normal());
      return inputs.put(more);
    };
    weight_at_ = put(shape_.inputs);
    rows_at_ = put(tokens_ * shape_.inputs);
    residual_at_ = put(tokens_ * shape_.outputs);
    for (size_t* at : {&normed_at_, &normed_apart_at_})
      *at = outputs_of(2 * tokens_ * shape_.inputs);
    for (size_t* at : {&whole_at_, &whole_apart_at_})
      *at = outputs_of(2 * tokens_ * shape_.outputs);
  }

  const unsigned char* packed(const unsigned char* out) const { return out + packed_at_; }
  const unsigned char* weight(const unsigned char* in) const { return in + weight_at_; }

  polyspec::Result pack(const unsigned char* in, unsigned char* out,
                        polyspec::Stream stream) const {
    polyspec::Int4PackParams pack;
    pack.shape = shape_;
    pack.values = in + values_at_;
    pack.scales = reinterpret_cast<const float*>(in + scales_at_);
    pack.zeros = reinterpret_cast<const float*>(in + zeros_at_);
    pack.packed = out + packed_at_;
    return polyspec::int4_pack(pack, stream);
  }
  // All tokens, one alone, and the gated product of all.
  polyspec::Result multiply(const unsigned char* in, unsigned char* out,
                            polyspec::Stream stream) const {
    polyspec::Int4ProductParams p;
    p.shape = shape_;
    p.tokens = tokens_;
    p.dtype = dtype_;
    p.x = in + x_at_;
    p.x_stride = x_stride_;
    p.packed = out + packed_at_;
    if (gated()) {
      p.y = out + gated_at_;
      p.y_stride = shape_.outputs / 2;
      const polyspec::Result result = polyspec::int4_gated_product(p, stream);
      if (!result.ok()) return result;
    }
    p.y = out + y_at_;
    p.y_stride = y_stride_;
    const polyspec::Result result = polyspec::int4_product(p, stream);
    p.tokens = 1;
    p.x = in + x_at_ + 2 * row_ * x_stride_;
    p.x_stride = 1;  // one row has no use for it
    p.y = out + alone_at_;
    const polyspec::Result alone = result.ok() ? polyspec::int4_product(p, stream) : result;
    return alone.ok() && dtype_ == DType::kBFloat16 ? whole(in, out, stream) : alone;
  }
  // A norm, a product and a sum after it, or a gated one, in a call; and the product apart.
  polyspec::Result whole(const unsigned char* in, unsigned char* out,
                         polyspec::Stream stream) const {
    polyspec::RmsNormParams norm;
    norm.tokens = tokens_;
    norm.width = shape_.inputs;
    norm.dtype = dtype_;
    norm.epsilon = 1e-5f;
    norm.x = in + rows_at_;
    norm.weight = weight(in);
    norm.y = out + normed_apart_at_;
    polyspec::Int4ProductParams p;
    p.shape = shape_;
    p.tokens = tokens_;
    p.dtype = dtype_;
    p.x = norm.x;
    p.x_stride = shape_.inputs;
    p.packed = out + packed_at_;
    p.y = out + whole_at_;
    p.y_stride = gates() ? shape_.outputs / 2 : shape_.outputs;
    p.norm = norm.weight;
    p.epsilon = norm.epsilon;
    p.normed = out + normed_at_;
    if (!gates()) p.residual = in + residual_at_;
    const auto product = gates() ? &polyspec::int4_gated_product : &polyspec::int4_product;
    polyspec::Result result = product(p, stream);
    if (result.ok()) result = polyspec::rms_norm(norm, stream);
    p.x = norm.y;
    p.norm = p.residual = nullptr;
    p.y = out + whole_apart_at_;
    return result.ok() ? product(p, stream) : result;
  }

  // The first error in the outputs; "" if none. `bits`: sums equal `sum_of`.
  std::string fault(const std::vector<unsigned char>& out, bool bits) const {
    const auto half = [&](size_t at, int64_t i) {
      uint16_t read;
      std::memcpy(&read, out.data() + at + 2 * i, 2);
      return read;
    };
    for (int64_t n = 0; n < shape_.outputs; ++n) {
      if (half(alone_at_, n) != half(y_at_, row_ * y_stride_ + n)) return named("alone", row_, n);
      for (int64_t m = 0; m < tokens_; ++m) {
        const uint16_t y = half(y_at_, m * y_stride_ + n);
        double exact, bound;
        exact_of(m, n, &exact, &bound);
        if (!(std::fabs(value_of(y) - exact) <= bound)) return named("beyond the bound", m, n);
        if (bits && y != bits_of(sum_of(m, n))) return named("of other bits", m, n);
      }
    }
    for (int64_t i = 0; gated() && i < tokens_ * shape_.outputs / 2; ++i) {
      const int64_t m = i / (shape_.outputs / 2), n = i % (shape_.outputs / 2);
      const float up = value_of(half(y_at_, m * y_stride_ + n + shape_.outputs / 2));
      if (half(gated_at_, i) != gated_of(value_of(half(y_at_, m * y_stride_ + n)), up))
        return named("gated otherwise", m, n);
    }
    const int64_t all = dtype_ == DType::kBFloat16 ? tokens_ * shape_.outputs : 0;
    for (int64_t i = 0; i < all / (gates() ? 2 : 1); ++i) {
      uint16_t wanted = half(whole_apart_at_, i);
      uint16_t residual;
      std::memcpy(&residual, inputs_of(residual_at_) + 2 * i, 2);
      if (!gates()) wanted = bits_of(value_of(wanted) + value_of(residual));
      if (half(whole_at_, i) != wanted) return named("normed or added otherwise", 0, i);
    }
    for (int64_t m = 0; m + 1 < tokens_; ++m) {  // the gaps between rows
      for (int64_t n = shape_.outputs; n < y_stride_; ++n) {
        if (half(y_at_, m * y_stride_ + n) != 0x0101u * Block::kPoison)
          return named("behind", m, n);
      }
    }
    return "";
  }

  Block inputs, outputs;

 private:
  size_t outputs_of(int64_t bytes) {
    return outputs.reserve<unsigned char>(static_cast<size_t>(bytes));
  }
  bool gates() const { return gated() && row_ % 2 == 0; }
  const unsigned char* inputs_of(size_t at) const { return inputs.bytes.data() + at; }
  bool gated() const { return dtype_ == DType::kBFloat16 && shape_.outputs % 64 == 0; }
  int64_t groups_of() const { return shape_.inputs / shape_.group; }
  std::string named(const char* what, int64_t m, int64_t n) const {
    return "[" + std::to_string(shape_.outputs) + ", " + std::to_string(shape_.inputs) +
           "], group " + std::to_string(shape_.group) + ", " + std::to_string(tokens_) +
           " tokens: row " + std::to_string(m) + ", output " + std::to_string(n) + " is " + what;
  }
  float value_of(uint16_t bits) const {
    return dtype_ == DType::kBFloat16 ? polyspec::core::to_float(polyspec::core::BFloat16{bits})
                                      : polyspec::core::to_float(polyspec::core::Float16{bits});
  }
  uint16_t bits_of(float value) const {
    return dtype_ == DType::kBFloat16 ? bfloat16_bits(value) : float16_bits(value);
  }
  uint16_t gated_of(float gate, float up) const {
    return bits_of(polyspec::core::gated_value<polyspec::core::BFloat16>(gate, up));
  }
  float rounded(const std::vector<float>& values, int64_t n, int64_t group) const {
    const float value = values[static_cast<size_t>(n * groups_of() + group)];
    return polyspec::core::to_float(polyspec::core::BFloat16{bfloat16_bits(value)});
  }
  float x_of(int64_t m, int64_t k) const {
    return value_of(x_[static_cast<size_t>(m * x_stride_ + k)]);
  }
  int value_at(int64_t n, int64_t k) const {
    return values_[static_cast<size_t>(n * shape_.inputs + k)];
  }

  void exact_of(int64_t m, int64_t n, double* exact, double* bound) const {
    double sizes = 0.0;
    *exact = 0.0;
    for (int64_t k = 0; k < shape_.inputs; ++k) {
      const double x = x_of(m, k), scale = rounded(scales_, n, k / shape_.group);
      const double zero = rounded(zeros_, n, k / shape_.group);
      *exact += x * ((value_at(n, k) - 8) * scale + zero);
      sizes += std::fabs(x) * (56.0 * std::fabs(scale) + std::fabs(zero));
    }
    const double steps = static_cast<double>(shape_.group + 2 * groups_of() + 12);
    const double rounding = dtype_ == DType::kBFloat16 ? 0x1p-8 : 0x1p-10;
    *bound = steps * 0x1p-22 * sizes * (1.0 + rounding) + rounding * std::fabs(*exact) + 0x1p-24;
  }

  // In the kernel's order, with the simulated device's sums of a product of matrices.
  float sum_of(int64_t m, int64_t n) const {
    constexpr int64_t kWarps = 8;
    float warps[kWarps] = {};
    for (int64_t warp = 0; warp < kWarps; ++warp) {
      float& y = warps[warp];
      for (int64_t group = groups_of() * warp / kWarps; group < groups_of() * (warp + 1) / kWarps;
           ++group) {
        float sum = 0.0f, of_x = 0.0f;
        for (int64_t step = 0; step < shape_.group / 16; ++step) {
          for (int64_t i = 0; i < 16; ++i) {
            const int64_t in_chunk = i % 8 / 2 * 8 + step % 2 * 4 + i / 8 * 2 + i % 2;
            const int64_t k = group * shape_.group + step / 2 * 32 + in_chunk;
            const float x = x_of(m, k);
            sum = __builtin_fmaf(1.0f + static_cast<float>(value_at(n, k)) / 16.0f, x, sum);
            of_x += x;
          }
        }
        const float scale = rounded(scales_, n, group), zero = rounded(zeros_, n, group);
        y = __builtin_fmaf(__builtin_fmaf(-24.0f, scale, zero), of_x, y);
        y = __builtin_fmaf(16.0f * scale, sum, y);
      }
    }
    float sum = warps[0] + warps[4];
    for (int s = 1; s < 4; ++s) sum += warps[s] + warps[s + 4];
    return sum;
  }

  Random random_;
  DType dtype_;
  polyspec::Int4Shape shape_;
  int64_t tokens_, x_stride_, y_stride_, row_;
  std::vector<uint8_t> values_;
  std::vector<float> scales_, zeros_;
  std::vector<uint16_t> x_;
  size_t values_at_, scales_at_, zeros_at_, x_at_, packed_at_, y_at_, alone_at_, gated_at_;
  size_t weight_at_ = 0, rows_at_ = 0, residual_at_ = 0, normed_at_ = 0, normed_apart_at_ = 0,
         whole_at_ = 0, whole_apart_at_ = 0;
};

// A product with rows that are split into heads, and its operators one by one. `memory`: the packed
// matrix, and rows that a call keeps there.
class Int4HeadsCase : public RotaryAppendCase {
 public:
  explicit Int4HeadsCase(uint64_t seed) : RotaryAppendCase(seed + 0x4ead, {}, true) {
    const int32_t groups[] = {32, 128, 128, 256};
    shape_.outputs = (heads_ + 2 * groups_) * width_;
    shape_.group = random_.one_of(groups);
    shape_.inputs = shape_.group * (1 + random_.below(256 / shape_.group));
    const int64_t count = shape_.outputs * shape_.inputs / shape_.group;
    std::vector<uint8_t> values(static_cast<size_t>(shape_.outputs * shape_.inputs));
    for (uint8_t& value : values) value = static_cast<uint8_t>(random_.below(16));
    std::vector<float> scales(static_cast<size_t>(count)), zeros(scales);
    for (float& scale : scales) scale = 0.02f * random_.normal();
    for (float& zero : zeros) zero = 0.05f * random_.normal();
    values_at_ = inputs.put(values);
    scales_at_ = inputs.put(scales);
    zeros_at_ = inputs.put(zeros);
    rows_at_ = put(tokens() * shape_.inputs);
    weight_at_ = put(shape_.inputs);
    norms_ = random_.chance(0.5);
    const auto reserve = [&](int64_t bytes) {
      return memory.reserve<unsigned char>(static_cast<size_t>(bytes));
    };
    packed_at_ = reserve(polyspec::int4_packed_bytes(shape_, polyspec::Stream::Device::kCuda));
    y_at_ = reserve(2 * tokens() * shape_.outputs);
    normed_at_ = reserve(2 * tokens() * shape_.inputs);
  }

  const unsigned char* packed(const unsigned char* memory) const { return memory + packed_at_; }
  const unsigned char* weight(const unsigned char* in) const { return in + weight_at_; }

  polyspec::Result pack(const unsigned char* in, unsigned char* memory,
                        polyspec::Stream stream) const {
    return polyspec::int4_pack(
        {shape_, in + values_at_, reinterpret_cast<const float*>(in + scales_at_),
         reinterpret_cast<const float*>(in + zeros_at_), memory + packed_at_},
        stream);
  }
  polyspec::Result multiply(const unsigned char* in, unsigned char* memory, unsigned char* out,
                            bool apart, polyspec::Stream stream) const {
    polyspec::Int4RotaryParams both;
    polyspec::Int4ProductParams& p = both.product;
    p.shape = shape_;
    p.tokens = tokens();
    p.dtype = dtype_;
    p.x = in + rows_at_;
    p.x_stride = shape_.inputs;
    p.packed = memory + packed_at_;
    p.y = memory + y_at_;
    p.y_stride = shape_.outputs;
    if (norms_) {
      p.norm = weight(in);
      p.epsilon = 1e-5f;
      p.normed = memory + normed_at_;
    }
    both.append = params(in, out);
    if (!apart) return polyspec::int4_rotary_product(both, stream);
    both.append.turn.x = p.y;
    const polyspec::Result result = polyspec::int4_product(p, stream);
    return result.ok() ? polyspec::rotary_append(both.append, stream) : result;
  }

  Block memory;

 private:
  int64_t tokens() const { return batch_ * tokens_; }

  polyspec::Int4Shape shape_;
  bool norms_;
  size_t values_at_, scales_at_, zeros_at_, rows_at_, weight_at_, packed_at_, y_at_, normed_at_;
};

}  // namespace cases
