// The dense product of every instruction set that this processor has, in float32 and bfloat16: the
// sums of multiply-adds that dense.hpp states, bit for bit; rows alike for any number of rows;
// numbers too small, rows that are not finite; threads; refusals.
#include "polyspec/dense.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "api/packed_label.hpp"
#include "core/row.hpp"
#include "cpu/dense_dispatch.hpp"
#include "cpu/dense_tables.hpp"
#include "cpu/isa.hpp"
#include "support/aligned.hpp"
#include "support/check.hpp"

namespace {

using polyspec::DenseProductParams;
using polyspec::DenseShape;
using polyspec::DType;
using polyspec::core::BFloat16;
using polyspec::core::to_float;
using polyspec::cpu::Dense;
using support::Aligned;
using support::aligned;

template <class T>
constexpr DType kType = DType::kFloat32;
template <>
constexpr DType kType<BFloat16> = DType::kBFloat16;

void assign(float value, float* to) { *to = value; }
void assign(float value, BFloat16* to) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  to->bits = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
template <class T>
T as(float value) {
  T made;
  assign(value, &made);
  return made;
}

template <class T>
bool same(const T* a, const T* b, size_t count = 1) {
  return std::memcmp(a, b, count * sizeof(T)) == 0;
}
template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && same(a.data(), b.data(), a.size());
}

// Rows of more elements than are multiplied.
template <class T>
struct Case {
  DenseShape shape;
  int64_t tokens, stride;
  std::vector<T> weights, x, bias;
  Aligned packed;

  Case(int64_t outputs, int64_t inputs, int64_t tokens, uint64_t seed)
      : shape{outputs, inputs, kType<T>}, tokens(tokens), stride(inputs + 3) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < outputs * stride; ++i) weights.push_back(as<T>(normal(random)));
    for (int64_t i = 0; i < tokens * stride; ++i) x.push_back(as<T>(normal(random)));
    for (int64_t i = 0; i < outputs; ++i) bias.push_back(as<T>(normal(random)));
    pack();
  }

  void pack() {
    packed = aligned(polyspec::dense_packed_bytes(shape));
    CHECK(polyspec::dense_pack({shape, weights.data(), stride, packed.get()}).ok());
  }

  // The sum that the header states, and the other one that it states for matrix registers.
  T expected(int64_t token, int64_t output, bool with_bias, bool matrices) const {
    const T* a = x.data() + token * stride;
    const T* b = weights.data() + output * stride;
    const float sum = matrices ? sum_of_pairs(a, b) : sum_of_chain(a, b);
    return as<T>(with_bias ? sum + to_float(bias[static_cast<size_t>(output)]) : sum);
  }
  float sum_of_chain(const T* a, const T* b) const {
    constexpr int64_t kTogether = 4 / sizeof(T);
    float sum = 0;
    for (int64_t begin = 0; begin < shape.inputs; begin += kTogether) {
      for (int64_t k = std::min(begin + kTogether, shape.inputs); k-- > begin;)
        sum = std::fmaf(to_float(a[k]), to_float(b[k]), sum);
    }
    return sum;
  }
  float sum_of_pairs(const T* a, const T* b) const {
    float sum = 0;
    for (int64_t begin = 0; begin < shape.inputs; begin += 32) {
      float pair[2] = {};
      for (int64_t k = begin; k < std::min(begin + 32, shape.inputs); ++k)
        pair[k % 2] = std::fmaf(to_float(a[k]), to_float(b[k]), pair[k % 2]);
      sum += pair[0] + pair[1];
    }
    return sum;
  }

  DenseProductParams params(int64_t first, int64_t count, bool with_bias, std::vector<T>* y,
                            const Aligned& workspace) const {
    DenseProductParams made;
    made.shape = shape;
    made.tokens = count;
    made.x = x.data() + first * stride;
    made.x_stride = stride;
    made.packed = packed.get();
    made.bias = with_bias ? bias.data() : nullptr;
    y->assign(static_cast<size_t>(count * shape.outputs), as<T>(1234));
    made.y = y->data();
    made.y_stride = shape.outputs;
    made.workspace = workspace.get();
    return made;
  }

  // `count` rows from `first` on, by one copy.
  std::vector<T> run(const Dense& copy, int64_t first, int64_t count,
                     bool with_bias = false) const {
    std::vector<T> y;
    const int64_t bytes = polyspec::dense_workspace_bytes(shape, count);
    const Aligned workspace = aligned(bytes);
    std::memset(workspace.get(), 0xff, static_cast<size_t>(bytes));  // numbers that are none
    const auto call = polyspec::at_weights(params(first, count, with_bias, &y, workspace));
    for (int64_t part = copy.parts(shape.dtype, count); part-- > 0;)
      copy.prepare(call, 0, count, part);
    // As threads would: in two parts, of which one begins in the middle.
    const int64_t tiles = (shape.outputs + 15) / 16, cut = tiles / 2;
    copy.multiply(call, 0, count, cut, tiles);
    copy.multiply(call, 0, count, 0, cut);
    return y;
  }
};

