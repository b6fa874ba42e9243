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
  return params.allowed == nullptr ? sample_request<Any>(group, params, request)
                                   : sample_request<Masked<Any>>(group, params, request);
}

void verify_one(const VerifyParams& params, int64_t request, const Executor* executor) {
  const FloatMode mode;
  Scratch scratch;
  SerialGroup group(scratch, executor);
  return params.allowed == nullptr ? verify_request<Any>(group, params, request)
                                   : verify_request<Masked<Any>>(group, params, request);
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
  return params.allowed == nullptr ? tree_of<Any>(params, request, executor)
                                   : tree_of<Masked<Any>>(params, request, executor);
}

}  // namespace
}  // namespace polyspec::POLYSPEC_CORE

namespace polyspec::cpu {

const Rows POLYSPEC_COPY(kRows) = {&POLYSPEC_CORE::sample_one, &POLYSPEC_CORE::verify_one,
                                   &POLYSPEC_CORE::tree_one, POLYSPEC_STRING(POLYSPEC_ISA)};

}  // namespace polyspec::cpu
