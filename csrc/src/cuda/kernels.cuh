// The kernels of polyspec::sample and polyspec::verify.
//
// One group works on one request: it walks the rows of its block and stops at the first rejection,
// so later rows are not read. The group is a CTA before sm_90; later it is a cluster of one or more
// CTAs, as launched, over which each row is spread. Everything happens in one launch: no workspace,
// nothing to clear, no value read on the host, so a launch can be captured in a CUDA graph.
// Parameters travel by value; the memory that they point to is read when the kernel runs.
#pragma once

#include <cstdint>

#include "core/sample_request.hpp"
#include "core/verify_request.hpp"
#include "cuda/candidates.cuh"
#include "cuda/cta_group.cuh"
#include "cuda/last_block.cuh"
#include "cuda/launch_shape.hpp"
#include "cuda/row_reader.cuh"
#include "cuda/row_tickets.cuh"
#include "cuda/runtime.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#include "cuda/cluster_group.cuh"
namespace polyspec::cuda {
template <int kThreads>
using Shared = core::ClusterShared<kThreads>;
template <int kThreads>
using Group = core::ClusterGroup<kThreads>;
}  // namespace polyspec::cuda
#else
namespace polyspec::cuda {
template <int kThreads>
using Shared = core::CtaShared<kThreads>;
template <int kThreads>
using Group = core::CtaGroup<kThreads>;
}  // namespace polyspec::cuda
#endif

namespace polyspec::cuda {

// A group takes one request, or in a large batch one after the other.
template <int kThreads, class Run>
__device__ __forceinline__ void for_each_request(int64_t batch, const Run& run) {
  POLYSPEC_SHARED(Shared<kThreads>, shared);
  Group<kThreads> group(shared);
  group.sync();  // the other CTAs of a cluster have begun: their shared memory is there
  wait_for_prerequisites();
  const int64_t groups = gridDim.x / group.ctas();
  for (int64_t b = blockIdx.x / group.ctas(); b < batch; b += groups) run(group, b);
  group.sync();  // no CTA leaves while another may reach into its shared memory
}

// Masked rows have one kernel for both rules.
template <class T, Rule rule>
using RulesFor = std::conditional_t<core::kIsMasked<T>, core::RuleOfCall, core::OneRule<rule>>;

// T is the element type of the (target's) logits. __grid_constant__ lets the row algorithms hold
// references to the parameters without a copy of them in every thread's local memory.
template <class T, Requests kind, int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    sample_kernel(const __grid_constant__ SampleParams params) {
  for_each_request<kThreads>(params.batch, [&](auto& group, int64_t b) {
    core::sample_request<T, kind>(group, params, b);
  });
}
template <class T, Rule rule, Requests kind, int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    verify_kernel(const __grid_constant__ VerifyParams params) {
  for_each_request<kThreads>(params.batch, [&](auto& group, int64_t b) {
    core::verify_request<T, kind, RulesFor<T, rule>>(group, params, b);
  });
}

// A workspace: tickets, then the record of each row.
template <class Tickets, class Record>
struct Workspace {
  static_assert(sizeof(Tickets) <= kTicketBytes, "the workspace has room for the tickets");
  static_assert(kTicketBytes + kMostRecords * sizeof(Record) <= kVerifyWorkspaceBytes,
                "the workspace has room for the records");
  Tickets* tickets;
  Record* records;

  __device__ __forceinline__ explicit Workspace(void* memory)
      : tickets(static_cast<Tickets*>(memory)),
        records(reinterpret_cast<Record*>(static_cast<char*>(memory) + kTicketBytes)) {}
};

// Groups that take rows; the group that completes a block verifies it.
template <class T, Rule rule, Requests kind, int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    rows_kernel(const __grid_constant__ VerifyParams params) {
  POLYSPEC_SHARED(Shared<kThreads>, shared);
  Group<kThreads> group(shared);
  wait_for_prerequisites();
  group.sync();
  const Workspace<core::RowTickets, core::RowRecord> workspace(params.workspace);
  core::verify_rows<T, kind, RulesFor<T, rule>>(group, params, blockIdx.x / group.ctas(),
                                                gridDim.x / group.ctas(), workspace.tickets,
                                                workspace.records);
  group.sync();
}

// A group per request, or with a workspace one per row.
template <class T, Requests kind, int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    tree_kernel(const __grid_constant__ VerifyTreeParams params) {
  POLYSPEC_SHARED(Shared<kThreads>, shared);
  Group<kThreads> group(shared);
  wait_for_prerequisites();
  group.sync();
  const bool at_once = params.workspace != nullptr;
  const int64_t rows = at_once ? params.nodes + 1 : 1;  // with one group each
  const int64_t groups = gridDim.x / group.ctas();
  const Workspace<unsigned[kMostRecords], core::Step> workspace(params.workspace);
  for (int64_t row = blockIdx.x / group.ctas(); row < params.batch * rows; row += groups) {
    const int64_t request = row / rows;
    core::walk_tree<T, kind>(group, params, request, row - request * rows,
                             at_once ? workspace.records + request * rows : nullptr,
                             *workspace.tickets + request);
  }
  group.sync();
}

}  // namespace polyspec::cuda
