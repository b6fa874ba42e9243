// How often attention copies keys and values to shared memory, counted while the kernels run on the
// simulated device: once for all queries that read the same, up to 64.
#include <algorithm>
#include <vector>

#include "cuda/launch.hpp"
#include "cuda_runtime_api.h"
#include "polyspec/attention.hpp"
#include "support/check.hpp"

namespace {

constexpr int64_t kLength = 1100, kWidth = 32, kGroups = 2;  // keys of three spans

// Of keys and values.
uint64_t bytes_of(int64_t keys) { return static_cast<uint64_t>(2 * 2 * kGroups * keys * kWidth); }

// Bytes that all CTAs read; the first keys are hidden.
uint64_t bytes_read(int64_t share, int64_t tokens, int shared_memory = 0, int64_t hidden = 0) {
  polyspec::AttentionParams p;
  p.batch = 1;
  p.groups = kGroups;
  p.heads = share * kGroups;
  p.tokens = tokens;
  p.length = kLength;
  p.width = p.value_width = kWidth;
  p.dtype = polyspec::DType::kBFloat16;
  const auto zeros = [](int64_t count) {
    void* memory = nullptr;
    const size_t bytes = static_cast<size_t>((count + 31) / 32) * 64;
    CHECK(cudaMalloc(&memory, bytes) == cudaSuccess);
    CHECK(cudaMemsetAsync(memory, 0, bytes, nullptr) == cudaSuccess);
    return memory;
  };
  p.query = zeros(p.heads * tokens * kWidth);
  p.key = zeros(kGroups * kLength * kWidth);
  p.value = zeros(kGroups * kLength * kWidth);
  p.out = zeros(p.heads * tokens * kWidth);
  std::vector<uint16_t> mask(kLength, 0);
  std::fill_n(mask.begin(), hidden, 0xff7f);  // the lowest number
  if (hidden > 0) p.mask = mask.data();       // of all tokens
  p.workspace = zeros(polyspec::attention_workspace_bytes(p) / 2);
  polyspec::cuda::force_shape(0, 0, shared_memory);  // no more CTAs than the queries need
  const uint64_t before = stand_in::bytes_copied();
  const polyspec::Result result = polyspec::attention(p, polyspec::Stream::on(nullptr));
  CHECK_EQ(std::string(), result.message);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  const uint64_t all = stand_in::bytes_copied() - before;
  for (const void* memory : {p.query, p.key, p.value, static_cast<const void*>(p.out),
                             static_cast<const void*>(p.workspace)}) {
    CHECK(cudaFree(const_cast<void*>(memory)) == cudaSuccess);
  }
  return all;
}

}  // namespace

int main() {
  const uint64_t once = bytes_of(kLength);
  for (const auto& [share, tokens] : {std::pair<int64_t, int64_t>{1, 1}, {8, 1}, {4, 13}, {8, 8}})
    CHECK_EQ(once, bytes_read(share, tokens));
  CHECK_EQ(2 * once, bytes_read(5, 13));
  CHECK_EQ(4 * once, bytes_read(4, 13, 99 << 10));  // kernels for few queries alone have room
  // Of a span that is hidden the first block alone.
  CHECK_EQ(once - bytes_of(polyspec::kAttentionSpan - 128), bytes_read(4, 13, 0, 600));
  return 0;
}
