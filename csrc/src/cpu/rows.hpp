// The CPU backend's entry points, one set per instruction set (rows.cpp is compiled once for each).
#pragma once

#include "polyspec/verify_tree.hpp"

namespace polyspec::cpu {

struct Rows {
  // One request of a batch; the rows are spread over the executor's threads, or not if it is null.
  void (*sample_request)(const SampleParams& params, int64_t request, const Executor* executor);
  void (*verify_request)(const VerifyParams& params, int64_t request, const Executor* executor);
  void (*tree_request)(const VerifyTreeParams& params, int64_t request, const Executor* executor);
  const char* isa;
};

extern const Rows kRowsBaseline;
#ifdef POLYSPEC_X86
extern const Rows kRowsAvx2;
extern const Rows kRowsAvx512;
#endif

}  // namespace polyspec::cpu
