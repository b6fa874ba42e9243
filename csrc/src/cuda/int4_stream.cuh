// The product of up to 32 tokens with 4-bit weights that stream through shared memory, on devices
// with bulk copies and clusters.
//
// A CTA for each multiprocessor, or a cluster of CTAs, takes tiles of 32 outputs one after the
// other. Its warps have a slice of the inputs each; in a cluster of n CTAs each has 8 / n slices,
// of n tiles at the same time. A warp copies groups of weights into its ring, whole groups by bulk
// copies, which go on to the next tile before this one is summed. The activations of the CTA's
// slices lie in shared memory once. Sums of two tiles lie side by side, so that a tile has one
// barrier; of more than 16 tokens they would leave too little room, and a tile has two.
#pragma once

#include "core/convert.hpp"
#include "core/layer_math.hpp"
#include "cuda/bulk_copy.cuh"
#include "cuda/int4_math.cuh"
#include "cuda/int4_plan.hpp"
#include "cuda/norm_lanes.cuh"

namespace polyspec::cuda {

// After it lie the activations, then the rings.
template <int kTokenTiles>
struct StreamShared {
  using Sum = float[kWarp][4];
  static constexpr int kBuffers = stream_sums(kTokenTiles);
  CopyBarrier full[kWarps][kMostStages];
  Sum sums[kBuffers][kWarps][2 * kTokenTiles];
};

constexpr int kNormTokens = kTokenTile;  // at most, of a norm in the product's launch

// A sum becomes a value of y, and with a residual one of a sum after it.
template <class T>
__device__ __forceinline__ void write_output(const Int4Product& p, int64_t token, int64_t output,
                                             float sum) {
  const int64_t at = token * p.y_stride + output;
  if (std::is_same_v<T, BFloat16> && p.residual != nullptr)
    sum = core::rounded<T>(sum) + core::to_float(static_cast<const T*>(p.residual)[at]);
  core::convert_output(sum, static_cast<T*>(p.y) + at);
}

// Of a pair of sums of a gated product or of one with heads. y holds the first of them, rounded,
// until the second is there; `output` is that of the first.
template <class T>
__device__ __forceinline__ void write_second(const Int4Product& p, int64_t token, int64_t output,
                                             float sum) {
  const T* const first = static_cast<const T*>(p.y) + token * p.y_stride + output;
  if (p.gated) {
    const float value = core::gated_value<T>(core::to_float(*first), core::rounded<T>(sum));
    core::convert_output(value, static_cast<T*>(p.y) + token * p.y_stride + output);
    return;
  }
  // As rotary_append_kernel (layer.cu).
  const RotaryAppendParams& append = p.append;
  const RotaryParams& turn = append.turn;
  const auto width = static_cast<unsigned>(turn.width), half = width / 2;
  const auto head = static_cast<unsigned>(output) / width;
  const auto i = static_cast<unsigned>(output) % width;
  float values[2] = {core::to_float(*first), core::rounded<T>(sum)};
  if (turn.bias != nullptr) {
    const T* const bias = static_cast<const T*>(turn.bias) + output;
    for (unsigned u = 0; u < 2; ++u)
      values[u] = core::rounded<T>(values[u] + core::to_float(bias[u * half]));
  }
  const auto tokens = static_cast<unsigned>(turn.tokens), number = static_cast<unsigned>(token);
  const auto row = number / tokens, in_row = number % tokens;
  const core::RowAppend plan = core::row_append(core::new_tokens(append), row, append.capacity);
  if (output == 0 && in_row == 0) append.status[row] |= plan.status;
  T* const to = core::head_of<T>(append, plan, row, in_row, head);
  if (to == nullptr) return;
  if (head < turn.heads + turn.groups) {
    core::turn_pair(values[0], values[1], turn, core::angles_at(turn, row, in_row), i, to);
  } else {
    for (unsigned u = 0; u < 2; ++u) core::convert_output(values[u], to + i + u * half);
  }
}

// The norm of the activations of a CTA with whole rows, in the order of norm_kernel (layer.cu).
class Norm {
 public:
  // Reads weights, which no earlier kernel of a graph writes.
  __device__ __forceinline__ explicit Norm(const Int4Product& p)
      : p_(p), vectors_(static_cast<int>(p.shape.inputs) / kEach) {
    if (p.norm == nullptr) return;
    first_ = weights_at(threadIdx.x);
    second_ = weights_at(threadIdx.x + kThreads);
  }

