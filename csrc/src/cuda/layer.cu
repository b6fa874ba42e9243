// The operators of a decoder layer between its products, on CUDA, each one launch: the values of
// core/layer_math.hpp, and sums of squares in the CPU's order.
//
// A few tokens of a layer are some kilobytes, so these kernels are bound by latency: a token is a
// CTA's, and one of its heads where it has any.
#include "core/kv_index.hpp"
#include "core/layer_math.hpp"
#include "cuda/layer.hpp"
#include "cuda/norm_lanes.cuh"

namespace polyspec::cuda {
namespace {

using core::BFloat16;
using core::kSumLanes;
using core::to_float;

constexpr int kWarp = 32, kNormThreads = 512;
constexpr int kEach = 8;                        // values of a thread between two barriers
constexpr int kSquares = kEach * kNormThreads;  // so many squares
constexpr int kAtOnce = 16;                     // squares of a lane
constexpr int kHeadThreads = 64;
constexpr int kGateThreads = 256;
constexpr int64_t kMaxX = 0x7fffffff;
constexpr int64_t kMaxY = 65535;

template <int64_t kMost>
struct SumsShared {
  float lanes[kSumLanes];
  float squares[kMost];
};

// Adds `count` squares to the lanes of a sum: lane l has every 64th from l on, one after the other,
// as cpu/layer.cpp adds them up. Thread l of the first warp has lanes l and l + 32.
template <int64_t kMost>
__device__ __forceinline__ void add_squares(const SumsShared<kMost>& shared, int count,
                                            float (&lanes)[2]) {
  __syncthreads();  // all squares are there
  if (threadIdx.x >= kWarp) return;
  int i = static_cast<int>(threadIdx.x);
  POLYSPEC_ROLLED
  for (; i + (kAtOnce - 1) * kWarp < count; i += kAtOnce * kWarp) {
    float next[kAtOnce];  // read before the first is added: each sum waits for the one before
    POLYSPEC_UNROLL
    for (int u = 0; u < kAtOnce; ++u) next[u] = shared.squares[i + u * kWarp];
    POLYSPEC_UNROLL
    for (int u = 0; u < kAtOnce; ++u) lanes[u % 2] += next[u];
  }
  POLYSPEC_ROLLED
  for (; i < count; i += 2 * kWarp) {
    lanes[0] += shared.squares[i];
    if (i + kWarp < count) lanes[1] += shared.squares[i + kWarp];
  }
}

// 1 / sqrt(mean + epsilon) of the lanes, in every thread.
template <int64_t kMost>
__device__ __forceinline__ float factor_of(SumsShared<kMost>& shared, const float (&lanes)[2],
                                           int64_t n, float epsilon) {
  if (threadIdx.x < kWarp) {
    const float lane = folded(lanes);
    if (threadIdx.x < kSumLanes) shared.lanes[threadIdx.x] = lane;
  }
  __syncthreads();  // all lanes are there
  return core::norm_factor(shared.lanes, n, epsilon);
}

// Values and weights of up to kSquares stay in registers, since a row is read once and waited for.
template <class T>
__global__ void __launch_bounds__(kNormThreads, 1)
    norm_kernel(const __grid_constant__ RmsNormParams p) {
  POLYSPEC_SHARED(SumsShared<kSquares>, shared);
  const int64_t n = p.width, row = blockIdx.x * n;
  const T* const weight = static_cast<const T*>(p.weight);
  const T* const x = static_cast<const T*>(p.x) + row;
  const T* const residual =
      p.residual == nullptr ? nullptr : static_cast<const T*>(p.residual) + row;
  T* const sum = residual == nullptr ? nullptr : static_cast<T*>(p.sum) + row;
  T* const y = static_cast<T*>(p.y) + row;
  float values[kEach] = {}, weights[kEach] = {}, lanes[2] = {};
  launch_dependents();
  if (n <= kSquares) {
    POLYSPEC_UNROLL
    for (int u = 0; u < kEach; ++u) {
      const int i = static_cast<int>(threadIdx.x) + u * kNormThreads;
      if (i < n) weights[u] = to_float(weight[i]);
    }
  }
  wait_for_prerequisites();
  POLYSPEC_ROLLED
  for (int64_t begin = 0; begin < n; begin += kSquares) {
    const int count = static_cast<int>(n - begin < kSquares ? n - begin : kSquares);
    POLYSPEC_UNROLL
    for (int u = 0; u < kEach; ++u) {
      const int i = static_cast<int>(threadIdx.x) + u * kNormThreads;
      if (i < count) {
        values[u] = to_float(x[begin + i]);
        if (residual != nullptr) values[u] += to_float(residual[begin + i]);
      }
    }
    if (begin > 0) __syncthreads();  // the squares before are added up
    POLYSPEC_UNROLL
    for (int u = 0; u < kEach; ++u) {
      const int i = static_cast<int>(threadIdx.x) + u * kNormThreads;
      if (i < count) {
        if (residual != nullptr) {
          T added;
          core::convert_output(values[u], &added);
          sum[begin + i] = added;
          values[u] = to_float(added);
        }
        shared.squares[i] = values[u] * values[u];
      }
    }
    add_squares(shared, count, lanes);
  }
  const float factor = factor_of(shared, lanes, n, p.epsilon);
  if (n <= kSquares) {
    POLYSPEC_UNROLL
    for (int u = 0; u < kEach; ++u) {
      const int i = static_cast<int>(threadIdx.x) + u * kNormThreads;
      if (i < n) core::convert_output(core::normed<T>(weights[u], values[u], factor), y + i);
    }
    return;
  }
  // A thread reads its writes only.
  const T* const h = residual == nullptr ? x : sum;
  POLYSPEC_ROLLED
  for (int64_t i = threadIdx.x; i < n; i += kNormThreads)
    core::convert_output(core::normed<T>(to_float(weight[i]), to_float(h[i]), factor), y + i);
}

using HeadShared = SumsShared<kRotaryWidth>;

// A head of a token as it is before it is turned.
template <class T>
struct Head {
  const T* x;
  const T* bias;    // or nullptr
  const T* weight;  // of its norm, or nullptr
  float factor;

