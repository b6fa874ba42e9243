// polyspec::verify_tree on CUDA: the kernels for all element types.
#include "cuda/launch.cuh"

namespace polyspec::cuda {
namespace {

template <class T>
Result launch_tree(VerifyTreeParams params, const Stream& stream) {
  const bool typed = params.draft_logits == nullptr || params.draft_dtype == core::kDTypeOf<T>;
  const Requests requests = requests_of(params.sampling, typed);
  if (params.rule == Rule::kBlock && requests != Requests::kGreedy)
    return launch_paths(params, requests, stream);
  const DeviceShape device = current_device();
  const int64_t rows = params.nodes + 1;
  const int forced = forced_groups.load(std::memory_order_relaxed);
  const bool chosen = forced < 0 ? tree_rows_at_once(params.batch, rows, params.depth, params.vocab,
                                                     device.multiprocessors, device.clusters)
                                 : forced > 0 && has_room(params.batch, rows);
  const bool at_once = params.workspace != nullptr && chosen;
  if (!at_once) params.workspace = nullptr;
  if (params.allowed != nullptr) {
    return result_of(launch<tree_kernel<core::Masked<T>, Requests::kAny, kResidualThreads>>(
        params.batch * (at_once ? rows : 1), kResidualThreads, params, stream));
  }
  return result_of(with_requests(requests, [&](auto kind) {
    return launch<tree_kernel<T, decltype(kind)::value, kResidualThreads>>(
        params.batch * (at_once ? rows : 1), kResidualThreads, params, stream);
  }));
}

}  // namespace

Result verify_tree(const VerifyTreeParams& params, const Stream& stream) {
  switch (params.target_dtype) {
    case DType::kFloat32:
      return launch_tree<float>(params, stream);
    case DType::kBFloat16:
      return launch_tree<core::BFloat16>(params, stream);
    case DType::kFloat16:
      return launch_tree<core::Float16>(params, stream);
  }
  return {Result::Code::kInvalidArgument, "target_dtype: expected a DType, given another number"};
}

}  // namespace polyspec::cuda
