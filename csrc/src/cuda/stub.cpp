// Replaces the CUDA backend in a build without it.
#include "cuda/attention.hpp"
#include "cuda/capture.hpp"
#include "cuda/dense.hpp"
#include "cuda/int4.hpp"
#include "cuda/kv_cache.hpp"
#include "cuda/launch.hpp"
#include "cuda/layer.hpp"
#include "cuda/round_state.hpp"

namespace polyspec::cuda {

static Result unsupported() {
  return {Result::Code::kUnsupported,
          "this build of polyspec has no CUDA kernels; configure with POLYSPEC_CUDA=ON"};
}

Result sample(const SampleParams&, const Stream&) { return unsupported(); }
Result verify(const VerifyParams&, const Stream&) { return unsupported(); }
Result verify_tree(const VerifyTreeParams&, const Stream&) { return unsupported(); }
Result append(const AppendParams&, CUstream_st*) { return unsupported(); }
Result append_paged(const PagedAppendParams&, CUstream_st*) { return unsupported(); }
Result reserve_pages(const PagesParams&, CUstream_st*) { return unsupported(); }
Result truncate_pages(const PagesParams&, CUstream_st*) { return unsupported(); }
Result update_lengths(const LengthsParams&, CUstream_st*) { return unsupported(); }
Result copy_rows(const CopyRowsParams&, CUstream_st*) { return unsupported(); }
Result compact_tree(const CompactTreeParams&, CUstream_st*) { return unsupported(); }
Result rms_norm(const RmsNormParams&, CUstream_st*) { return unsupported(); }
Result rotary(const RotaryParams&, CUstream_st*) { return unsupported(); }
Result rotary_append(const RotaryAppendParams&, CUstream_st*) { return unsupported(); }
Result gated(const GatedParams&, CUstream_st*) { return unsupported(); }
Result dense_product(const DenseProductParams&, CUstream_st*) { return unsupported(); }
Result int4_pack(const Int4PackParams&, CUstream_st*) { return unsupported(); }
Result int4_product(const Int4Product&, CUstream_st*) { return unsupported(); }
Result attention(const AttentionParams&, CUstream_st*) { return unsupported(); }
Result schedule_due(const ScheduleDueParams&, CUstream_st*) { return unsupported(); }
Result schedule_next(const ScheduleNextParams&, CUstream_st*) { return unsupported(); }
Result schedule_report(const ScheduleReportParams&, CUstream_st*) { return unsupported(); }
bool available() { return false; }
void force_shape(int, int, int) {}
std::vector<ActiveClusters> active_clusters() { return {}; }
Result clear(void*, int64_t, const Stream&) { return unsupported(); }
bool is_capturing(const Stream&) { return false; }
Result when_graph_goes(const Stream&, void (*)(void*), void*) { return unsupported(); }

}  // namespace polyspec::cuda