  // `x`: [chunk][lane], as the product reads them. `lanes`: shared memory.
  __device__ __forceinline__ void run(Vector* x, float* lanes) {
    const int tokens = static_cast<int>(p_.tokens);
    const int token = static_cast<int>(threadIdx.x) / kWarp, l = threadIdx.x % kWarp;
    if (token < tokens) {
      const auto* const own =
          reinterpret_cast<const BFloat16*>(x + token * 4 + l / kEach) + l % kEach;
      float of_thread[2] = {};
      POLYSPEC_ROLLED
      for (int chunk = 0; chunk < vectors_ / 4; chunk += kAtOnce) {
        float next[kAtOnce];  // read before the first is added: each waits for the one before
        POLYSPEC_UNROLL
        for (int u = 0; u < kAtOnce; ++u) {
          const int at = chunk + u < vectors_ / 4 ? chunk + u : 0;
          next[u] = core::to_float(own[at * kWarp * kEach]);
        }
        POLYSPEC_UNROLL
        for (int u = 0; u < kAtOnce; ++u) {
          if (chunk + u < vectors_ / 4) of_thread[u % 2] += next[u] * next[u];
        }
      }
      const float lane = folded(of_thread);
      if (l < kLanes) lanes[token * kLanes + l] = lane;
    }
    __syncthreads();  // the sums of squares are there
    float* const factors = lanes + kThreads;
    if (static_cast<int>(threadIdx.x) < tokens) {
      const auto& of = reinterpret_cast<const float (&)[kLanes]>(lanes[threadIdx.x * kLanes]);
      factors[threadIdx.x] = core::norm_factor(of, p_.shape.inputs, p_.epsilon);
    }
    __syncthreads();  // the factors are there
    POLYSPEC_ROLLED
    for (int v = threadIdx.x; v < vectors_; v += kThreads) {
      POLYSPEC_ROLLED
      for (int t = 0; t < tokens; ++t) {
        Vector& at = x[v / 4 * kWarp + t * 4 + v % 4];
        Vector normed = at;
        auto* const to = reinterpret_cast<BFloat16*>(&normed);
        const auto* const weight = reinterpret_cast<const BFloat16*>(&first_);
        POLYSPEC_UNROLL
        for (int j = 0; j < kEach; ++j) {
          const float value = core::to_float(to[j]), of = core::to_float(weight[j]);
          core::convert_output(core::normed<BFloat16>(of, value, factors[t]), to + j);
        }
        at = normed;
      }
      first_ = second_;
      second_ = weights_at(v + 2 * kThreads);
    }
    __syncthreads();  // all are normed
  }

 private:
  static constexpr int kEach = 8, kLanes = core::kSumLanes, kAtOnce = 16;
  static_assert(4 * kEach == kWarp, "a thread has a value of every chunk");
  static_assert(kNormTokens <= kWarps && kAtOnce % 2 == 0);

  __device__ __forceinline__ Vector weights_at(int vector) const {
    return vector < vectors_ ? static_cast<const Vector*>(p_.norm)[vector] : Vector{};
  }

