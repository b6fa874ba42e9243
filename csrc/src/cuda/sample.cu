// polyspec::sample on CUDA: the kernels for all element types.
#include "cuda/launch.cuh"

namespace polyspec::cuda {
namespace {

template <class T>
Result launch_sample(const SampleParams& params, const Stream& stream) {
  if (params.allowed != nullptr) {
    return result_of(launch<sample_kernel<core::Masked<T>, Requests::kAny, kSampleThreads>>(
        params.batch, kSampleThreads, params, stream));
  }
  return result_of(with_requests(requests_of(params.sampling, true), [&](auto requests) {
    return launch<sample_kernel<T, decltype(requests)::value, kSampleThreads>>(
        params.batch, kSampleThreads, params, stream);
  }));
}

}  // namespace

Result sample(const SampleParams& params, const Stream& stream) {
  switch (params.dtype) {
    case DType::kFloat32:
      return launch_sample<float>(params, stream);
    case DType::kBFloat16:
      return launch_sample<core::BFloat16>(params, stream);
    case DType::kFloat16:
      return launch_sample<core::Float16>(params, stream);
  }
  return {Result::Code::kInvalidArgument, "dtype: expected a DType, given another number"};
}

}  // namespace polyspec::cuda
