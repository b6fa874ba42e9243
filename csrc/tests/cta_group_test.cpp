// The CUDA backend's thread group, its real source, on fibres: warp shuffles and __syncthreads are
// stood in for by meetings of fibres. What this cannot show is what the hardware does;
// cuda_test.cpp does where there is a GPU.
#define POLYSPEC_DETAIL detail_cta
#define POLYSPEC_FN inline

#include <cstdlib>
#include <cstring>

#include "fibre/compare.hpp"

#define __device__
#define __forceinline__ inline

namespace {

fibre::Machine* machine = nullptr;

struct {
  struct {
    operator unsigned() const { return static_cast<unsigned>(machine->current()); }
  } x;
} threadIdx;

template <class T>
const std::vector<uint64_t>& of_the_warp(const char* name, unsigned mask, T value) {
  CHECK_EQ(0xffffffffu, mask);
  return machine->meet_team(machine->current(), name, static_cast<uint64_t>(value));
}
template <class T>
T __shfl_sync(unsigned mask, T value, int from) {
  return static_cast<T>(of_the_warp("__shfl_sync", mask, value)[static_cast<size_t>(from)]);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int step) {
  const size_t lane = static_cast<size_t>(machine->current() % machine->lanes());
  return static_cast<T>(
      of_the_warp("__shfl_xor_sync", mask, value)[lane ^ static_cast<size_t>(step)]);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int step) {
  const int lane = machine->current() % machine->lanes();
  return static_cast<T>(of_the_warp("__shfl_up_sync", mask,
                                    value)[static_cast<size_t>(lane < step ? lane : lane - step)]);
}
void __syncthreads() { machine->meet_group(machine->current(), "__syncthreads", 0); }
void atomicAdd(unsigned long long* at, unsigned long long value) {
  machine->pause();
  *at += value;
}

}  // namespace

#include "cuda/cta_group.cuh"

namespace {

using namespace polyspec::detail_cta;

template <class Case, int threads>
void test(uint64_t seed, const std::string& kind) {
  const Expected<Case> expected(seed, 0, kind);
  for (const fibre::Order order : fibre::kOrders) {
    fibre::Machine warps(threads, kWarp, order, seed);
    machine = &warps;
    static CtaShared<threads> shared;
    std::memset(&shared, 0xa5, sizeof shared);
    expected.check(warps, [&](int) { return CtaGroup<threads>(shared); });
  }
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 60;
  for (uint64_t seed = 0; seed < count; ++seed) {
    test<cases::SampleCase, 32>(seed, "sample");
    test<cases::VerifyCase, 96>(seed, "verify");
  }
  test<cases::VerifyCase, 384>(0, "verify");
  test<cases::SampleCase, 512>(1, "sample");
  return 0;
}
