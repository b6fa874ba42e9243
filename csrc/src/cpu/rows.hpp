// The CPU backend's entry points, one set per instruction set (rows.cpp is compiled once for each).
#pragma once

#include "cpu/isa.hpp"
#include "polyspec/verify_tree.hpp"

namespace polyspec::cpu {

struct Rows {
  // One request of a batch; the rows are spread over the executor's threads, or not if it is null.
  void (*sample_request)(const SampleParams& params, int64_t request, const Executor* executor);
  void (*verify_request)(const VerifyParams& params, int64_t request, const Executor* executor);
  void (*tree_request)(const VerifyTreeParams& params, int64_t request, const Executor* executor);
  const char* isa;
};

extern const Rows kRowsBaseline, kRowsAvx2, kRowsAvx512;
constexpr Copy<Rows> kRowsCopies[] = {
    {Isa::kBaseline, &kRowsBaseline},
#ifdef POLYSPEC_X86
    {Isa::kAvx2, &kRowsAvx2},
    {Isa::kAvx512, &kRowsAvx512},
#endif
};

}  // namespace polyspec::cpu
