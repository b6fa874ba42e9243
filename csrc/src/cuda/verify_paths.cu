// The block rule of polyspec::verify_tree on CUDA: the kernels for all element types. Rows depend on
// those above them, so that a group walks and a workspace is of no use.
#include "core/rule_paths.hpp"
#include "cuda/launch.cuh"

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
namespace {

// A group takes a request.
template <class T, Requests kind, int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    paths_kernel(const __grid_constant__ VerifyTreeParams params) {
  POLYSPEC_SHARED(core::PathScratch, paths);  // of each CTA
  for_each_request<kThreads>(params.batch, [&](auto& group, int64_t b) {
    core::verify_paths_request<T, kind>(group, params, b, paths);
  });
}

template <class T, Requests kind>
cudaError_t launch_kind(const VerifyTreeParams& params, const Stream& stream) {
  return launch<paths_kernel<T, kind, kResidualThreads>>(params.batch, kResidualThreads, params,
                                                         stream);
}

template <class T>
cudaError_t launch_type(const VerifyTreeParams& params, Requests requests, const Stream& stream) {
  if (params.allowed != nullptr)
    return launch_kind<core::Masked<T>, Requests::kAny>(params, stream);
  return requests == Requests::kUnfiltered ? launch_kind<T, Requests::kUnfiltered>(params, stream)
                                           : launch_kind<T, Requests::kAny>(params, stream);
}

}  // namespace

Result launch_paths(const VerifyTreeParams& params, Requests requests, const Stream& stream) {
  switch (params.target_dtype) {
    case DType::kFloat32:
      return result_of(launch_type<float>(params, requests, stream));
    case DType::kBFloat16:
      return result_of(launch_type<core::BFloat16>(params, requests, stream));
    default:
      return result_of(launch_type<core::Float16>(params, requests, stream));
  }
}

}  // namespace polyspec::cuda
