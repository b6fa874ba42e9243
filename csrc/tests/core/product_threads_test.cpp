// The products and attention on real threads: as on one thread, bit for bit. Built with
// ThreadSanitizer as well (PolyspecTests.cmake), which reports every access that is not ordered.
#include <atomic>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "polyspec/attention.hpp"
#include "polyspec/dense.hpp"
#include "polyspec/int4.hpp"
#include "support/aligned.hpp"
#include "support/check.hpp"

namespace {

using polyspec::DType;
using support::Aligned;
using support::aligned;

constexpr int kThreads = 4;

// Threads that take the next index until there is none.
void run_on_threads(void*, int64_t n, polyspec::Executor::Body body, void* context) {
  std::atomic<int64_t> next{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int64_t at = next++; at < n; at = next++) body(context, at);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

polyspec::Stream threads() {
  return polyspec::Stream::cpu(polyspec::Executor{run_on_threads, nullptr});
}

// Numbers of float32 or, of two bytes each, of bfloat16.
std::vector<uint8_t> numbers(int64_t count, DType dtype, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const size_t size = dtype == DType::kFloat32 ? 4 : 2;
  std::vector<uint8_t> made(static_cast<size_t>(count) * size);
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    const float value = normal(random);
    uint8_t bytes[4];
    std::memcpy(bytes, &value, 4);
    std::memcpy(made.data() + i * size, bytes + (4 - size), size);
  }
  return made;
}

// Runs `call(out, workspace, stream)` on one thread, on several, and twice at the same time, each
// with a separate output and workspace.
void compare(size_t out_bytes, int64_t workspace_bytes,
             const std::function<polyspec::Result(uint8_t*, uint8_t*, polyspec::Stream)>& call) {
  const Aligned workspace = aligned(workspace_bytes), other = aligned(workspace_bytes);
  std::vector<uint8_t> serial(out_bytes, 0xa5), shared = serial, beside = serial;
  CHECK(call(serial.data(), workspace.get(), polyspec::Stream::cpu()).ok());
  std::thread again([&] { CHECK(call(beside.data(), other.get(), polyspec::Stream::cpu()).ok()); });
  CHECK(call(shared.data(), workspace.get(), threads()).ok());
  again.join();
  CHECK(serial == shared);
  CHECK(serial == beside);
}

void test_dense(DType dtype) {
  constexpr int64_t kOutputs = 333, kInputs = 129, kTokens = 140;
  const size_t size = dtype == DType::kFloat32 ? 4 : 2;
  const polyspec::DenseShape shape{kOutputs, kInputs, dtype};
  const std::vector<uint8_t> weights = numbers(kOutputs * kInputs, dtype, 1);
  const std::vector<uint8_t> x = numbers(kTokens * kInputs, dtype, 2);
  const std::vector<uint8_t> bias = numbers(kOutputs, dtype, 3);
  const Aligned packed = aligned(polyspec::dense_packed_bytes(shape));
  CHECK(polyspec::dense_pack({shape, weights.data(), kInputs, packed.get()}).ok());
  for (const int64_t tokens : {int64_t{1}, int64_t{5}, kTokens}) {
    compare(static_cast<size_t>(tokens * kOutputs) * size,
            polyspec::dense_workspace_bytes(shape, tokens),
            [&](uint8_t* out, uint8_t* workspace, polyspec::Stream stream) {
              polyspec::DenseProductParams params;
              params.shape = shape;
              params.tokens = tokens;
              params.x = x.data();
              params.x_stride = kInputs;
              params.packed = packed.get();
              params.bias = bias.data();
              params.y = out;
              params.y_stride = kOutputs;
              params.workspace = workspace;
              return polyspec::dense_product(params, stream);
            });
  }
}

void test_int4() {
  constexpr int64_t kOutputs = 1100, kInputs = 256, kTokens = 37;
  const polyspec::Int4Shape shape{kOutputs, kInputs, 64, DType::kBFloat16};
  std::mt19937 random(4);
  std::vector<uint8_t> values(static_cast<size_t>(kOutputs * kInputs));
  for (uint8_t& value : values) value = static_cast<uint8_t>(random() % 16);
  std::vector<float> scales(static_cast<size_t>(kOutputs * kInputs / 64), 0.25f), zeros = scales;
  const Aligned packed = aligned(polyspec::int4_packed_bytes(shape));
  CHECK(
      polyspec::int4_pack({shape, values.data(), scales.data(), zeros.data(), packed.get()}).ok());
  const std::vector<uint8_t> x = numbers(kTokens * kInputs, DType::kFloat32, 5);
  for (const int64_t tokens : {int64_t{1}, kTokens}) {
    compare(static_cast<size_t>(tokens * kOutputs) * 4,
            polyspec::int4_workspace_bytes(shape, tokens),
            [&](uint8_t* out, uint8_t* workspace, polyspec::Stream stream) {
              polyspec::Int4ProductParams params;
              params.shape = shape;
              params.tokens = tokens;
              params.x = x.data();
              params.x_stride = kInputs;
              params.packed = packed.get();
              params.y = out;
              params.y_stride = kOutputs;
              params.workspace = workspace;
              return polyspec::int4_product(params, stream);
            });
  }
}

// With a workspace the threads share spans of keys too.
void test_attention(DType dtype, int64_t length) {
  constexpr int64_t kBatch = 2, kHeads = 6, kGroups = 2, kTokens = 11, kWidth = 64;
  const size_t size = dtype == DType::kFloat32 ? 4 : 2;
  const std::vector<uint8_t> query = numbers(kBatch * kHeads * kTokens * kWidth, dtype, 6);
  const std::vector<uint8_t> key = numbers(kBatch * kGroups * length * kWidth, dtype, 7);
  const std::vector<uint8_t> value = numbers(kBatch * kGroups * length * kWidth, dtype, 8);
  polyspec::AttentionParams params;
  params.batch = kBatch;
  params.heads = kHeads;
  params.groups = kGroups;
  params.tokens = kTokens;
  params.length = length;
  params.width = params.value_width = kWidth;
  params.dtype = dtype;
  params.causal = true;
  params.scale = 0.125f;
  params.query = query.data();
  params.key = key.data();
  params.value = value.data();
  const int64_t queries[] = {kHeads * kTokens * kWidth, kTokens * kWidth, kWidth};
  const int64_t cached[] = {kGroups * length * kWidth, length * kWidth, kWidth};
  for (int i = 0; i < 3; ++i) {
    params.query_stride[i] = queries[i];
    params.key_stride[i] = params.value_stride[i] = cached[i];
  }
  compare(static_cast<size_t>(kBatch * kHeads * kTokens * kWidth) * size,
          polyspec::attention_workspace_bytes(params),
          [&](uint8_t* out, uint8_t* workspace, polyspec::Stream stream) {
            polyspec::AttentionParams mine = params;
            mine.out = out;
            if (stream.executor.run != nullptr) mine.workspace = workspace;
            return polyspec::attention(mine, stream);
          });
}

}  // namespace

int main() {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    test_dense(dtype);
    // Spans of one, of a few keys, and full spans; the last key begins a span.
    for (const int64_t length : {150, 513, 1300}) test_attention(dtype, length);
  }
  test_int4();
  return 0;
}
