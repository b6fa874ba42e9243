// The CUDA backend's thread groups, their real sources, on fibres: one CTA, and clusters of
// several, with meetings of fibres for shuffles and barriers. What this cannot show is what the
// hardware does; cuda_test.cpp does where there is a GPU.
#define POLYSPEC_CORE core_cta
#define POLYSPEC_FN inline

#include <cstdlib>
#include <cstring>

#include "cuda_on_cpu/fibre/compare.hpp"
#include "cuda_on_cpu/fibre/cuda_stand_in.hpp"
// Behind the stand-ins for what they use. clang-format off
#include "cuda/cluster_group.cuh"
#include "cuda/launch_shape.hpp"
#include "cuda/row_reader.cuh"
// clang-format on

namespace {

using namespace polyspec::core_cta;

// Every element is visited once, with its value, wherever the range begins and ends.
template <class T>
void test_visit() {
  alignas(16) T data[160];
  for (int i = 0; i < 160; ++i) {
    if constexpr (sizeof(T) == 4) data[i] = static_cast<float>(i);
    if constexpr (sizeof(T) == 2) data[i] = T{cases::bfloat16_bits(static_cast<float>(i))};
  }
  for (int shift = 0; shift < 9; ++shift) {
    const Row<T> row{data + shift, 150};
    for (const int workers : {1, 3, 32}) {
      for (int64_t begin = 0; begin < 12; ++begin) {
        for (const int64_t end :
             {begin, begin + 1, begin + 7, begin + 9, begin + 33, begin + 137}) {
          int seen[150] = {};
          for (int worker = 0; worker < workers; ++worker) {
            visit<4>(row, begin, end, worker, workers, [&](int64_t i, float z) {
              ++seen[i];
              CHECK_EQ(to_float(row.data[i]), z);
            });
          }
          for (int64_t i = 0; i < 150; ++i) CHECK_EQ(i >= begin && i < end ? 1 : 0, seen[i]);
        }
      }
    }
  }
}

// 64-bit adds made of halves: every carry arrives, whoever comes first.
void test_add() {
  for (const fibre::Order order : fibre::kOrders) {
    fibre::Machine warp(kWarp, kWarp, order, 7);
    stand_in::machine = &warp;
    uint64_t bin = 0, expected = 0;
    std::vector<uint64_t> values(50 * kWarp);
    cases::Random random(3);
    for (uint64_t& value : values) expected += value = random.bits() >> (8 + random.below(50));
    warp.run([&](int rank) {
      for (size_t i = 0; i < 50; ++i)
        CtaGroup<kWarp>::add(&bin, values[i * kWarp + static_cast<size_t>(rank)]);
    });
    CHECK_EQ(expected, bin);
  }
}

void test_launch_shape() {
  using polyspec::cuda::ctas_per_group;
  CHECK_EQ(8, ctas_per_group(1, 128256, 132));
  CHECK_EQ(8, ctas_per_group(16, 128256, 132));
  CHECK_EQ(4, ctas_per_group(17, 128256, 132));
  CHECK_EQ(2, ctas_per_group(66, 128256, 132));
  CHECK_EQ(1, ctas_per_group(67, 128256, 132));
  CHECK_EQ(1, ctas_per_group(1, 8191, 132));
  CHECK_EQ(2, ctas_per_group(1, 8192, 132));
  CHECK_EQ(1, ctas_per_group(1, 128256, 0));  // a device that could not be asked
  CHECK_EQ(1, ctas_per_group(int64_t{1} << 40, 128256, 132));
  using polyspec::cuda::rows_at_once;
  CHECK(rows_at_once(1, 11, 128256, 132, true));
  CHECK(rows_at_once(3, 11, 128256, 132, true));
  CHECK(!rows_at_once(4, 11, 128256, 132, true));
  CHECK(rows_at_once(9, 11, 128256, 108, false));
  CHECK(!rows_at_once(10, 11, 128256, 108, false));
  CHECK(!rows_at_once(1, 1, 128256, 132, true));
  CHECK(!rows_at_once(1, 11, 8191, 132, true));
  CHECK(!rows_at_once(1, 1025, 128256, 9999, true));
  CHECK(!rows_at_once(int64_t{1} << 40, 11, 128256, 9999, true));
}

template <class Case, int threads>
void test_cta(uint64_t seed, const std::string& kind) {
  const Expected<Case> expected(seed, 0, kind);
  for (const fibre::Order order : fibre::kOrders) {
    fibre::Machine warps(threads, kWarp, order, seed);
    stand_in::machine = &warps;
    static CtaShared<threads> shared;
    std::memset(&shared, 0xa5, sizeof shared);
    expected.check(warps, [&](int) { return CtaGroup<threads>(shared); });
  }
}

template <class Case, int threads>
void test_cluster(uint64_t seed, int ctas, const std::string& kind) {
  const Expected<Case> expected(seed, 0, kind);
  for (const fibre::Order order : fibre::kOrders) {
    fibre::Machine cluster(threads * ctas, kWarp, order, seed, threads);
    static ClusterShared<threads> shared[kMaxCluster];
    stand_in::machine = &cluster;
    stand_in::shared_memory = reinterpret_cast<unsigned char*>(shared);
    stand_in::shared_size = sizeof shared[0];
    std::memset(shared, 0xa5, sizeof shared);
    expected.check(cluster,
                   [&](int rank) { return ClusterGroup<threads>(shared[rank / threads]); });
  }
}

}  // namespace

int main(int argc, char** argv) {
  test_visit<float>();
  test_visit<BFloat16>();
  test_add();
  test_launch_shape();
  const uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 60;
  for (uint64_t seed = 0; seed < count; ++seed) {
    test_cta<cases::SampleCase, 32>(seed, "sample");
    test_cta<cases::VerifyCase, 96>(seed, "verify");
    test_cta<cases::IndexedVerifyCase, 64>(seed, "indexed verify");
    test_cluster<cases::SampleCase, 64>(seed, 2, "sample");
    test_cta<cases::TreeCase, 64>(seed, "verify_tree");
    test_cluster<cases::TreeCase, 32>(seed, 2, "verify_tree");
    test_cta<cases::IndexedTreeCase, 64>(seed, "indexed verify_tree");
    test_cluster<cases::VerifyCase, 32>(seed, 1 << (seed % 4), "verify");
  }
  test_cta<cases::VerifyCase, 384>(0, "verify");
  test_cta<cases::SampleCase, 512>(1, "sample");
  test_cluster<cases::VerifyCase, 384>(2, 2, "verify");
  return 0;
}
