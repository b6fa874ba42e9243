// Helpers of the tests of the cache operators: tensors with sentinels at both ends and poison
// between the vectors, and the order in which they run the threads of a CUDA grid.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "core/kv_index.hpp"
#include "core/kv_lanes.hpp"
#include "polyspec/kv_cache.hpp"

namespace kv_blocks {

using namespace polyspec;

constexpr int64_t kGuard = 64;  // bytes of sentinel at both ends
constexpr uint8_t kPoison = 0xA5;

// [n0, n1, n2, dim] with a gap after every vector (`pad` elements) and sentinels at both ends,
// 16-byte aligned.
struct Block {
  int64_t n0, n1, n2, dim;
  int32_t size;
  int64_t stride[3];
  std::vector<core::Lane16> memory;

  Block(int64_t n0, int64_t n1, int64_t n2, int64_t dim, int32_t size, int64_t pad)
      : n0(n0), n1(n1), n2(n2), dim(dim), size(size) {
    stride[2] = dim + pad;
    stride[1] = stride[2] * n2 + pad;
    stride[0] = stride[1] * n1 + pad;
    memory.resize((static_cast<size_t>(n0 * stride[0] * size) + 2 * kGuard + 15) / 16);
    std::memset(memory.data(), kPoison, memory.size() * 16);
  }
  uint8_t* data() { return reinterpret_cast<uint8_t*>(memory.data()) + kGuard; }
  uint8_t* at(int64_t a, int64_t b, int64_t c) {
    return data() + (a * stride[0] + b * stride[1] + c * stride[2]) * size;
  }
  void fill(std::mt19937_64& random) {
    for (int64_t a = 0; a < n0; ++a)
      for (int64_t b = 0; b < n1; ++b)
        for (int64_t c = 0; c < n2; ++c)
          for (int64_t i = 0; i < dim * size; ++i) at(a, b, c)[i] = static_cast<uint8_t>(random());
  }
  KvCache cache() { return {data(), {stride[0], stride[1], stride[2]}}; }
  KvSource source() { return {data(), {stride[0], stride[1], stride[2]}}; }
  bool operator==(const Block& other) const {
    return std::memcmp(memory.data(), other.memory.data(), memory.size() * 16) == 0;
  }
};

inline std::vector<int64_t> shuffled(int64_t n, std::mt19937_64& random) {
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

// Runs body(Lane{}) with the lane type that the CUDA launcher would choose, or a narrower one.
template <class Body>
void with_lane(int bytes, Body body) {
  switch (bytes) {
    case 16:
      return body(core::Lane16{});
    case 8:
      return body(uint64_t{});
    case 4:
      return body(uint32_t{});
    case 2:
      return body(uint16_t{});
    default:
      return body(uint8_t{});
  }
}

struct Shape {
  int64_t batch, heads, tokens, capacity, key_dim, value_dim;
  int32_t size;
  int64_t pad;
  bool ring;
  int64_t sinks;
};

struct AppendCase {
  Block new_keys, new_values, keys, values;
  std::vector<int64_t> lengths, counts, new_lengths;
  std::vector<int32_t> status;

  AppendCase(const Shape& s, std::mt19937_64& random)
      : new_keys(s.batch, s.heads, s.tokens, s.key_dim, s.size, s.pad),
        new_values(s.batch, s.heads, s.tokens, s.value_dim, s.size, s.pad),
        keys(s.batch, s.heads, s.capacity, s.key_dim, s.size, s.pad),
        values(s.batch, s.heads, s.capacity, s.value_dim, s.size, s.pad),
        new_lengths(s.batch, -77),
        status(s.batch, -77) {
    new_keys.fill(random);
    new_values.fill(random);
    keys.fill(random);
    values.fill(random);
    const int64_t longest = s.ring ? 3 * s.capacity : s.capacity + 2;
    for (int64_t b = 0; b < s.batch; ++b) {
      lengths.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(longest + 1)));
      counts.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(s.tokens + 1)));
    }
    if (s.batch > 3) {
      lengths[0] = -1;
      counts[1] = s.tokens + 1;
      lengths[2] =
          s.ring ? s.capacity : s.capacity - s.tokens;  // fits exactly, or starts a lap of the ring
      counts[2] = s.tokens;
      counts[3] = -1;
    }
  }
  AppendParams params(const Shape& s, bool ragged) {
    AppendParams p;
    p.in.batch = s.batch;
    p.in.heads = s.heads;
    p.in.tokens = s.tokens;
    p.in.key_dim = s.key_dim;
    p.in.value_dim = s.value_dim;
    p.in.element_size = s.size;
    p.in.keys = new_keys.source();
    p.in.values = new_values.source();
    p.in.lengths = lengths.data();
    p.in.counts = ragged ? counts.data() : nullptr;
    p.in.new_lengths = new_lengths.data();
    p.in.status = status.data();
    p.capacity = s.capacity;
    p.ring = s.ring;
    p.sinks = s.sinks;
    p.keys = keys.cache();
    p.values = values.cache();
    return p;
  }
};

}  // namespace kv_blocks