// Whether the copy multiplies these numbers with matrix registers.
template <class T>
bool by_matrices(const Dense& copy) {
  return sizeof(T) == 2 && std::strcmp(copy.isa, "amx") == 0;
}

template <class T>
void test_sums(const Dense& copy) {
  const bool matrices = by_matrices<T>(copy);
  uint64_t seed = 1;
  for (const auto& [outputs, inputs] :
       {std::pair<int64_t, int64_t>{16, 2}, {1, 1}, {37, 255}, {300, 128}, {150, 513}}) {
    const Case<T> call(outputs, inputs, 33, ++seed);
    const std::vector<T> all = call.run(copy, 0, call.tokens), biased = call.run(copy, 0, 9, true);
    for (int64_t m = 0; m < call.tokens; ++m) {
      for (int64_t n = 0; n < outputs; ++n) {
        const auto at = static_cast<size_t>(m * outputs + n);
        const T plain = call.expected(m, n, false, matrices);
        const T with_bias = call.expected(m, n, true, matrices);
        CHECK(same(&plain, &all[at]));
        if (m < 9) CHECK(same(&with_bias, &biased[at]));
      }
    }
    for (int64_t count = 1; count < call.tokens; ++count) {
      const std::vector<T> some = call.run(copy, call.tokens - count, count);
      CHECK(same(some.data(), all.data() + all.size() - some.size(), some.size()));
    }
  }
}

// Of a long prompt a copy goes through runs of inputs and groups of tokens that its caches hold.
template <class T>
void test_many_tokens(const Dense& copy) {
  const bool matrices = by_matrices<T>(copy);
  for (const int64_t tokens : {49, 300}) {
    const Case<T> call(71, 2150, tokens, 17);
    const std::vector<T> all = call.run(copy, 0, tokens);
    for (int64_t m = 0; m < tokens; m += 1 + m % 23) {
      for (int64_t n = 0; n < 71; ++n) {
        const T expected = call.expected(m, n, false, matrices);
        CHECK(same(&expected, &all[static_cast<size_t>(m * 71 + n)]));
      }
    }
  }
}

// The same numbers with exponents from 50 on, or of zero.
void make_small(float* value, uint32_t random) {
  uint32_t bits;
  std::memcpy(&bits, value, 4);
  bits = (bits & 0x807fffffu) | (random % 8 == 0 ? 0 : 50 + random % 30) << 23;
  std::memcpy(value, &bits, 4);
}
void make_small(BFloat16* value, uint32_t random) {
  float wide = to_float(*value);
  make_small(&wide, random);
  assign(wide, value);
}

// Numbers below 2^-126 count as zero: a number, a product, a sum.
template <class T>
void test_small_numbers(const Dense& copy) {
  Case<T> call(20, 64, 16, 3);
  std::mt19937 random(4);
  for (std::vector<T>* numbers : {&call.x, &call.weights, &call.bias}) {
    for (T& number : *numbers) make_small(&number, static_cast<uint32_t>(random()));
  }
  call.pack();
  CHECK(same(call.run(polyspec::cpu::kDenseBaseline, 0, call.tokens, true),
             call.run(copy, 0, call.tokens, true)));
  Case<T> tiny(16, 2, 1, 5);
  tiny.x.assign(tiny.x.size(), as<T>(1));
  tiny.weights.assign(tiny.weights.size(), as<T>(std::ldexp(1.0f, -127)));
  tiny.pack();
  const T zero = as<T>(0);
  for (const T& number : tiny.run(copy, 0, 1)) CHECK(same(&zero, &number));
}

