// The bfloat16 product of every instruction set that this processor has: the chain of multiply-adds
// that bfloat16.hpp states, bit for bit; rows alike whatever their number; numbers too small, rows
// that are not finite; threads; refusals.
#if defined(__x86_64__) && !defined(POLYSPEC_X86)
#define POLYSPEC_X86 1  // cpu/bfloat16_tables.hpp then declares the copies
#endif

#include "polyspec/bfloat16.hpp"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "cpu/bfloat16_tables.hpp"
#include "cpu/isa.hpp"
#include "support/check.hpp"

namespace {

using polyspec::BFloat16ProductParams;
using polyspec::BFloat16Shape;
using polyspec::cpu::BFloat16Product;
using Halves = std::vector<uint16_t>;

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

uint16_t half_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float float_of(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Rows of more elements than are multiplied.
struct Case {
  BFloat16Shape shape;
  int64_t tokens, stride;
  Halves weights, x, bias;
  Aligned packed;

  Case(int64_t outputs, int64_t inputs, int64_t tokens, uint64_t seed)
      : shape{outputs, inputs}, tokens(tokens), stride(inputs + 3) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < outputs * stride; ++i) weights.push_back(half_of(normal(random)));
    for (int64_t i = 0; i < tokens * stride; ++i) x.push_back(half_of(normal(random)));
    for (int64_t i = 0; i < outputs; ++i) bias.push_back(half_of(normal(random)));
    pack();
  }

  void pack() {
    packed = aligned(polyspec::bfloat16_packed_bytes(shape));
    CHECK(polyspec::bfloat16_pack({shape, weights.data(), stride, packed.get()}).ok());
  }

  // The chain of the header.
  uint16_t expected(int64_t token, int64_t output, bool with_bias) const {
    const uint16_t* a = x.data() + token * stride;
    const uint16_t* b = weights.data() + output * stride;
    float sum = 0;
    for (int64_t k = 0; k < shape.inputs; k += 2) {
      if (k + 1 < shape.inputs) sum = std::fmaf(float_of(a[k + 1]), float_of(b[k + 1]), sum);
      sum = std::fmaf(float_of(a[k]), float_of(b[k]), sum);
    }
    return half_of(with_bias ? sum + float_of(bias[static_cast<size_t>(output)]) : sum);
  }

  BFloat16ProductParams params(int64_t first, int64_t count, bool with_bias, Halves* y,
                               const Aligned& workspace) const {
    BFloat16ProductParams made;
    made.shape = shape;
    made.tokens = count;
    made.x = x.data() + first * stride;
    made.x_stride = stride;
    made.packed = packed.get();
    made.bias = with_bias ? bias.data() : nullptr;
    y->assign(static_cast<size_t>(count * shape.outputs), 0x1234);
    made.y = y->data();
    made.y_stride = shape.outputs;
    made.workspace = workspace.get();
    return made;
  }

  // `count` rows from `first` on, by one copy.
  Halves run(const BFloat16Product& copy, int64_t first, int64_t count,
             bool with_bias = false) const {
    Halves y;
    const Aligned workspace = aligned(polyspec::bfloat16_workspace_bytes(shape, count));
    const BFloat16ProductParams call = params(first, count, with_bias, &y, workspace);
    for (int64_t part = copy.parts(count); part-- > 0;) copy.prepare(call, 0, count, part);
    // As threads would: in two parts, of which one begins in the middle.
    const int64_t tiles = (shape.outputs + 15) / 16, cut = tiles / 2;
    copy.multiply(call, 0, count, cut, tiles);
    copy.multiply(call, 0, count, 0, cut);
    return y;
  }
};

void test_copy(const BFloat16Product& copy) {
  uint64_t seed = 1;
  for (const auto& [outputs, inputs] :
       {std::pair<int64_t, int64_t>{16, 2}, {1, 1}, {37, 255}, {300, 128}, {150, 513}}) {
    const Case call(outputs, inputs, 33, ++seed);
    const Halves all = call.run(copy, 0, call.tokens), biased = call.run(copy, 0, 9, true);
    for (int64_t m = 0; m < call.tokens; ++m) {
      for (int64_t n = 0; n < outputs; ++n) {
        const auto at = static_cast<size_t>(m * outputs + n);
        CHECK_EQ(call.expected(m, n, false), all[at]);
        if (m < 9) CHECK_EQ(call.expected(m, n, true), biased[at]);
      }
    }
    for (int64_t count = 1; count < call.tokens; ++count) {
      const Halves some = call.run(copy, call.tokens - count, count);
      CHECK(some == Halves(all.end() - static_cast<ptrdiff_t>(some.size()), all.end()));
    }
  }
  std::printf("%s: the stated chain, rows alike\n", copy.isa);
}

