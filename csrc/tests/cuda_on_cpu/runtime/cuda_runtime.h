// Stands in for CUDA C++ and the CUDA runtime where the CUDA sources are compiled for a CPU: every
// CUDA thread is a fibre (README.md).
#pragma once

#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cuda_runtime_api.h"

#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define POLYSPEC_CALLED inline __attribute__((noinline))
#define POLYSPEC_SHARED(type, name) \
  type& name = *static_cast<type*>(::stand_in::shared_memory(sizeof(type), alignof(type)))

enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension = 4,
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace stand_in {

cudaError_t launch(const cudaLaunchConfig_t& config, std::function<void()> thread,
                   const char* kernel);
unsigned ctas_of_cluster(const cudaLaunchConfig_t& config);

// Of the thread that runs. Each call may interrupt it.
struct Index {
  unsigned x, y, z;
};
const Index& thread_index();
const Index& block_index();
const Index& grid_size();

void* shared_memory(size_t bytes, size_t alignment);
// The value of lane `from` of the warp, where `from` follows from the kind, the lane and
// `argument`.
enum class Shuffle { kFrom, kXor, kUp };
uint64_t shuffle(Shuffle kind, unsigned mask, uint64_t value, int argument);
void before_atomic(const void* at);
void after_atomic(const void* at);

// A built-in variable: members are read when they are used.
template <const Index& (*get)()>
struct Variable {
  struct X {
    operator unsigned() const { return get().x; }
  } x;
  struct Y {
    operator unsigned() const { return get().y; }
  } y;
  struct Z {
    operator unsigned() const { return get().z; }
  } z;
};

}  // namespace stand_in

inline stand_in::Variable<stand_in::thread_index> threadIdx;
inline stand_in::Variable<stand_in::block_index> blockIdx;
inline stand_in::Variable<stand_in::grid_size> gridDim;

template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Args&&... args) {
  std::tuple<Params...> values(std::forward<Args>(args)...);  // as they are now
  return stand_in::launch(
      *config, [kernel, values] { std::apply(kernel, values); }, __PRETTY_FUNCTION__);
}

// Of a device whose multiprocessors come in eights of sixteen, and a few that no cluster gets.
template <class... Params>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, void (*)(Params...),
                                           const cudaLaunchConfig_t* config) {
  *clusters = 8 * (16 / static_cast<int>(stand_in::ctas_of_cluster(*config)));
  return cudaSuccess;
}

template <class T>
T __shfl_sync(unsigned mask, T value, int from) {
  return static_cast<T>(
      stand_in::shuffle(stand_in::Shuffle::kFrom, mask, static_cast<uint64_t>(value), from));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int step) {
  return static_cast<T>(
      stand_in::shuffle(stand_in::Shuffle::kXor, mask, static_cast<uint64_t>(value), step));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int step) {
  return static_cast<T>(
      stand_in::shuffle(stand_in::Shuffle::kUp, mask, static_cast<uint64_t>(value), step));
}

template <class T, class Op>
T reduce_sync(unsigned mask, T value, const Op& op) {
  for (int step = 16; step > 0; step /= 2) value = op(value, __shfl_xor_sync(mask, value, step));
  return value;
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
  return reduce_sync(mask, value, [](unsigned a, unsigned b) { return a + b; });
}
template <class T>
T __reduce_min_sync(unsigned mask, T value) {
  return reduce_sync(mask, value, [](T a, T b) { return a < b ? a : b; });
}
template <class T>
T __reduce_max_sync(unsigned mask, T value) {
  return reduce_sync(mask, value, [](T a, T b) { return a > b ? a : b; });
}

void __syncthreads();
int __syncthreads_count(int predicate);
void __threadfence();

void __cluster_barrier_arrive();
void __cluster_barrier_wait();
unsigned __clusterRelativeBlockRank();
unsigned __clusterSizeInBlocks();
void* __cluster_map_shared_rank(const void* mine, unsigned rank);

template <class T>  // unsigned, unsigned long long
T atomicAdd(T* at, std::common_type_t<T> value) {
  stand_in::before_atomic(at);
  const T earlier = __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
  stand_in::after_atomic(at);
  return earlier;
}
inline unsigned atomicInc(unsigned* at, unsigned last) {
  stand_in::before_atomic(at);
  unsigned earlier = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(at, &earlier, earlier >= last ? 0 : earlier + 1, false,
                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  stand_in::after_atomic(at);
  return earlier;
}

#ifdef __CUDA_ARCH__
inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
}
#endif
