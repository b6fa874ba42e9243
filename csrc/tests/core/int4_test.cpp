// The 4-bit product of every instruction set that this processor has, against the dequantised
// product in float64 and the bound of int4.hpp; rows that do not depend on their number or on
// threads; packing and unpacking; refusals.
#if defined(__x86_64__) && !defined(POLYSPEC_X86)
#define POLYSPEC_X86 1  // cpu/int4_tables.hpp then declares the copies
#endif

#include "polyspec/int4.hpp"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "cpu/int4_tables.hpp"
#include "cpu/isa.hpp"
#include "support/check.hpp"

namespace {

using polyspec::DType;
using polyspec::Int4PackParams;
using polyspec::Int4ProductParams;
using polyspec::Int4Shape;
using polyspec::cpu::Int4;

struct Free {
  void operator()(uint8_t* memory) const { std::free(memory); }
};
using Aligned = std::unique_ptr<uint8_t, Free>;

Aligned aligned(int64_t bytes) {
  const size_t size = (static_cast<size_t>(bytes) + 63) / 64 * 64;
  Aligned made(static_cast<uint8_t*>(std::aligned_alloc(64, size)));
  std::memset(made.get(), 0x5a, size);
  return made;
}

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

  // The product and S of the bound, for one token and output.
  void exact(int64_t token, int64_t output, double* product, double* size) const {
    *product = *size = 0;
    for (int64_t k = 0; k < shape.inputs; ++k) {
      const auto at = static_cast<size_t>((output * shape.inputs + k) / shape.group);
      const double q = values[static_cast<size_t>(output * shape.inputs + k)] - 8;
      const double each = x[static_cast<size_t>(token * shape.inputs + k)];
      *product += each * (q * scales[at] + zeros[at]);
      *size += std::fabs(each) * (std::fabs(q * scales[at]) + std::fabs(zeros[at]));
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
    params.y = y.data();
    params.y_stride = shape.outputs;
    params.workspace = workspace.get();
    copy.prepare(params, 0, count);
    // As threads would: in two parts, of which one begins in the middle.
    const int64_t tiles = (shape.outputs + 15) / 16, cut = tiles / 2;
    copy.multiply(params, 0, count, cut, tiles);
    copy.multiply(params, 0, count, 0, cut);
    return y;
  }
};

void test_copy(const Int4& copy) {
  uint64_t seed = 1;
  for (const auto& [outputs, inputs, group] : {std::tuple<int64_t, int64_t, int32_t>{16, 32, 32},
                                               {1, 64, 64},
                                               {37, 256, 64},
                                               {200, 384, 128},
                                               {150, 512, 256}}) {
    for (const DType scales : {DType::kFloat32, DType::kBFloat16}) {
      const Case call(outputs, inputs, group, scales, polyspec::kInt4Tokens, ++seed);
      const std::vector<float> all = call.run(copy, 0, call.tokens);
      const double unit = copy.rounds_activations ? std::ldexp(1.0, -8) : 0.0;
      const double sums = std::ldexp(static_cast<double>(inputs + group), -23);
      for (int64_t m = 0; m < call.tokens; ++m) {
        for (int64_t n = 0; n < outputs; ++n) {
          double product, size;
          call.exact(m, n, &product, &size);
          CHECK_NEAR(product, all[static_cast<size_t>(m * outputs + n)], (unit + sums) * size);
        }
      }
      for (int64_t count = 1; count < call.tokens; ++count) {
        const std::vector<float> some = call.run(copy, call.tokens - count, count);
        CHECK(std::memcmp(some.data(), all.data() + (call.tokens - count) * outputs,
                          some.size() * sizeof(float)) == 0);
      }
    }
  }
  std::printf("%s: within the bound, rows alike\n", copy.isa);
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
  CHECK_EQ(static_cast<int>(polyspec::Result::Code::kUnsupported),
           static_cast<int>(polyspec::int4_product(params, polyspec::Stream::on(nullptr)).code));
}

void test_unpack() {
  const Case call(33, 192, 64, DType::kFloat32, 1, 5);
  std::vector<uint8_t> values(call.values.size());
  std::vector<float> scales(call.scales.size()), zeros(call.zeros.size());
  CHECK(polyspec::int4_unpack(
            {call.shape, values.data(), scales.data(), zeros.data(), call.packed.get()})
            .ok());
  CHECK(values == call.values && scales == call.scales && zeros == call.zeros);
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

}  // namespace

int main() {
  test_copy(polyspec::cpu::kInt4Baseline);
#ifdef POLYSPEC_X86
  const polyspec::cpu::Isa isa = polyspec::cpu::isa_in_use();
  if (isa >= polyspec::cpu::Isa::kAvx2) test_copy(polyspec::cpu::kInt4Avx2);
  if (isa >= polyspec::cpu::Isa::kAvx512) test_copy(polyspec::cpu::kInt4Avx512);
  if (isa >= polyspec::cpu::Isa::kAvx512Bf16) test_copy(polyspec::cpu::kInt4Avx512Bf16);
#endif
  test_threads();
  test_unpack();
  test_refusals();
  return 0;
}