// They give one and the same NaN, and leave the others alone.
template <class T>
void test_not_finite(const Dense& copy) {
  const float infinity = std::numeric_limits<float>::infinity();
  Case<T> call(40, 128, 6, 11);
  const auto stride = static_cast<size_t>(call.stride);
  call.x[1 * stride + 70] = as<T>(-std::numeric_limits<float>::quiet_NaN());
  call.x[3 * stride + 2] = as<T>(infinity);
  call.weights[5 * stride + 2] = as<T>(0);  // which makes a NaN of it
  call.pack();
  const std::vector<T> y = call.run(copy, 0, call.tokens);
  const T nan = as<T>(std::numeric_limits<float>::quiet_NaN());
  for (int64_t m = 0; m < call.tokens; ++m) {
    for (int64_t n = 0; n < 40; ++n) {
      const T& got = y[static_cast<size_t>(m * 40 + n)];
      const T expected = call.expected(m, n, false, by_matrices<T>(copy));
      if (m == 1 || (m == 3 && n == 5)) {
        CHECK(same(&nan, &got));
      } else if (m == 3) {
        CHECK_EQ(infinity, std::fabs(to_float(got)));
      } else {
        CHECK(same(&expected, &got));
      }
    }
  }
}

template <class T>
void test_type(const Dense& copy) {
  test_sums<T>(copy);
  test_many_tokens<T>(copy);
  test_small_numbers<T>(copy);
  test_not_finite<T>(copy);
}

void test_instruction_set(const Dense& copy) {
  test_type<float>(copy);
  test_type<BFloat16>(copy);
  std::printf("%s: the stated sums, rows alike\n", copy.isa);
}

// Long prompts go in several passes.
template <class T>
void test_threads() {
  const Case<T> call(1000, 96, 500, 99);
  const Aligned workspace = aligned(polyspec::dense_workspace_bytes(call.shape, call.tokens));
  std::vector<T> serial, shared;
  CHECK(polyspec::dense_product(call.params(0, call.tokens, true, &serial, workspace)).ok());
  static int64_t most = 0;
  const polyspec::Executor backwards{
      [](void*, int64_t n, polyspec::Executor::Body body, void* context) {
        most = n;
        while (n-- > 0) body(context, n);
      },
      nullptr};
  const DenseProductParams again = call.params(0, call.tokens, true, &shared, workspace);
  CHECK(polyspec::dense_product(again, polyspec::Stream::cpu(backwards)).ok());
  CHECK(most > 1);
  CHECK(same(serial, shared));
  for (const int64_t m : {int64_t{0}, int64_t{249}, int64_t{250}, int64_t{499}}) {
    for (int64_t n = 0; n < 1000; ++n) {
      const T expected = call.expected(m, n, true, by_matrices<T>(polyspec::cpu::dense()));
      CHECK(same(&expected, &serial[static_cast<size_t>(m * 1000 + n)]));
    }
  }
  CHECK_EQ(static_cast<int>(polyspec::Result::Code::kUnsupported),
           static_cast<int>(polyspec::dense_product(again, polyspec::Stream::on(nullptr)).code));
}

void test_refusals() {
  for (const DenseShape& shape :
       {DenseShape{0, 8, DType::kFloat32}, {8, 0, DType::kFloat32}, {8, 8, DType::kFloat16}}) {
    CHECK_EQ(int64_t{-1}, polyspec::dense_packed_bytes(shape));
    CHECK_EQ(int64_t{-1}, polyspec::dense_workspace_bytes(shape, 1));
  }
  const Case<float> call(16, 32, 1, 6);
  const auto pack = [&](const void* weights, uint8_t* packed) {
    return polyspec::dense_pack({call.shape, weights, call.stride, packed}).ok();
  };
  CHECK(!pack(call.weights.data(), call.packed.get() + 2));
  CHECK(!pack(nullptr, call.packed.get()));
  const Aligned workspace = aligned(polyspec::dense_workspace_bytes(call.shape, 1));
  std::vector<float> y;
  DenseProductParams bad = call.params(0, 1, false, &y, workspace);
  bad.tokens = -1;
  CHECK(!polyspec::dense_product(bad).ok());
  bad.tokens = 1;
  bad.workspace = nullptr;
  CHECK(!polyspec::dense_product(bad).ok());
}

