// The cache operators on CUDA, each one launch. The work of a thread is written in kv_index.hpp and
// kv_pages.hpp, where the CPU tests reach it; here is only how threads are laid over rows, heads
// and lanes.
//
// These kernels move a few kilobytes and are bound by latency: CTAs are small, so that even one row
// of one layer spreads over several multiprocessors, and a thread moves as many bytes at once as
// the addresses allow.
#include "core/kv_index.hpp"
#include "core/kv_lanes.hpp"
#include "core/kv_pages.hpp"
#include "cuda/cta_group.cuh"
#include "cuda/kv_cache.hpp"
#include "cuda/runtime.cuh"

namespace polyspec::cuda {
namespace {

using core::Lane16;

constexpr int kLaneThreads = 128;
constexpr int kPageThreads = 256;  // rows per round; a batch is seldom larger
constexpr int64_t kMaxX = 0x7fffffff;
constexpr int64_t kMaxYZ = 65535;

// Grid: x over the lanes of all tokens, y over heads, z over rows. Grids too large for the hardware
// go in strides.
template <class Lane>
__global__ void __launch_bounds__(kLaneThreads)
    append_kernel(const __grid_constant__ AppendParams p, int64_t threads) {
  begin_kernel();
  for (int64_t row = blockIdx.z; row < p.in.batch; row += gridDim.z)
    for (int64_t head = blockIdx.y; head < p.in.heads; head += gridDim.y)
      for (int64_t x = blockIdx.x * int64_t{kLaneThreads} + threadIdx.x; x < threads;
           x += gridDim.x * int64_t{kLaneThreads}) {
        core::append_lane<Lane>(p, row, head, x);
      }
}

template <class Lane>
__global__ void __launch_bounds__(kLaneThreads)
    append_paged_kernel(const __grid_constant__ PagedAppendParams p, int64_t threads) {
  begin_kernel();
  for (int64_t row = blockIdx.z; row < p.in.batch; row += gridDim.z)
    for (int64_t head = blockIdx.y; head < p.in.heads; head += gridDim.y)
      for (int64_t x = blockIdx.x * int64_t{kLaneThreads} + threadIdx.x; x < threads;
           x += gridDim.x * int64_t{kLaneThreads}) {
        core::append_paged_lane<Lane>(p, row, head, x);
      }
}

// Grid: x over the lanes of all heads, y over rows, z over layers.
template <class Lane>
__global__ void __launch_bounds__(kLaneThreads)
    compact_kernel(const __grid_constant__ CompactTreeParams p, int32_t lanes, int64_t threads) {
  begin_kernel();
  for (int64_t layer = blockIdx.z; layer < p.layers; layer += gridDim.z)
    for (int64_t row = blockIdx.y; row < p.batch; row += gridDim.y)
      for (int64_t x = blockIdx.x * int64_t{kLaneThreads} + threadIdx.x; x < threads;
           x += gridDim.x * int64_t{kLaneThreads}) {
        const int64_t head = x / lanes;
        core::compact_lane<Lane>(p, layer, row, head, static_cast<int32_t>(x - head * lanes));
      }
}

// Grid: x over the lanes of all rows, y over batch rows.
template <class Lane>
__global__ void __launch_bounds__(kLaneThreads)
    row_copy_kernel(const __grid_constant__ CopyRowsParams p, int64_t threads) {
  begin_kernel();
  for (int64_t row = blockIdx.y; row < p.batch; row += gridDim.y)
    for (int64_t x = blockIdx.x * int64_t{kLaneThreads} + threadIdx.x; x < threads;
         x += gridDim.x * int64_t{kLaneThreads}) {
      core::copy_rows_lane<Lane>(p, row, x);
    }
}

template <bool kReserve>
__global__ void __launch_bounds__(kPageThreads)
    pages_kernel(const __grid_constant__ PagesParams p) {
  begin_kernel();
  POLYSPEC_SHARED(core::CtaShared<kPageThreads>, shared);
  core::CtaGroup<kPageThreads> group(shared);
  core::move_pages<kReserve>(group, p);
}

__global__ void __launch_bounds__(kLaneThreads)
    lengths_kernel(const __grid_constant__ LengthsParams p) {
  begin_kernel();
  for (int64_t row = blockIdx.x * int64_t{kLaneThreads} + threadIdx.x; row < p.batch;
       row += gridDim.x * int64_t{kLaneThreads}) {
    core::update_length(p, row);
  }
}

unsigned clamped(int64_t n, int64_t limit) {
  return static_cast<unsigned>(n < 1 ? 1 : n < limit ? n : limit);
}

dim3 grid_of(int64_t threads, int64_t y, int64_t z) {
  return dim3(clamped((threads + kLaneThreads - 1) / kLaneThreads, kMaxX), clamped(y, kMaxYZ),
              clamped(z, kMaxYZ));
}

template <class... Params, class... Args>
Result launch(void (*kernel)(Params...), dim3 grid, int threads, cudaStream_t stream,
              const Args&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  return result_of(launch_kernel(kernel, config, args...));
}

// Calls run(lane) with a lane of the type that all addresses of a call allow.
template <class Params, class Run>
Result by_lane(const Params& params, const Run& run) {
  switch (core::lane_bytes(params)) {
    case 16:
      return run(Lane16{});
    case 8:
      return run(uint64_t{});
    case 4:
      return run(uint32_t{});
    case 2:
      return run(uint16_t{});
    default:
      return run(uint8_t{});
  }
}

// Lanes of the new tokens of a row and head. Without new tokens one thread still writes the row's
// status.
template <class Lane>
int64_t threads_of(const NewTokens& in) {
  const auto lanes = core::token_lanes<Lane>(in.key_dim, in.value_dim, in.element_size);
  return in.tokens > 0 ? in.tokens * lanes.all() : 1;
}

}  // namespace

Result append(const AppendParams& params, CUstream_st* stream) {
  return by_lane(params, [&](auto lane) {
    using Lane = decltype(lane);
    const int64_t threads = threads_of<Lane>(params.in);
    return launch(append_kernel<Lane>, grid_of(threads, params.in.heads, params.in.batch),
                  kLaneThreads, stream, params, threads);
  });
}

Result append_paged(const PagedAppendParams& params, CUstream_st* stream) {
  return by_lane(params, [&](auto lane) {
    using Lane = decltype(lane);
    const int64_t threads = threads_of<Lane>(params.in);
    return launch(append_paged_kernel<Lane>, grid_of(threads, params.in.heads, params.in.batch),
                  kLaneThreads, stream, params, threads);
  });
}

Result compact_tree(const CompactTreeParams& params, CUstream_st* stream) {
  return by_lane(params, [&](auto lane) {
    using Lane = decltype(lane);
    const int32_t lanes =
        core::token_lanes<Lane>(params.key_dim, params.value_dim, params.element_size).all();
    const int64_t threads = params.heads * lanes;
    return launch(compact_kernel<Lane>, grid_of(threads, params.batch, params.layers), kLaneThreads,
                  stream, params, lanes, threads);
  });
}

Result copy_rows(const CopyRowsParams& params, CUstream_st* stream) {
  return by_lane(params, [&](auto lane) {
    using Lane = decltype(lane);
    // Without rows one thread still moves the window.
    const int64_t lanes = params.bytes / static_cast<int64_t>(sizeof(Lane));
    const int64_t threads = params.width > 0 ? params.width * lanes : 1;
    return launch(row_copy_kernel<Lane>, grid_of(threads, params.batch, 1), kLaneThreads, stream,
                  params, threads);
  });
}

Result update_lengths(const LengthsParams& params, CUstream_st* stream) {
  return launch(lengths_kernel, grid_of(params.batch, 1, 1), kLaneThreads, stream, params);
}

Result reserve_pages(const PagesParams& params, CUstream_st* stream) {
  return launch(pages_kernel<true>, dim3(1), kPageThreads, stream, params);
}

Result truncate_pages(const PagesParams& params, CUstream_st* stream) {
  return launch(pages_kernel<false>, dim3(1), kPageThreads, stream, params);
}

}  // namespace polyspec::cuda