  const Int4Product& p_;
  const int vectors_;
  Vector first_, second_;  // of the next two vectors of this thread
};
struct NoNorm {
  __device__ explicit NoNorm(const Int4Product&) {}
  __device__ void run(Vector*, float*) {}
};

struct alignas(8) XSums {
  float of[2];  // of two tokens
};

// A warp's ring of stages, in the order of its products: the groups of a slice, `kGroups` a stage
// or the rest of them, tile after tile.
template <int kGroups>
class GroupRing {
 public:
  // Before `next` comes a barrier of the CTA. `from`: the first group; after the last byte of a
  // slice the next group lies `jump` vectors further, and after the next slice `back` vectors.
  __device__ __forceinline__ GroupRing(unsigned char* ring, CopyBarrier* full, int stages,
                                       int bytes, const unsigned char* from, int slice, int jump,
                                       int back, int tiles)
      : ring_(ring),
        full_(full),
        from_(from),
        jump_(jump),
        both_(jump + back),
        bytes_(bytes),
        stages_(stages),
        slice_(slice),
        of_slice_(slice),
        left_(threadIdx.x % kWarp == 0 && slice > 0 ? tiles : 0) {
    if (threadIdx.x % kWarp == 0) {
      POLYSPEC_ROLLED
      for (int i = 0; i < stages; ++i) make_barrier(full + i);
      begin_barriers();
    }
    POLYSPEC_ROLLED
    for (int i = 0; i < stages; ++i) load(ring + i * kGroups * bytes, full + i);
  }

  // The next stage, when it is there.
  __device__ __forceinline__ const unsigned char* next() {
    wait_for_phase(full_ + stage_, parity_);
    return ring_ + stage_ * kGroups * bytes_;
  }
  // Its memory is for the groups `stages` further.
  __device__ __forceinline__ void release() {
    __syncwarp();  // all lanes have read the stage
    load(ring_ + stage_ * kGroups * bytes_, full_ + stage_);
    if (++stage_ == stages_) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  // By lane 0, which alone has tiles left.
  __device__ __forceinline__ void load(unsigned char* to, CopyBarrier* barrier) {
    if (left_ <= 0) return;
    const int most = kGroups * bytes_, bytes = kGroups == 1 || of_slice_ >= most ? most : of_slice_;
    copy_bulk(to, from_, static_cast<unsigned>(bytes), barrier);
    from_ += bytes;
    of_slice_ -= bytes;
    if (of_slice_ > 0) return;
    of_slice_ = slice_;
    from_ += int64_t{jump_} * core::kVectorBytes;
    jump_ = both_ - jump_;
    --left_;
  }

  unsigned char* ring_;
  CopyBarrier* full_;
  const unsigned char* from_;
  int jump_, both_, bytes_, stages_, slice_;
  int of_slice_;  // bytes of the tile that are not copied yet
  int left_;      // tiles
  int stage_ = 0, parity_ = 0;
};

// `kChunks`: of a group; 0: any number.
template <class T, int kTokenTiles, int kChunks>
__global__ void __launch_bounds__(kThreads, 1)
    int4_stream_kernel([[maybe_unused]] const __grid_constant__ Int4Product p,
                       [[maybe_unused]] const __grid_constant__ Int4Plan plan) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using Shared = StreamShared<kTokenTiles>;
  POLYSPEC_DYNAMIC_SHARED(Shared, shared);
  launch_dependents();
  unsigned char* const x_at = reinterpret_cast<unsigned char*>(&shared) + sizeof(Shared);
  const Int4Tiles of(p.shape);
  Vector* const x = reinterpret_cast<Vector*>(x_at);  // [chunk][token tile][lane]
  XSums* const x_sums =                               // [group][token tile][pair of tokens]
      reinterpret_cast<XSums*>(x_at + (plan.groups * kTokenTiles << of.shift) * 512);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int chunks = kChunks > 0 ? kChunks : 1 << of.shift;
  constexpr int kGroups = kChunks == 1 << kPairShift ? 2 : 1;

  const int ctas = 1 << plan.shift, rank = static_cast<int>(blockIdx.x) & (ctas - 1);
  const int slices_shift = 3 - plan.shift, slices = 1 << slices_shift;  // of this CTA
  const auto begin_of = [&](int s) { return static_cast<int>(of.groups * s / kWarps); };
  const int first = begin_of(rank * slices), end = begin_of((rank + 1) * slices);
  const int slice = rank * slices + (warp & (slices - 1));
  const int begin = begin_of(slice), groups = begin_of(slice + 1) - begin;

