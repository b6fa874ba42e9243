// Random products of bfloat16 weights on CUDA, and their plain sums.
#pragma once

#include "core/row.hpp"
#include "polyspec/dense.hpp"
#include "support/random_case.hpp"

namespace cases {

// Weights, activations, a bias or none, and of the outputs y, and y of some row alone.
class DenseCase {
 public:
  explicit DenseCase(uint64_t seed) : random_(seed + 0xde) {
    const int64_t sizes[] = {1, 7, 15, 16, 17, 33, 64, 100, 130, 257};
    outputs_ = random_.one_of(sizes);
    tokens_ = 1 + random_.below(polyspec::kDenseTokens);
    // Some slices have no inputs, some two whole stages, some an end of a stage.
    inputs_ = 32 * (1 + random_.below(random_.chance(0.5) ? 120 : 12));
    while (outputs_ * inputs_ > 120000) inputs_ = (inputs_ / 64 + 1) * 32;
    x_stride_ = inputs_ + 8 * random_.below(3);
    y_stride_ = outputs_ + random_.below(3);
    row_ = random_.below(tokens_);
    weights_ = values(outputs_ * inputs_, 0.05f);
    x_ = values((tokens_ - 1) * x_stride_ + inputs_, 1.0f);
    bias_ = values(outputs_, 1.0f);
    weights_at_ = inputs.put(weights_);
    x_at_ = inputs.put(x_);
    bias_at_ = inputs.put(bias_);
    biased_ = random_.chance(0.5);
    y_at_ = outputs.reserve<uint16_t>(static_cast<size_t>((tokens_ - 1) * y_stride_ + outputs_));
    alone_at_ = outputs.reserve<uint16_t>(static_cast<size_t>(outputs_));
  }

  const unsigned char* weights(const unsigned char* in) const { return in + weights_at_; }

  // All tokens, and one alone.
  polyspec::Result multiply(const unsigned char* in, unsigned char* out,
                            polyspec::Stream stream) const {
    polyspec::DenseProductParams p;
    p.shape = {outputs_, inputs_, DType::kBFloat16};
    p.tokens = tokens_;
    p.x = in + x_at_;
    p.x_stride = x_stride_;
    p.packed = weights(in);
    if (biased_) p.bias = in + bias_at_;
    p.y = out + y_at_;
    p.y_stride = y_stride_;
    const polyspec::Result result = polyspec::dense_product(p, stream);
    p.tokens = 1;
    p.x = in + x_at_ + 2 * row_ * x_stride_;
    p.x_stride = 1;  // one row has no use for it
    p.y = out + alone_at_;
    return result.ok() ? polyspec::dense_product(p, stream) : result;
  }

  // The first error in the outputs; "" if none. `bits`: sums equal `sum_of`.
  std::string fault(const std::vector<unsigned char>& out, bool bits) const {
    const auto half = [&](size_t at, int64_t i) {
      uint16_t read;
      std::memcpy(&read, out.data() + at + 2 * i, 2);
      return read;
    };
    for (int64_t n = 0; n < outputs_; ++n) {
      if (half(alone_at_, n) != half(y_at_, row_ * y_stride_ + n)) return named("alone", row_, n);
      for (int64_t m = 0; m < tokens_; ++m) {
        double exact = biased_ ? of(bias_, n) : 0.0, sizes = std::fabs(exact);
        for (int64_t k = 0; k < inputs_; ++k) {
          const double product = of(x_, m * x_stride_ + k) * of(weights_, n * inputs_ + k);
          exact += product;
          sizes += std::fabs(product);
        }
        const double sums = (static_cast<double>(inputs_) / 8 + 44) * 0x1p-22 * sizes;
        const double y = of({half(y_at_, m * y_stride_ + n)}, 0);
        if (!(std::fabs(y - exact) <= sums * (1 + 0x1p-8) + 0x1p-8 * std::fabs(exact)))
          return named("beyond the bound", m, n);
        if (bits && half(y_at_, m * y_stride_ + n) != bfloat16_bits(sum_of(m, n)))
          return named("of other bits", m, n);
      }
    }
    for (int64_t m = 0; m + 1 < tokens_; ++m) {  // the gaps between rows
      for (int64_t n = outputs_; n < y_stride_; ++n) {
        if (half(y_at_, m * y_stride_ + n) != 0x0101u * Block::kPoison)
          return named("overwritten", m, n);
      }
    }
    return "";
  }

  Block inputs, outputs;

 private:
  std::vector<uint16_t> values(int64_t count, float scale) {
    std::vector<uint16_t> all(static_cast<size_t>(count));
    for (uint16_t& value : all) value = bfloat16_bits(scale * random_.normal());
    return all;
  }
  static double of(const std::vector<uint16_t>& values, int64_t at) {
    return static_cast<double>(
        polyspec::core::to_float(polyspec::core::BFloat16{values[static_cast<size_t>(at)]}));
  }
  // In the kernel's order, with the simulated device's sums of a product of matrices.
  float sum_of(int64_t m, int64_t n) const {
    float slices[8] = {};
    for (int64_t s = 0; s < 8; ++s) {
      for (int64_t at = inputs_ / 32 * s / 8 * 32; at < inputs_ / 32 * (s + 1) / 8 * 32; ++at) {
        const int64_t i = at % 16;
        const int64_t k = at / 32 * 32 + i % 8 / 2 * 8 + at % 32 / 16 * 4 + i / 8 * 2 + i % 2;
        slices[s] = __builtin_fmaf(static_cast<float>(of(weights_, n * inputs_ + k)),
                                   static_cast<float>(of(x_, m * x_stride_ + k)), slices[s]);
      }
    }
    float sum = slices[4] + slices[0];
    for (int s = 1; s < 4; ++s) sum += slices[s + 4] + slices[s];
    return biased_ ? sum + static_cast<float>(of(bias_, n)) : sum;
  }
  std::string named(const char* what, int64_t m, int64_t n) const {
    return "[" + std::to_string(outputs_) + ", " + std::to_string(inputs_) + "], " +
           std::to_string(tokens_) + " tokens: row " + std::to_string(m) + ", output " +
           std::to_string(n) + " is " + what;
  }

  Random random_;
  int64_t outputs_, inputs_, tokens_, x_stride_, y_stride_, row_;
  bool biased_;
  std::vector<uint16_t> weights_, x_, bias_;
  size_t weights_at_, x_at_, bias_at_, y_at_, alone_at_;
};

}  // namespace cases
