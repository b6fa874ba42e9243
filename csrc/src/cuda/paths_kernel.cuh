// The kernel of polyspec::verify_tree by the block rule.
#pragma once

#include "core/rule_paths.hpp"
#include "cuda/kernels.cuh"

namespace polyspec::POLYSPEC_CORE {

template <class Group, class T, Requests kind>
POLYSPEC_FN uint64_t lane_mass(Group& group, const BucketWeight<T, kind>& weight, int64_t begin,
                               int64_t end) {
  if (weight.scales == nullptr) return lane_mass(group, weight.plain(), begin, end);
  uint64_t sum = 0;
  POLYSPEC_ROLLED
  for (int64_t i = begin + group.lane(); i < end; i += group.lanes()) sum += weight(i);
  return sum;
}

}  // namespace polyspec::POLYSPEC_CORE

namespace polyspec::cuda {

// A group takes a request.
template <class T, Requests kind, int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    paths_kernel(const __grid_constant__ VerifyTreeParams params) {
  POLYSPEC_SHARED(core::PathScratch, paths);  // of each CTA
  for_each_request<kThreads>(params.batch, [&](auto& group, int64_t b) {
    core::verify_paths_request<T, kind>(group, params, b, paths);
  });
}

}  // namespace polyspec::cuda