  // Of a gated product tiles of gates count, and of one with heads tiles of their first halves.
  // After each comes the tile of its ups, or of the second half, which lies so far away.
  const int apart = static_cast<int>(p.gated ? of.tiles / 2 : p.turns ? p.half_tiles() : 0);
  const int tiles = static_cast<int>(apart > 0 ? of.tiles / 2 : of.tiles);
  const auto place_of = [&](int tile) { return p.turns ? tile + (tile & -apart) : tile; };
  const int step = static_cast<int>(gridDim.x);  // with heads a multiple of half a head's tiles
  const int places = p.turns ? 2 * step : step;
  const int first_tile = static_cast<int>(blockIdx.x) - rank;  // of the cluster
  const int tile_of_warp = first_tile + (warp >> slices_shift);
  const int own = tile_of_warp < tiles ? (tiles - tile_of_warp + step - 1) / step : 0;
  const int group_vectors = core::kScaleVectors + chunks * core::kChunkVectors;
  const int group_bytes = group_vectors * core::kVectorBytes;
  const int of_tile = static_cast<int>(of.groups) * group_vectors,
            of_slice = groups * group_vectors;
  GroupRing<kGroups> ring(
      reinterpret_cast<unsigned char*>(x_sums + plan.groups * kTokenTiles * 4) +
          warp * plan.stages * kGroups * group_bytes + lane * core::kVectorBytes,
      shared.full[warp], plan.stages, group_bytes,
      p.packed + place_of(tile_of_warp) * of.tile_bytes + begin * int64_t{group_bytes},
      groups * group_bytes, (apart > 0 ? apart : step) * of_tile - of_slice,
      (places - apart) * of_tile - of_slice, apart > 0 ? 2 * own : own);
  constexpr bool kNorms = std::is_same_v<T, BFloat16> && kTokenTiles * kTokenTile <= kNormTokens;
  std::conditional_t<kNorms, Norm, NoNorm> norm(p);
  wait_for_prerequisites();

  {
    const T* const from = static_cast<const T*>(p.x) + lane / 4 * p.x_stride +
                          (int64_t{first} << of.shift) * kTileInputs + lane % 4 * 8;
    const int count = (end - first) << of.shift;
    POLYSPEC_ROLLED
    for (int chunk = warp; chunk < count; chunk += kWarps) {
      POLYSPEC_UNROLL
      for (int t = 0; t < kTokenTiles; ++t) {
        const int64_t at = t * kTokenTile * p.x_stride + int64_t{chunk} * kTileInputs;
        copy_async(x + (chunk * kTokenTiles + t) * kWarp + lane, from + at,
                   t * kTokenTile + lane / 4 < p.tokens ? 16 : 0);
      }
    }
    end_batch();
    wait_for_batches<0>();
    __syncthreads();  // the activations are there
    if (kNorms && p.norm != nullptr) norm.run(x, &shared.sums[0][0][0][0][0]);
  }
  // Of each group the sums of its activations, for all tiles.
  POLYSPEC_ROLLED
  for (int g = warp; g < end - first; g += kWarps) {
    float of_x[kTokenTiles][4] = {};
    POLYSPEC_ROLLED
    for (int chunk = g << of.shift; chunk < (g + 1) << of.shift; ++chunk) {
      Vector x_of[kTokenTiles];
      POLYSPEC_UNROLL
      for (int t = 0; t < kTokenTiles; ++t) x_of[t] = x[(chunk * kTokenTiles + t) * kWarp + lane];
      add_chunk<T>(x_of, of_x);
    }
    POLYSPEC_UNROLL
    for (int t = 0; t < kTokenTiles; ++t) {
      if (lane < 4) x_sums[(g * kTokenTiles + t) * 4 + lane] = {of_x[t][0], of_x[t][1]};
    }
  }
  __syncthreads();  // the sums of activations are there
  const Vector* const x_of_slice = x + ((begin - first) << of.shift) * kTokenTiles * kWarp + lane;

