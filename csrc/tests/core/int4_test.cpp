// The 4-bit product of every instruction set that this processor has, against the dequantised
// product in float64 and the bound of int4.hpp, byte-equal for every instruction set, number of
// rows and number of threads; the largest sums; rows that are not finite; packing and unpacking;
// rounding; refusals.
#include "polyspec/int4.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "api/packed_label.hpp"
#include "cpu/int4_tables.hpp"
#include "cpu/isa.hpp"
#include "support/aligned.hpp"
#include "support/check.hpp"

namespace {

using polyspec::DType;
using polyspec::Int4PackParams;
using polyspec::Int4ProductParams;
using polyspec::Int4Shape;
using polyspec::cpu::Int4;
using support::Aligned;
using support::aligned;

float rounded_to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  std::memcpy(&value, &bits, 4);
  return value;
}

// A random matrix and activations.
struct Case {
  Int4Shape shape;
  int64_t tokens;
  std::vector<uint8_t> values;
  std::vector<float> scales, zeros, x;
  Aligned packed;

  Case(int64_t outputs, int64_t inputs, int32_t group, DType scale_dtype, int64_t tokens,
       uint64_t seed)
      : shape{outputs, inputs, group, scale_dtype}, tokens(tokens) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    values.resize(static_cast<size_t>(outputs * inputs));
    for (uint8_t& value : values) value = static_cast<uint8_t>(random() % 16);
    const auto count = static_cast<size_t>(outputs * inputs / group);
    for (size_t i = 0; i < count; ++i) {
      scales.push_back(rounded_to_bfloat16(0.01f + 0.02f * std::fabs(normal(random))));
      zeros.push_back(rounded_to_bfloat16(0.01f * normal(random)));
    }
    for (int64_t i = 0; i < tokens * inputs; ++i) x.push_back(normal(random));
    packed = aligned(polyspec::int4_packed_bytes(shape));
    CHECK(polyspec::int4_pack({shape, values.data(), scales.data(), zeros.data(), packed.get()})
              .ok());
  }

  float largest(int64_t token, int64_t group) const {
    float found = 0;
    const float* row = x.data() + token * shape.inputs + group * shape.group;
    for (int32_t k = 0; k < shape.group; ++k) found = std::fmax(found, std::fabs(row[k]));
    return found;
  }

  // The product and its bound, for one token and output.
  void exact(int64_t token, int64_t output, double* product, double* bound) const {
    const int64_t groups = shape.inputs / shape.group;
    const double step = 1.0 / 254 + std::ldexp(1.0, -22);
    const double sums = static_cast<double>(groups + 1) * std::ldexp(1.0, -22);
    *product = *bound = 0;
    for (int64_t k = 0; k < shape.inputs; ++k) {
      const auto at = static_cast<size_t>((output * shape.inputs + k) / shape.group);
      const double q = values[static_cast<size_t>(output * shape.inputs + k)] - 8;
      const double weight = q * scales[at] + zeros[at];
      const double size = std::fabs(q * scales[at]) + std::fabs(zeros[at]);
      *product += x[static_cast<size_t>(token * shape.inputs + k)] * weight;
      *bound += largest(token, k / shape.group) * (step * std::fabs(weight) + sums * size);
    }
  }

  // `count` rows from `first` on, by one copy.
  std::vector<float> run(const Int4& copy, int64_t first, int64_t count) const {
    std::vector<float> y(static_cast<size_t>(count * shape.outputs), 1e30f);
    const Aligned workspace = aligned(polyspec::int4_workspace_bytes(shape, count));
    Int4ProductParams params;
    params.shape = shape;
    params.tokens = count;
    params.x = x.data() + first * shape.inputs;
    params.x_stride = shape.inputs;
    params.packed = packed.get();
    params = polyspec::at_weights(params);
    params.y = y.data();
    params.y_stride = shape.outputs;
    params.workspace = workspace.get();
    // In any order, one row by itself.
    if (count > 1) copy.prepare(params, 0, count, 1, count);
    copy.prepare(params, 0, count, 0, 1);
    // As threads would: in two parts, of which one begins in the middle.
    const int64_t tiles = (shape.outputs + 15) / 16, cut = tiles / 2;
    copy.multiply(params, 0, count, cut, tiles);
    copy.multiply(params, 0, count, 0, cut);
    return y;
  }
};

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void test_copy(const Int4& copy) {
  uint64_t seed = 1;
  for (const auto& [outputs, inputs, group] : {std::tuple<int64_t, int64_t, int32_t>{16, 32, 32},
                                               {1, 64, 64},
                                               {37, 256, 64},
                                               {200, 384, 128},
                                               {150, 512, 256}}) {
    for (const DType scales : {DType::kFloat32, DType::kBFloat16}) {
      Case call(outputs, inputs, group, scales, polyspec::kInt4Tokens, ++seed);
      // One activation far above the others, and a group of zeros.
      call.x[static_cast<size_t>(3 * inputs + 5)] = 60;
      std::fill_n(call.x.begin() + 4 * inputs, group, 0.0f);
      const std::vector<float> all = call.run(copy, 0, call.tokens);
      for (int64_t m = 0; m < call.tokens; ++m) {
        for (int64_t n = 0; n < outputs; ++n) {
          double product, bound;
          call.exact(m, n, &product, &bound);
          CHECK_NEAR(product, all[static_cast<size_t>(m * outputs + n)], bound);
        }
      }
      CHECK(same(call.run(polyspec::cpu::kInt4Baseline, 0, call.tokens), all));
      for (int64_t count = 1; count < call.tokens; count += count < 18 ? 1 : 13) {
        const std::vector<float> some = call.run(copy, call.tokens - count, count);
        CHECK(same({all.end() - static_cast<ptrdiff_t>(some.size()), all.end()}, some));
      }
    }
  }
  std::printf("%s: within the bound, baseline's bits, rows alike\n", copy.isa);
}