  __device__ __forceinline__ float without_norm(int64_t i) const {
    const float value = to_float(x[i]);
    return bias == nullptr ? value : core::rounded<T>(value + to_float(bias[i]));
  }
  __device__ __forceinline__ float operator[](int64_t i) const {
    const float value = without_norm(i);
    if (weight == nullptr) return value;
    return core::rounded<T>(core::normed<T>(to_float(weight[i]), value, factor));
  }
};

// The work of CTA (number, head): `head` counts the heads of queries, keys and values, `to` is the
// output; nullptr: none.
template <class T>
__device__ __forceinline__ void split_head(HeadShared& shared, const RotaryParams& p,
                                           int64_t number, int64_t head, T* to) {
  const int64_t d = p.width, half = d / 2;
  const bool query = head < p.heads, turns = head < p.heads + p.groups;
  const T* bias = static_cast<const T*>(p.bias);
  if (bias != nullptr) bias += head * d;
  const void* const norm = query ? p.query_norm : turns ? p.key_norm : nullptr;
  Head<T> of{static_cast<const T*>(p.x) + (number * (p.heads + 2 * p.groups) + head) * d, bias,
             static_cast<const T*>(norm), 0.0f};
  if (norm != nullptr) {
    POLYSPEC_ROLLED
    for (int64_t i = threadIdx.x; i < d; i += kHeadThreads) {
      const float value = of.without_norm(i);
      shared.squares[i] = value * value;
    }
    float lanes[2] = {};
    add_squares(shared, static_cast<int>(d), lanes);
    of.factor = factor_of(shared, lanes, d, p.epsilon);
  }
  if (to == nullptr) return;
  if (!turns) {
    POLYSPEC_ROLLED
    for (int64_t i = threadIdx.x; i < d; i += kHeadThreads) {
      if (bias == nullptr) {
        to[i] = of.x[i];
      } else {
        core::convert_output(of[i], to + i);
      }
    }
    return;
  }
  const int64_t at = core::angles_at(p, number / p.tokens, number % p.tokens);
  POLYSPEC_ROLLED
  for (int64_t i = threadIdx.x; i < half; i += kHeadThreads)
    core::turn_pair(of[i], of[i + half], p, at, i, to);
}

// As begin_kernel; before the wait it has bias and norm of a head brought near.
template <class T>
__device__ __forceinline__ void begin_head(const RotaryParams& p, int64_t head) {
  launch_dependents();
  const T* const bias = static_cast<const T*>(p.bias);
  const void* const norm = head < p.heads ? p.query_norm : p.key_norm;
  POLYSPEC_ROLLED
  for (int64_t i = threadIdx.x; i < p.width; i += kHeadThreads) {
    if (bias != nullptr) prefetch(bias + head * p.width + i);
    if (norm != nullptr) prefetch(static_cast<const T*>(norm) + i);
  }
  wait_for_prerequisites();
}

// Where the head of a token lies in [b, heads, t, d].
template <class T>
__device__ __forceinline__ T* head_at(void* data, const RotaryParams& p, int64_t heads,
                                      int64_t number, int64_t head) {
  const int64_t row = number / p.tokens, token = number % p.tokens;
  return static_cast<T*>(data) + ((row * heads + head) * p.tokens + token) * p.width;
}

// Grid: x over tokens of all rows, y over heads of queries, keys and values.
template <class T>
__global__ void __launch_bounds__(kHeadThreads)
    rotary_kernel(const __grid_constant__ RotaryParams p) {
  POLYSPEC_SHARED(HeadShared, shared);
  const int64_t number = blockIdx.x, head = blockIdx.y;
  begin_head<T>(p, head);
  T* to = nullptr;
  if (head < p.heads) {
    to = head_at<T>(p.query, p, p.heads, number, head);
  } else if (head < p.heads + p.groups) {
    to = head_at<T>(p.key, p, p.groups, number, head - p.heads);
  } else {
    to = head_at<T>(p.value, p, p.groups, number, head - p.heads - p.groups);
  }
  split_head(shared, p, number, head, to);
}

template <class T>
__global__ void __launch_bounds__(kHeadThreads)
    rotary_append_kernel(const __grid_constant__ RotaryAppendParams p) {
  POLYSPEC_SHARED(HeadShared, shared);
  const int64_t number = blockIdx.x, head = blockIdx.y;
  begin_head<T>(p.turn, head);
  const int64_t row = number / p.turn.tokens, token = number % p.turn.tokens;
  const NewTokens in = core::new_tokens(p);
  const core::RowAppend plan = core::row_append(in, row, p.capacity);
  if (token == 0 && head == 0 && threadIdx.x == 0) p.status[row] |= plan.status;
  split_head(shared, p.turn, number, head, core::head_of<T>(p, plan, row, token, head));
}

// Grid: x over the values of a token, y over tokens.
template <class T>
__global__ void __launch_bounds__(kGateThreads)
    gated_kernel(const __grid_constant__ GatedParams p) {
  begin_kernel();
  const int64_t n = p.width;
  for (int64_t token = blockIdx.y; token < p.tokens; token += gridDim.y) {
    const T* const gate = static_cast<const T*>(p.x) + token * 2 * n;
    T* const y = static_cast<T*>(p.y) + token * n;
    POLYSPEC_ROLLED
    for (int64_t i = blockIdx.x * int64_t{kGateThreads} + threadIdx.x; i < n;
         i += gridDim.x * int64_t{kGateThreads})
      core::convert_output(core::gated_value<T>(to_float(gate[i]), to_float(gate[n + i])), y + i);
  }
}

template <class Params>
Result launch(void (*kernel)(Params), int64_t x, int64_t y, int threads, const Params& params,
              CUstream_st* stream) {
  if (x == 0 || y == 0) return {};
  if (x > kMaxX || y > kMaxY) {
    return {Result::Code::kInvalidArgument,
            "tokens, heads, width: expected fewer than 2^31 tokens and 2^16 heads, given more"};
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  return result_of(launch_kernel(kernel, config, params));
}

}  // namespace

Result rms_norm(const RmsNormParams& p, CUstream_st* stream) {
  const auto kernel = p.dtype == DType::kFloat32 ? norm_kernel<float> : norm_kernel<BFloat16>;
  return launch(kernel, p.tokens, 1, kNormThreads, p, stream);
}

Result rotary(const RotaryParams& p, CUstream_st* stream) {
  const auto kernel = p.dtype == DType::kFloat32 ? rotary_kernel<float> : rotary_kernel<BFloat16>;
  return launch(kernel, p.batch * p.tokens, p.heads + 2 * p.groups, kHeadThreads, p, stream);
}

Result rotary_append(const RotaryAppendParams& p, CUstream_st* stream) {
  const RotaryParams& turn = p.turn;
  const auto kernel =
      turn.dtype == DType::kFloat32 ? rotary_append_kernel<float> : rotary_append_kernel<BFloat16>;
  return launch(kernel, turn.batch * turn.tokens, turn.heads + 2 * turn.groups, kHeadThreads, p,
                stream);
}

Result gated(const GatedParams& p, CUstream_st* stream) {
  const auto kernel = p.dtype == DType::kFloat32 ? gated_kernel<float> : gated_kernel<BFloat16>;
  const int64_t tokens = p.tokens < kMaxY ? p.tokens : kMaxY;  // then a thread has several
  return launch(kernel, (p.width + kGateThreads - 1) / kGateThreads, tokens, kGateThreads, p,
                stream);
}

}  // namespace polyspec::cuda
