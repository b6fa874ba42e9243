// The product of up to 16 tokens with bfloat16 weights as torch has them, on devices with bulk
// copies and clusters.
//
// As the streamed 4-bit product (int4_stream.cuh): a CTA for each multiprocessor, or a cluster of
// CTAs, takes tiles of outputs one after the other, here of 16. Its warps have a slice of the
// inputs each; in a cluster of n CTAs each has 8 / n slices, of n tiles at the same time. A warp's
// ring of weights goes on to the next tile before this one is summed. A lane copies a piece of a
// row into each stage. The activations of the CTA's slices lie in shared memory once.
//
// A row of y is summed in this order, with any other rows in the call: inputs of a slice in
// ascending chunks, then the slices, 0 to 3 each after the slice four above was added to it.
#include "core/convert.hpp"
#include "cuda/bulk_copy.cuh"
#include "cuda/dense.hpp"
#include "cuda/int4_math.cuh"
#include "cuda/launch.cuh"

namespace polyspec::cuda {
namespace {

constexpr int kRows = static_cast<int>(kDenseOutputs);  // of a tile
static_assert(kDenseSlices == kWarps && kDenseChunk == kTileInputs, "as of 4-bit weights");

// After it lie the activations, then the rings.
template <int kTokenTiles>
struct DenseShared {
  using Sum = float[kWarp][4];
  Sum sums[2][kWarps][kTokenTiles];
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// A warp's ring of stages, in the order of its products: pieces of the rows of a tile, tile after
// tile. Each of the first 16 lanes copies a row. A row's barrier lies in its padding.
class RowRing {
 public:
  // Before `next` comes a barrier of the CTA. `slice`: bytes of each row from `from` on.
  __device__ __forceinline__ RowRing(unsigned char* ring, int stages, const unsigned char* from,
                                     int64_t row_bytes, int64_t outputs, int slice, int tile,
                                     int step, int tiles)
      : ring_(ring),
        weights_(from),
        row_bytes_(row_bytes),
        outputs_(outputs),
        end_(stages * kDenseStageBytes),
        slice_(slice),
        step_(step),
        tiles_(lane() < kRows && slice > 0 ? tiles : 0),
        tile_(tile) {
    if (lane() < kRows) {
      POLYSPEC_ROLLED
      for (int at = 0; at < end_; at += kDenseStageBytes) make_barrier(barrier_of(at, lane()));
      begin_barriers();
    }
    begin_tile();
    POLYSPEC_ROLLED
    for (int at = 0; at < end_; at += kDenseStageBytes) load(at);
  }