// What is below 2^-126 counts as zero: a number, a product, a sum.
void test_small_numbers(const BFloat16Product& copy) {
  Case call(20, 64, 16, 3);
  std::mt19937_64 random(4);
  for (Halves* halves : {&call.x, &call.weights, &call.bias}) {
    for (uint16_t& half : *halves) {
      // Exponents whose products lie around the smallest normal number, and some below it.
      const auto exponent = static_cast<uint16_t>(random() % 8 == 0 ? 0 : 50 + random() % 30);
      half = static_cast<uint16_t>((half & 0x807f) | exponent << 7);
    }
  }
  call.pack();
  CHECK(call.run(polyspec::cpu::kBFloat16Baseline, 0, call.tokens, true) ==
        call.run(copy, 0, call.tokens, true));
  Case tiny(16, 2, 1, 5);
  tiny.x = {half_of(1.0f), half_of(1.0f), 0, 0, 0};
  for (uint16_t& half : tiny.weights) half = 0x0040;  // 2^-127
  tiny.pack();
  for (const uint16_t half : tiny.run(copy, 0, 1)) CHECK_EQ(uint16_t{0}, half);
}

// They give one and the same NaN, and leave the others alone.
void test_not_finite(const BFloat16Product& copy) {
  const Case plain(40, 128, 6, 11);
  Case call(40, 128, 6, 11);
  const size_t stride = static_cast<size_t>(call.stride);
  call.x[1 * stride + 70] = 0xffc1;  // NaN
  call.x[3 * stride + 2] = 0x7f80;   // infinity
  call.weights[5 * stride + 2] = 0;  // of which a zero makes a NaN
  call.pack();
  const Halves y = call.run(copy, 0, call.tokens);
  for (int64_t m = 0; m < call.tokens; ++m) {
    for (int64_t n = 0; n < 40; ++n) {
      const uint16_t got = y[static_cast<size_t>(m * 40 + n)];
      if (m == 1 || (m == 3 && n == 5)) {
        CHECK_EQ(uint16_t{0x7fc0}, got);
      } else if (m == 3) {
        CHECK_EQ(uint16_t{0x7f80}, static_cast<uint16_t>(got & 0x7fff));
      } else {
        CHECK_EQ(call.expected(m, n, false), got);
      }
    }
  }
}

void test_instruction_set(const BFloat16Product& copy) {
  test_copy(copy);
  test_small_numbers(copy);
  test_not_finite(copy);
}

// Long prompts go in several passes.
void test_threads() {
  const Case call(1000, 96, 300, 99);
  const Aligned workspace = aligned(polyspec::bfloat16_workspace_bytes(call.shape, call.tokens));
  Halves serial, shared;
  CHECK(polyspec::bfloat16_product(call.params(0, call.tokens, true, &serial, workspace)).ok());
  static int64_t most = 0;
  const polyspec::Executor backwards{
      [](void*, int64_t n, polyspec::Executor::Body body, void* context) {
        most = n;
        while (n-- > 0) body(context, n);
      },
      nullptr};
  const BFloat16ProductParams again = call.params(0, call.tokens, true, &shared, workspace);
  CHECK(polyspec::bfloat16_product(again, polyspec::Stream::cpu(backwards)).ok());
  CHECK(most > 1);
  CHECK(serial == shared);
  for (const int64_t m : {int64_t{0}, int64_t{127}, int64_t{128}, int64_t{299}}) {
    for (int64_t n = 0; n < 1000; ++n)
      CHECK_EQ(call.expected(m, n, true), serial[static_cast<size_t>(m * 1000 + n)]);
  }
  CHECK_EQ(static_cast<int>(polyspec::Result::Code::kUnsupported),
           static_cast<int>(polyspec::bfloat16_product(again, polyspec::Stream::on(nullptr)).code));
}

void test_refusals() {
  for (const BFloat16Shape& shape : {BFloat16Shape{0, 8}, BFloat16Shape{8, 0}}) {
    CHECK_EQ(int64_t{-1}, polyspec::bfloat16_packed_bytes(shape));
    CHECK_EQ(int64_t{-1}, polyspec::bfloat16_workspace_bytes(shape, 1));
  }
  const Case call(16, 32, 1, 6);
  CHECK(!polyspec::bfloat16_pack(
             {call.shape, call.weights.data(), call.stride, call.packed.get() + 2})
             .ok());
  CHECK(!polyspec::bfloat16_pack({call.shape, nullptr, call.stride, call.packed.get()}).ok());
  const Aligned workspace = aligned(polyspec::bfloat16_workspace_bytes(call.shape, 1));
  Halves y;
  BFloat16ProductParams bad = call.params(0, 1, false, &y, workspace);
  bad.tokens = -1;
  CHECK(!polyspec::bfloat16_product(bad).ok());
  bad.tokens = 1;
  bad.workspace = nullptr;
  CHECK(!polyspec::bfloat16_product(bad).ok());
}

}  // namespace

int main() {
  test_instruction_set(polyspec::cpu::kBFloat16Baseline);
#ifdef POLYSPEC_X86
  const polyspec::cpu::Isa isa = polyspec::cpu::isa_in_use();
  if (isa >= polyspec::cpu::Isa::kAvx2) test_instruction_set(polyspec::cpu::kBFloat16Avx2);
  if (isa >= polyspec::cpu::Isa::kAvx512Bf16)
    test_instruction_set(polyspec::cpu::kBFloat16Avx512Bf16);
#endif
  test_threads();
  test_refusals();
  return 0;
}