// Whole numbers of which the largest is 127 are not rounded, and the largest products do not
// overflow.
void test_whole_numbers(const Int4& copy) {
  for (const int32_t group : {32, 64, 128, 256}) {
    Case call(20, 2 * group, group, DType::kFloat32, 9, 7);
    std::fill(call.scales.begin(), call.scales.end(), 0.5f);
    std::fill(call.zeros.begin(), call.zeros.end(), -3.0f);
    for (int64_t n = 0; n < 4; ++n) {
      std::fill_n(call.values.begin() + n * call.shape.inputs, call.shape.inputs,
                  n % 2 == 0 ? uint8_t{15} : uint8_t{0});
    }
    CHECK(polyspec::int4_pack({call.shape, call.values.data(), call.scales.data(),
                               call.zeros.data(), call.packed.get()})
              .ok());
    for (size_t i = 0; i < call.x.size(); ++i) {
      const auto row = static_cast<int64_t>(i) / call.shape.inputs;
      const float whole = std::fmax(-127.0f, std::fmin(127.0f, std::round(40 * call.x[i])));
      call.x[i] = row == 0 ? 127.0f : row == 1 ? -127.0f : i % 32 == 0 ? 127.0f : whole;
    }
    const std::vector<float> y = call.run(copy, 0, call.tokens);
    for (int64_t m = 0; m < call.tokens; ++m) {
      for (int64_t n = 0; n < call.shape.outputs; ++n) {
        double product, bound;
        call.exact(m, n, &product, &bound);
        CHECK_EQ(product, static_cast<double>(y[static_cast<size_t>(m * call.shape.outputs + n)]));
      }
    }
  }
}

// They give rows of one and the same NaN, and leave the others alone.
void test_not_finite(const Int4& copy) {
  const Case plain(40, 128, 64, DType::kBFloat16, 6, 11);
  const std::vector<float> expected = plain.run(copy, 0, plain.tokens);
  Case call(40, 128, 64, DType::kBFloat16, 6, 11);
  call.x[1 * 128 + 70] = std::numeric_limits<float>::quiet_NaN();
  call.x[3 * 128 + 2] = std::numeric_limits<float>::infinity();
  call.x[4 * 128 + 3] = -std::numeric_limits<float>::infinity();
  const std::vector<float> y = call.run(copy, 0, call.tokens);
  for (size_t i = 0; i < y.size(); ++i) {
    const size_t row = i / 40;
    uint32_t bits, wanted = 0x7fc00000u;
    std::memcpy(&bits, &y[i], 4);
    if (row != 1 && row < 3) std::memcpy(&wanted, &expected[i], 4);
    if (row > 4) std::memcpy(&wanted, &expected[i], 4);
    CHECK_EQ(wanted, bits);
  }
  // Sums that overflow give NaN too where they meet, of one sign on every processor.
  std::fill(call.x.begin(), call.x.end(), std::numeric_limits<float>::max());
  CHECK(
      same(call.run(polyspec::cpu::kInt4Baseline, 0, call.tokens), call.run(copy, 0, call.tokens)));
  // Below 2^-100: counts as zero.
  std::fill(call.x.begin(), call.x.end(), 7e-31f);
  for (const float value : call.run(copy, 0, call.tokens)) CHECK_EQ(0.0f, value);
}

void test_instruction_set(const Int4& copy) {
  test_copy(copy);
  test_whole_numbers(copy);
  test_not_finite(copy);
}

void test_threads() {
  const Case call(1000, 512, 128, DType::kBFloat16, 37, 99);
  const Aligned workspace = aligned(polyspec::int4_workspace_bytes(call.shape, call.tokens));
  std::vector<float> serial(static_cast<size_t>(call.tokens * call.shape.outputs));
  std::vector<float> shared = serial;
  Int4ProductParams params;
  params.shape = call.shape;
  params.tokens = call.tokens;
  params.x = call.x.data();
  params.x_stride = call.shape.inputs;
  params.packed = call.packed.get();
  params.y_stride = call.shape.outputs;
  params.workspace = workspace.get();
  params.y = serial.data();
  CHECK(polyspec::int4_product(params).ok());
  static int64_t most = 0;
  const polyspec::Executor backwards{
      [](void*, int64_t n, polyspec::Executor::Body body, void* context) {
        most = n;
        while (n-- > 0) body(context, n);
      },
      nullptr};
  params.y = shared.data();
  CHECK(polyspec::int4_product(params, polyspec::Stream::cpu(backwards)).ok());
  CHECK(most > 1);
  CHECK(serial == shared);
  // On CUDA activations are not float32.
  CHECK_EQ(static_cast<int>(polyspec::Result::Code::kInvalidArgument),
           static_cast<int>(polyspec::int4_product(params, polyspec::Stream::on(nullptr)).code));
}

