// polyspec::append against a naive reference; and the work of a CUDA thread (kv_index.hpp), with
// threads run in shuffled order.
#include "support/check.hpp"
#include "support/kv_blocks.hpp"

namespace {

using namespace kv_blocks;

// Token by token, in order; in a ring later tokens overwrite earlier tokens.
void naive_append(const Shape& s, AppendCase& c, bool ragged) {
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t count = ragged ? c.counts[b] : s.tokens;
    const int64_t length = c.lengths[b];
    int32_t status = 0;
    if (length < 0 || count < 0 || count > s.tokens)
      status = kStatusBadLength;
    else if (!s.ring && length + count > s.capacity)
      status = kStatusCacheFull;
    c.status[b] = status;
    c.new_lengths[b] = status == 0 ? length + count : length;
    for (int64_t i = 0; status == 0 && i < count; ++i) {
      int64_t slot = length + i;
      if (s.ring && slot >= s.sinks) slot = s.sinks + (slot - s.sinks) % (s.capacity - s.sinks);
      for (int64_t h = 0; h < s.heads; ++h) {
        std::memcpy(c.keys.at(b, h, slot), c.new_keys.at(b, h, i), s.key_dim * s.size);
        std::memcpy(c.values.at(b, h, slot), c.new_values.at(b, h, i), s.value_dim * s.size);
      }
    }
  }
}

void check_same(const AppendCase& expected, const AppendCase& got) {
  CHECK(expected.keys == got.keys);
  CHECK(expected.values == got.values);
  CHECK(expected.status == got.status);
  CHECK(expected.new_lengths == got.new_lengths);
}

void test_append() {
  std::mt19937_64 random(11);
  const Shape shapes[] = {
      {6, 3, 5, 16, 8, 8, 4, 0, false, 0}, {6, 2, 4, 9, 64, 64, 2, 0, false, 0},
      {5, 1, 3, 8, 7, 5, 1, 3, false, 0},  {5, 2, 6, 11, 6, 10, 2, 1, false, 0},
      {6, 2, 5, 7, 16, 16, 1, 0, true, 0}, {7, 2, 20, 6, 8, 4, 4, 4, true, 2},
      {4, 1, 0, 4, 4, 4, 4, 0, false, 0},  {1, 1, 1, 1, 1, 1, 1, 0, true, 0},
  };
  for (const Shape& s : shapes) {
    for (const bool ragged : {true, false}) {
      for (int repeat = 0; repeat < 8; ++repeat) {
        const AppendCase start(s, random);
        AppendCase expected = start;
        naive_append(s, expected, ragged);

        AppendCase cpu = start;
        CHECK(append(cpu.params(s, ragged)).ok());
        check_same(expected, cpu);

        AppendCase widths = start;
        const AppendParams p = widths.params(s, ragged);
        const int widest = core::lane_bytes(p);
        for (int bytes = widest; bytes >= 1; bytes /= 2) {
          AppendCase gpu = start;
          const AppendParams q = gpu.params(s, ragged);
          with_lane(bytes, [&](auto lane) {
            using Lane = decltype(lane);
            const int64_t lanes = core::token_lanes<Lane>(s.key_dim, s.value_dim, s.size).all();
            const int64_t threads = std::max<int64_t>(s.tokens * lanes, 1);
            for (const int64_t i : shuffled(s.batch * s.heads * threads, random)) {
              core::append_lane<Lane>(q, i / threads / s.heads, i / threads % s.heads, i % threads);
            }
          });
          check_same(expected, gpu);
        }
      }
    }
  }
}

void test_lane_widths() {
  const Shape aligned{2, 2, 3, 8, 64, 64, 2, 0, false, 0};
  std::mt19937_64 random(1);
  AppendCase c(aligned, random);
  AppendParams p = c.params(aligned, false);
  CHECK_EQ(16, core::lane_bytes(p));
  p.in.keys.stride[2] += 1;
  CHECK_EQ(2, core::lane_bytes(p));
  p = c.params(aligned, false);
  p.values.data = static_cast<uint8_t*>(p.values.data) + 4;
  CHECK_EQ(4, core::lane_bytes(p));
  p = c.params(aligned, false);
  p.in.value_dim = 12;
  CHECK_EQ(8, core::lane_bytes(p));
  p = c.params(aligned, false);
  p.in.batch = 1;
  p.in.keys.stride[0] = 1;  // not strided over
  CHECK_EQ(16, core::lane_bytes(p));
}

void test_arguments() {
  std::mt19937_64 random(2);
  const Shape s{1, 1, 2, 4, 4, 4, 2, 0, false, 0};
  AppendCase c(s, random);
  const auto refused = [&](auto change) {
    AppendParams p = c.params(s, false);
    change(p);
    return append(p).code == Result::Code::kInvalidArgument;
  };
  CHECK(!refused([](AppendParams&) {}));
  CHECK(refused([](AppendParams& p) { p.capacity = 0; }));
  CHECK(refused([](AppendParams& p) { p.in.element_size = 3; }));
  CHECK(refused([](AppendParams& p) { p.in.heads = 0; }));
  CHECK(refused([](AppendParams& p) { p.in.batch = -1; }));
  CHECK(refused([](AppendParams& p) { p.in.value_dim = 0; }));
  CHECK(refused([](AppendParams& p) { p.sinks = 1; }));
  CHECK(refused([](AppendParams& p) { p.in.status = nullptr; }));
  CHECK(refused([](AppendParams& p) { p.keys.data = nullptr; }));
  CHECK(refused([](AppendParams& p) { p.in.new_lengths = const_cast<int64_t*>(p.in.lengths); }));
}

void test_executor() {
  std::mt19937_64 random(3);
  const Shape s{6, 3, 5, 16, 8, 8, 4, 1, false, 0};
  const AppendCase start(s, random);
  AppendCase expected = start, got = start;
  naive_append(s, expected, true);
  const Executor backwards{[](void*, int64_t n, Executor::Body body, void* context) {
                             for (int64_t i = n; i-- > 0;) body(context, i);
                           },
                           nullptr};
  CHECK(append(got.params(s, true), Stream::cpu(backwards)).ok());
  check_same(expected, got);
}

// Offsets are computed in 64 bits: past 2^32 elements and bytes.
void test_offsets_of_64_bits() {
  NewTokens in;
  in.element_size = 4;
  const int64_t stride[3] = {int64_t{1} << 31, int64_t{1} << 30, 3};
  CHECK_EQ((int64_t{1} << 33) + (int64_t{1} << 31) + 15, core::offset_of(stride, 4, 2, 5));
  const auto* at =
      core::lane_at<uint32_t>(static_cast<const void*>(nullptr), int64_t{1} << 33, 4, 1);
  CHECK_EQ((uint64_t{1} << 35) + 4, reinterpret_cast<uintptr_t>(at));
}

}  // namespace

int main() {
  test_append();
  test_lane_widths();
  test_arguments();
  test_executor();
  test_offsets_of_64_bits();
  return 0;
}