  // The lane's vector of the first chunk of the next stage, when its two rows are there.
  __device__ __forceinline__ const unsigned char* next() {
    wait_for_phase(barrier_of(at_, lane() / 4), parity_);
    wait_for_phase(barrier_of(at_, lane() / 4 + kRows / 2), parity_);
    return ring_ + at_ + lane() / 4 * kDenseRowPitch + lane() % 4 * core::kVectorBytes;
  }
  // Its memory is for the pieces that come `stages` later.
  __device__ __forceinline__ void release() {
    __syncwarp();  // all lanes have read the rows
    load(at_);
    at_ += kDenseStageBytes;
    if (at_ == end_) {
      at_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ __forceinline__ CopyBarrier* barrier_of(int at, int row) const {
    return reinterpret_cast<CopyBarrier*>(ring_ + at + row * kDenseRowPitch + kDenseRowBytes);
  }
  __device__ __forceinline__ void begin_tile() {  // beyond the last row the last one again
    const int64_t row = int64_t{tile_} * kRows + lane();
    from_ = weights_ + (row < outputs_ ? row : outputs_ - 1) * row_bytes_;
    left_ = slice_;
  }
  __device__ __forceinline__ void load(int at) {
    if (tile_ >= tiles_) return;
    const int bytes = left_ < kDenseRowBytes ? left_ : kDenseRowBytes;
    copy_bulk(ring_ + at + lane() * kDenseRowPitch, from_, static_cast<unsigned>(bytes),
              barrier_of(at, lane()));
    from_ += bytes;
    left_ -= bytes;
    if (left_ > 0) return;
    tile_ += step_;
    begin_tile();
  }

  unsigned char* ring_;
  const unsigned char *weights_, *from_;
  int64_t row_bytes_, outputs_;
  int end_, slice_, step_, tiles_;
  int tile_, left_;  // the next copy's tile, and bytes of its row that are not copied yet
  int at_ = 0, parity_ = 0;
};
#endif

template <int kTokenTiles>
__global__ void __launch_bounds__(kThreads, 1)
    dense_kernel([[maybe_unused]] const __grid_constant__ DenseProductParams p,
                 [[maybe_unused]] const __grid_constant__ DensePlan plan) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using Shared = DenseShared<kTokenTiles>;
  POLYSPEC_DYNAMIC_SHARED(Shared, shared);
  launch_dependents();
  Vector* const x =  // [chunk][token tile][lane]
      reinterpret_cast<Vector*>(reinterpret_cast<unsigned char*>(&shared) + sizeof(Shared));
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;

  const int ctas = 1 << plan.shift, rank = static_cast<int>(blockIdx.x) & (ctas - 1);
  const int slices_shift = 3 - plan.shift, slices = 1 << slices_shift;  // of this CTA
  const int64_t chunks = p.shape.inputs / kDenseChunk;
  const auto begin_of = [&](int s) { return static_cast<int>(chunks * s / kDenseSlices); };
  const int first = begin_of(rank * slices), end = begin_of((rank + 1) * slices);
  const int slice = rank * slices + (warp & (slices - 1));
  const int begin = begin_of(slice), count = begin_of(slice + 1) - begin;

  const int tiles = static_cast<int>((p.shape.outputs + kRows - 1) / kRows);
  const int step = static_cast<int>(gridDim.x);
  const int first_tile = static_cast<int>(blockIdx.x) - rank;  // of the cluster
  const int x_chunks = static_cast<int>((chunks + ctas - 1) >> plan.shift);
  RowRing ring(reinterpret_cast<unsigned char*>(x + x_chunks * kTokenTiles * kWarp) +
                   warp * plan.stages * kDenseStageBytes,
               plan.stages, static_cast<const unsigned char*>(p.packed) + begin * (kDenseChunk * 2),
               p.shape.inputs * 2, p.shape.outputs, count * (kDenseChunk * 2),
               first_tile + (warp >> slices_shift), step, tiles);
  wait_for_prerequisites();

  const BFloat16* const from = static_cast<const BFloat16*>(p.x) + lane / 4 * p.x_stride +
                               int64_t{first} * kDenseChunk + lane % 4 * 8;
  POLYSPEC_ROLLED
  for (int chunk = warp; chunk < end - first; chunk += kWarps) {
    POLYSPEC_UNROLL
    for (int t = 0; t < kTokenTiles; ++t) {
      const int64_t at = t * kTokenTile * p.x_stride + int64_t{chunk} * kDenseChunk;
      copy_async(x + (chunk * kTokenTiles + t) * kWarp + lane, from + at,
                 t * kTokenTile + lane / 4 < p.tokens ? 16 : 0);
    }
  }
  end_batch();
  wait_for_batches<0>();
  __syncthreads();  // the activations are there

  const auto meet = [&] {
    if (ctas == 1) return __syncthreads();
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
  };
  // Of the tile of this CTA's rank a thread writes one value.
  const int row = threadIdx.x % kRows, token = threadIdx.x / kRows;
  const int of_lane = row % 8 * 4 + token % kTokenTile / 2, of_sum = row / 8 * 2 + token % 2;
  int turn = 0;
  POLYSPEC_ROLLED
  for (int tile = first_tile; tile < tiles; tile += step, turn ^= 1) {
    float y[kTokenTiles][4] = {};
    const Vector* x_of = x + (begin - first) * kTokenTiles * kWarp + lane;
    POLYSPEC_ROLLED
    for (int left = tile + (warp >> slices_shift) < tiles ? count : 0; left > 0;
         left -= kStageChunks) {
      const Vector* const weights = reinterpret_cast<const Vector*>(ring.next());
      POLYSPEC_UNROLL
      for (int i = 0; i < kStageChunks; ++i) {
        if (i > 0 && i >= left) break;
        const Vector a = weights[i * 4];
        const Vector b = weights[i * 4 + kRows / 2 * kDenseRowPitch / core::kVectorBytes];
        POLYSPEC_UNROLL
        for (int t = 0; t < kTokenTiles; ++t) {
          const Vector of = x_of[(i * kTokenTiles + t) * kWarp];
          POLYSPEC_UNROLL
          for (int w = 0; w < 4; w += 2) {
            const uint32_t both[4] = {a.words[w], b.words[w], a.words[w + 1], b.words[w + 1]};
            multiply<BFloat16>(y[t], both, of.words[w], of.words[w + 1]);
          }
        }
      }
      ring.release();
      x_of += kStageChunks * kTokenTiles * kWarp;
    }
    POLYSPEC_UNROLL
    for (int t = 0; t < kTokenTiles; ++t) {
      for (int j = 0; j < 4; ++j) shared.sums[turn][warp][t][lane][j] = y[t][j];
    }
    meet();  // the sums are written, and the buffer of the tile before last has been read
    const int64_t output = int64_t{tile + rank} * kRows + row;
    if (token >= p.tokens || output >= p.shape.outputs) continue;
    const auto sum_of = [&](int s) {
      float* const mine = &shared.sums[turn][(rank << slices_shift) + (s & (slices - 1))]
                                      [token / kTokenTile][of_lane][of_sum];
      if (ctas == 1) return *mine;
      return *static_cast<float*>(
          __cluster_map_shared_rank(mine, static_cast<unsigned>(s >> slices_shift)));
    };
    float sum = sum_of(4) + sum_of(0);
    POLYSPEC_UNROLL
    for (int s = 1; s < kWarps / 2; ++s) sum += sum_of(s + 4) + sum_of(s);
    if (p.bias != nullptr) sum += core::to_float(static_cast<const BFloat16*>(p.bias)[output]);
    core::convert_output(sum, static_cast<BFloat16*>(p.y) + token * p.y_stride + output);
  }
  if (ctas > 1) meet();  // no CTA leaves while another may read its sums
#endif
}

template <int kTokenTiles>
Result product_of(const DenseProductParams& p, CUstream_st* stream) {
  const DeviceShape device = current_device();
  const int forced = forced_memory.load(std::memory_order_relaxed);
  const int bytes = forced > 0 ? forced : device.shared_memory;
  static_assert(sizeof(DenseShared<kTokenTiles>) == dense_fixed_bytes(kTokenTiles));
  const DensePlan plan = dense_plan(p.shape.inputs, kTokenTiles, device.clusters ? bytes : 0,
                                    std::min(forced_ctas.load(std::memory_order_relaxed), kWarps));
  constexpr auto kernel = dense_kernel<kTokenTiles>;
  const int ctas = 1 << plan.shift;
  int64_t at_once = 0;
  if (plan.stages > 0 && allow_dynamic<kernel>(device, bytes) == cudaSuccess)
    at_once = groups_at_once<kernel>(device, ctas, kThreads, bytes);
  if (at_once == 0) {
    return {Result::Code::kUnsupported,
            "dense_product: expected a device with bulk copies (sm_90 and later) and shared memory "
            "for the activations"};
  }
  const int groups = forced_groups.load(std::memory_order_relaxed);
  const int64_t tiles = (p.shape.outputs + kRows - 1) / kRows;
  const GroupLaunch launch(std::min(groups > 0 ? std::min<int64_t>(groups, at_once) : at_once,
                                    (tiles + ctas - 1) / ctas),
                           ctas, kThreads, stream, plan.bytes);
  return result_of(launch_kernel(kernel, launch.config(), p, plan));
}

}  // namespace

Result dense_product(const DenseProductParams& p, CUstream_st* stream) {
  return p.tokens <= kTokenTile ? product_of<1>(p, stream) : product_of<2>(p, stream);
}

}  // namespace polyspec::cuda
