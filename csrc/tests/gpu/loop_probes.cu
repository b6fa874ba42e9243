// The loops over a row's logits, each in a separate kernel. Nothing runs them:
// python_tests/ops/test_code_budget.py compiles and disassembles them.
#include "cuda/kernels.cuh"

namespace polyspec::cuda {
namespace {

constexpr int kThreads = kVerifyThreads;
using Logits = core::Row<core::BFloat16>;

}  // namespace

__global__ void maximum(Logits row, int32_t* out) {
  POLYSPEC_SHARED(core::CtaShared<kThreads>, shared);
  core::CtaGroup<kThreads> group(shared);
  out[threadIdx.x] = core::largest_order(group, row);
}

__global__ void mass(core::TokenMass<Logits> weight, int64_t begin, int64_t end, uint64_t* out) {
  POLYSPEC_SHARED(core::CtaShared<kThreads>, shared);
  core::CtaGroup<kThreads> group(shared);
  out[threadIdx.x] = core::lane_mass(group, weight, begin, end);
}

__global__ void candidates(Logits row, float bound) {
  POLYSPEC_SHARED(core::CtaShared<kThreads>, shared);
  core::CtaGroup<kThreads> group(shared);
  core::collect(row, core::worker_of(group), bound, &group.candidates());
}

__global__ void residual(const __grid_constant__ core::ResidualWeight<core::BFloat16> weight,
                         int64_t begin, int64_t end, uint64_t* out) {
  const int lane = static_cast<int>(threadIdx.x) % core::kWarp;
  out[threadIdx.x] = core::both_masses(weight, begin, end, lane, core::kWarp);
}

__global__ void count_digit(Logits row, core::Digit digit) {
  POLYSPEC_SHARED(core::CtaShared<kThreads>, shared);
  core::CtaGroup<kThreads> group(shared);
  core::count_digit(group, row, core::One{}, digit);
}

__global__ void mass_digit(core::TokenMass<Logits> weight, core::Digit digit) {
  POLYSPEC_SHARED(core::CtaShared<kThreads>, shared);
  core::CtaGroup<kThreads> group(shared);
  core::count_digit(group, weight.row, weight, digit);
}

}  // namespace polyspec::cuda