  const auto meet = [&] {
    if (ctas == 1) return __syncthreads();
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
  };
  const int64_t outputs = apart > 0 ? p.shape.outputs / 2 : p.shape.outputs;
  int turn = 0;
  bool second = false;  // of a pair
  POLYSPEC_ROLLED
  for (int tile = first_tile; tile < tiles; turn ^= Shared::kBuffers - 1) {
    Sums<1, kTokenTiles> y;
    const Vector* x_of = x_of_slice;
    const XSums* x_sums_of = x_sums + (begin - first) * kTokenTiles * 4 + lane % 4;
    const XSums* const last =  // group
        x_sums_of + ((tile + (warp >> slices_shift) < tiles ? groups : 0) - 1) * kTokenTiles * 4;
    POLYSPEC_ROLLED
    for (; x_sums_of <= last; x_sums_of += kGroups * kTokenTiles * 4) {
      const unsigned char* const at = ring.next();
      POLYSPEC_UNROLL
      for (int i = 0; i < kGroups; ++i) {
        if (i > 0 && x_sums_of >= last) break;
        const Vector* const of_lane = reinterpret_cast<const Vector*>(at + i * group_bytes);
        const Vector scales[1] = {of_lane[lane / 4 - lane]};
        const Vector* const weights = of_lane + core::kScaleVectors;
        Sums<1, kTokenTiles> group;
        float of_x[kTokenTiles][4];
        POLYSPEC_UNROLL
        for (int t = 0; t < kTokenTiles; ++t) {
          const XSums both = x_sums_of[(i * kTokenTiles + t) * 4];
          for (int j = 0; j < 4; ++j) of_x[t][j] = both.of[j % 2];
        }
        POLYSPEC_UNROLL
        for (int chunk = 0; chunk < chunks; ++chunk) {
          Vector x_of_chunk[kTokenTiles];
          const Vector packed[1] = {weights[chunk * kWarp]};
          POLYSPEC_UNROLL
          for (int t = 0; t < kTokenTiles; ++t)
            x_of_chunk[t] = x_of[((i * chunks + chunk) * kTokenTiles + t) * kWarp];
          multiply_chunk<T>(packed, x_of_chunk, group);
        }
        add_group(y, group, of_x, scales);
      }
      ring.release();
      x_of += kGroups * chunks * kTokenTiles * kWarp;
    }
    POLYSPEC_UNROLL
    for (int f = 0; f < 2 * kTokenTiles; ++f) {
      for (int j = 0; j < 4; ++j)
        shared.sums[turn][warp][f][lane][j] = y.of[f / kTokenTiles][f % kTokenTiles][j];
    }
    meet();  // the sums are written, and the buffer of the tile before last has been read
    // The CTA writes the tile of its rank.
    const auto sum_of = [&](int s, int f, int l, int j) {
      float* const mine = &shared.sums[turn][(rank << slices_shift) + (s & (slices - 1))][f][l][j];
      if (ctas == 1) return *mine;
      return *static_cast<float*>(
          __cluster_map_shared_rank(mine, static_cast<unsigned>(s >> slices_shift)));
    };
    POLYSPEC_ROLLED
    for (int at = threadIdx.x; at < 2 * kTokenTiles * kWarp * 4; at += kThreads) {
      const int j = at % 4, l = at / 4 % kWarp, f = at / (4 * kWarp);
      float sum = sum_of(4, f, l, j) + sum_of(0, f, l, j);
      POLYSPEC_UNROLL
      for (int s = 1; s < kWarps / 2; ++s) sum += sum_of(s + 4, f, l, j) + sum_of(s, f, l, j);
      const int64_t in_tile = f / kTokenTiles * 16 + l / 4 + j / 2 * 8;
      const int64_t output = int64_t{place_of(tile + rank)} * kTileOutputs + in_tile;
      const int64_t token = f % kTokenTiles * kTokenTile + l % 4 * 2 + j % 2;
      if (token >= p.tokens || int64_t{tile + rank} * kTileOutputs + in_tile >= outputs) continue;
      if (std::is_same_v<T, BFloat16> && second) {
        write_second<T>(p, token, output, sum);
      } else {
        write_output<T>(p, token, output, sum);
      }
    }
    if (Shared::kBuffers == 1) meet();  // the sums are read
    if (second || apart == 0) tile += step;
    second = apart > 0 && !second;
  }
  if (ctas > 1) meet();  // no CTA leaves while another may read its sums
#endif
}

}  // namespace polyspec::cuda
