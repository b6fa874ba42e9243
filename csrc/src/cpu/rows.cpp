// The row algorithms over the group of one, compiled for one instruction set: POLYSPEC_ISA is
// baseline, avx2 or avx512, and the build passes the matching compiler flags.
#include "cpu/rows.hpp"

#include "core/rule_paths.hpp"
#include "core/sample_request.hpp"
#include "core/verify_request.hpp"
#include "cpu/copy.hpp"
#include "cpu/float_mode.hpp"
#include "cpu/row_tasks.hpp"

namespace polyspec::POLYSPEC_CORE {
namespace {

void sample_one(const SampleParams& params, int64_t request, const Executor* executor) {
  const FloatMode mode;
  Scratch scratch;
  SerialGroup group(scratch, executor);
  switch (params.dtype) {
    case DType::kFloat32:
      return params.allowed == nullptr ? sample_request<float>(group, params, request)
                                       : sample_request<Masked<float>>(group, params, request);
    case DType::kBFloat16:
      return params.allowed == nullptr ? sample_request<BFloat16>(group, params, request)
                                       : sample_request<Masked<BFloat16>>(group, params, request);
    case DType::kFloat16:
      return params.allowed == nullptr ? sample_request<Float16>(group, params, request)
                                       : sample_request<Masked<Float16>>(group, params, request);
  }
}

void verify_one(const VerifyParams& params, int64_t request, const Executor* executor) {
  const FloatMode mode;
  Scratch scratch;
  SerialGroup group(scratch, executor);
  switch (params.target_dtype) {
    case DType::kFloat32:
      return params.allowed == nullptr ? verify_request<float>(group, params, request)
                                       : verify_request<Masked<float>>(group, params, request);
    case DType::kBFloat16:
      return params.allowed == nullptr ? verify_request<BFloat16>(group, params, request)
                                       : verify_request<Masked<BFloat16>>(group, params, request);
    case DType::kFloat16:
      return params.allowed == nullptr ? verify_request<Float16>(group, params, request)
                                       : verify_request<Masked<Float16>>(group, params, request);
  }
}

template <class T>
void tree_of(const VerifyTreeParams& params, int64_t request, const Executor* executor) {
  Scratch scratch;
  SerialGroup group(scratch, executor);
  if (params.rule == Rule::kToken) return verify_tree_request<T>(group, params, request);
  PathScratch paths;
  verify_paths_request<T>(group, params, request, paths);
}

void tree_one(const VerifyTreeParams& params, int64_t request, const Executor* executor) {
  const FloatMode mode;
  switch (params.target_dtype) {
    case DType::kFloat32:
      return params.allowed == nullptr ? tree_of<float>(params, request, executor)
                                       : tree_of<Masked<float>>(params, request, executor);
    case DType::kBFloat16:
      return params.allowed == nullptr ? tree_of<BFloat16>(params, request, executor)
                                       : tree_of<Masked<BFloat16>>(params, request, executor);
    case DType::kFloat16:
      return params.allowed == nullptr ? tree_of<Float16>(params, request, executor)
                                       : tree_of<Masked<Float16>>(params, request, executor);
  }
}

}  // namespace
}  // namespace polyspec::POLYSPEC_CORE

namespace polyspec::cpu {

const Rows POLYSPEC_COPY(kRows) = {&POLYSPEC_CORE::sample_one, &POLYSPEC_CORE::verify_one,
                                   &POLYSPEC_CORE::tree_one, POLYSPEC_STRING(POLYSPEC_ISA)};

}  // namespace polyspec::cpu