void test_unpack() {
  const Case call(33, 192, 64, DType::kFloat32, 1, 5);
  std::vector<uint8_t> values(call.values.size());
  std::vector<float> scales(call.scales.size()), zeros(call.zeros.size());
  CHECK(polyspec::int4_unpack(
            {call.shape, call.packed.get(), values.data(), scales.data(), zeros.data()})
            .ok());
  CHECK(values == call.values && scales == call.scales && zeros == call.zeros);
}

void test_round() {
  // Sixteen even steps are met exactly, by the range of all weights.
  const Int4Shape shape{3, 64, 32, DType::kFloat32};
  std::vector<float> weights;
  for (int i = 0; i < 3 * 70; ++i) weights.push_back(static_cast<float>(i % 16) - 4.0f);
  std::vector<uint8_t> values(3 * 64);
  std::vector<float> scales(3 * 2), zeros(3 * 2);
  const auto round = [&](const Int4Shape& of) {
    return polyspec::int4_round({of, DType::kFloat32, weights.data(), 70, nullptr, values.data(),
                                 scales.data(), zeros.data()});
  };
  CHECK(round(shape).ok());
  for (size_t row = 0; row < 3; ++row) {
    for (size_t k = 0; k < 64; ++k) {
      const size_t at = row * 2 + k / 32;
      const float found =
          (static_cast<float>(values[row * 64 + k]) - 8.0f) * scales[at] + zeros[at];
      CHECK_EQ(weights[row * 70 + k], found);
    }
  }
  CHECK(!round({3, 64, 48, DType::kFloat32}).ok());
  weights[75] = std::numeric_limits<float>::infinity();
  CHECK(!round(shape).ok());
}

void test_refusals() {
  for (const Int4Shape& shape :
       {Int4Shape{16, 100, 32, DType::kFloat32}, Int4Shape{16, 96, 48, DType::kFloat32},
        Int4Shape{0, 128, 128, DType::kFloat32}, Int4Shape{16, 128, 128, DType::kFloat16}}) {
    CHECK_EQ(int64_t{-1}, polyspec::int4_packed_bytes(shape));
    CHECK_EQ(int64_t{-1}, polyspec::int4_workspace_bytes(shape, 1));
  }
  Case call(16, 32, 32, DType::kFloat32, 1, 6);
  const auto pack = [&](uint8_t* packed) {
    return polyspec::int4_pack(
        {call.shape, call.values.data(), call.scales.data(), call.zeros.data(), packed});
  };
  CHECK(!pack(call.packed.get() + 1).ok());
  call.values[7] = 16;
  CHECK(!pack(call.packed.get()).ok());
}

// Missing strides, and memory that would be read after it was written.
void test_overlap() {
  const Case call(16, 64, 32, DType::kFloat32, 3, 6);
  const Aligned workspace = aligned(polyspec::int4_workspace_bytes(call.shape, 3));
  std::vector<float> y(3 * 16);
  Int4ProductParams good;
  good.shape = call.shape;
  good.tokens = 3;
  good.x = call.x.data();
  good.x_stride = 64;
  good.packed = call.packed.get();
  good.y = y.data();
  good.y_stride = 16;
  good.workspace = workspace.get();
  CHECK(polyspec::int4_product(good).ok());
  const auto refused = [](const Int4ProductParams& params, const char* why) {
    const polyspec::Result result = polyspec::int4_product(params);
    CHECK(result.code == polyspec::Result::Code::kInvalidArgument);
    CHECK(std::strstr(result.message, why) != nullptr);
  };
  Int4ProductParams bad = good;
  bad.x_stride = 0;
  refused(bad, "x_stride: expected at least inputs");
  bad = good;
  bad.y_stride = 15;
  refused(bad, "y_stride: expected at least outputs");
  for (void* const out :
       {static_cast<void*>(call.packed.get()), const_cast<void*>(good.x), good.workspace}) {
    bad = good;
    bad.y = out;
    refused(bad, "y: expected memory apart from all else");
  }
  bad = good;
  bad.workspace = call.packed.get();
  refused(bad, "workspace: expected memory apart");
}

}  // namespace

int main() {
  for (const auto& copy : polyspec::cpu::kInt4Copies) {
    if (polyspec::cpu::usable(copy.isa)) test_instruction_set(*copy.table);
  }
  test_threads();
  test_unpack();
  test_round();
  test_refusals();
  test_overlap();
  return 0;
}