void test_sizes() {
  // 2^62 weights of 4 bytes.
  const DenseShape huge{2147483647, 2147483647, DType::kFloat32};
  CHECK_EQ(int64_t{-1}, polyspec::dense_packed_bytes(huge));
  CHECK_EQ(int64_t{-1}, polyspec::dense_workspace_bytes(huge, 1));
  const DenseShape most{2147483647, 1 << 20, DType::kFloat32};
  CHECK_EQ((int64_t{1} << 31) * (1 << 20) * 4 + 64, polyspec::dense_packed_bytes(most));
}

std::string refused(const DenseProductParams& params) {
  const polyspec::Result result = polyspec::dense_product(params);
  CHECK(result.code == polyspec::Result::Code::kInvalidArgument);
  return result.message;
}

// Missing strides, and memory that would be read after it was written.
void test_overlap() {
  const Case<float> call(16, 32, 3, 6);
  const Aligned workspace = aligned(polyspec::dense_workspace_bytes(call.shape, 3));
  std::vector<float> y;
  const DenseProductParams good = call.params(0, 3, true, &y, workspace);
  CHECK(polyspec::dense_product(good).ok());
  for (const int64_t stride : {int64_t{0}, int64_t{31}, int64_t{-40}, INT64_MAX}) {
    DenseProductParams bad = good;
    bad.x_stride = stride;
    CHECK(refused(bad).find("x_stride: expected at least inputs") == 0);
    polyspec::DensePackParams pack{call.shape, call.weights.data(), stride, workspace.get()};
    CHECK(!polyspec::dense_pack(pack).ok());
  }
  for (const int64_t stride : {int64_t{0}, int64_t{15}, INT64_MIN}) {
    DenseProductParams bad = good;
    bad.y_stride = stride;
    CHECK(refused(bad).find("y_stride: expected at least outputs") == 0);
  }
  DenseProductParams one = good;  // a single row has no use for strides
  one.tokens = 1;
  one.x_stride = one.y_stride = 0;
  CHECK(polyspec::dense_product(one).ok());
  float* const packed = static_cast<float*>(const_cast<void*>(good.packed));
  float* const x = static_cast<float*>(const_cast<void*>(good.x));
  float* const scratch = static_cast<float*>(good.workspace);
  for (float* const out : {packed, packed + 16 * 32 - 1, packed - 1, x, x - 15, scratch}) {
    DenseProductParams bad = good;
    bad.y = out;
    CHECK(refused(bad).find("y: expected memory apart from all else") == 0);
  }
  DenseProductParams bad = good;
  bad.tokens = 1;
  bad.y = const_cast<void*>(good.bias);
  CHECK(refused(bad).find("y: expected memory apart from all else, given some of bias") == 0);
  bad = good;
  bad.workspace = packed;
  CHECK(refused(bad).find("workspace: expected memory apart") == 0);

  // Columns of one matrix: x in the first 32, y in the next 16.
  std::vector<float> beside(3 * 48, 1.0f);
  DenseProductParams columns = good;
  columns.x = beside.data();
  columns.y = beside.data() + 32;
  columns.x_stride = columns.y_stride = 48;
  CHECK(polyspec::dense_product(columns).ok());
  columns.y = beside.data() + 31;
  CHECK(refused(columns).find("y: expected memory apart") == 0);
  columns.y = beside.data() + 33;  // its rows end in the next of x
  CHECK(refused(columns).find("y: expected memory apart") == 0);
}

}  // namespace

int main() {
  for (const auto& copy : polyspec::cpu::kDenseCopies) {
    if (polyspec::cpu::usable(copy.isa)) test_instruction_set(*copy.table);
  }
  test_threads<float>();
  test_threads<BFloat16>();
  test_refusals();
  test_sizes();
  test_overlap();
  return 0;
}
