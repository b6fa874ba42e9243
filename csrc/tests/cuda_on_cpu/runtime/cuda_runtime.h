// Replaces CUDA C++ and the CUDA runtime where the CUDA sources are compiled for a CPU: every CUDA
// thread is a fibre (README.md).
#pragma once

#include <cstring>
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
#define POLYSPEC_DYNAMIC_SHARED(type, name) \
  type& name = *static_cast<type*>(::stand_in::dynamic_shared_memory(sizeof(type)))

enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6,
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    struct {
      unsigned x, y, z;
    } clusterDim;
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace stand_in {

// `function`: the kernel's address.
cudaError_t launch(const cudaLaunchConfig_t& config, std::function<void()> thread,
                   const char* kernel, const void* function = nullptr);
// Dynamic shared memory that launches of the kernel may ask for.
cudaError_t allow_dynamic(const void* function, size_t bytes, size_t most);
unsigned ctas_of_cluster(const cudaLaunchConfig_t& config);

// Of the thread that runs. Each call may interrupt it.
struct Index {
  unsigned x, y, z;
};
const Index& thread_index();
const Index& block_index();
const Index& grid_size();

void* shared_memory(size_t bytes, size_t alignment);
void* dynamic_shared_memory(size_t bytes);
// The value of lane `from` of the warp, where `from` follows from the kind, the lane and
// `argument`.
enum class Shuffle { kFrom, kXor, kUp, kAll };
uint64_t shuffle(Shuffle kind, unsigned mask, uint64_t value, int argument);
// The values of the lanes of a warp, [32].
struct Words {
  uint32_t of[6];
};
const Words* exchange(const Words& mine);

// A copy to shared memory that the thread does not wait for.
struct Copy {
  void* to;
  const void* from;
  unsigned bytes;  // that are read; zeros follow up to 16
};
// Whether to copy at once. If not, the copy is noted.
bool comes_early(const Copy& copy);
void end_batch();
// A copy that is noted in a batch before the latest `left`; whether there is one.
bool take_copy(int left, Copy* copy);

// Here, and not in the runtime, so that ThreadSanitizer sees the accesses.
inline void make_copy(const Copy& copy) {
  std::memset(copy.to, 0, 16);
  if (copy.bytes > 0) std::memcpy(copy.to, copy.from, copy.bytes);
}
inline void copy_async(void* to, const void* from, unsigned bytes) {
  const Copy copy{to, from, bytes};
  if (comes_early(copy)) make_copy(copy);
}
inline void wait_for_batches(int left) {
  for (Copy copy; take_copy(left, &copy);) make_copy(copy);
}

// A copy by the device itself, counted by a barrier in shared memory. Half of them copy when they
// begin, the others when a thread waits for some barrier.
struct BulkCopy {
  void* to;
  const void* from;
  unsigned bytes;
  uint64_t* barrier;
};
void make_barrier(uint64_t* barrier);
void note_bulk(const BulkCopy& copy);
// A copy that was begun, to carry out now; `awaited`: the thread's barrier, if any.
bool take_bulk(const uint64_t* awaited, int parity, BulkCopy* copy);
// Between the two it is the device that reads and writes, and not the thread.
void begin_bulk();
void end_bulk(const uint64_t* barrier);
void await_phase(const uint64_t* barrier, int parity);

inline void make_bulks(const uint64_t* awaited, int parity) {
  for (BulkCopy copy; take_bulk(awaited, parity, &copy);) {
    void* const to = copy.to;  // read before it is the device: the stack is the thread's
    const void* const from = copy.from;
    const unsigned bytes = copy.bytes;
    const uint64_t* const barrier = copy.barrier;
    begin_bulk();
    std::memcpy(to, from, bytes);
    end_bulk(barrier);
  }
}
inline void copy_bulk(void* to, const void* from, unsigned bytes, uint64_t* barrier) {
  note_bulk({to, from, bytes, barrier});
  make_bulks(nullptr, 0);
}
inline void wait_for_phase(const uint64_t* barrier, int parity) {
  make_bulks(barrier, parity);
  await_phase(barrier, parity);
}

// mma.sync.m16n8k16, with products added in ascending order, each rounded to float32.
// `value`: of the bits of an element.
template <class Value>
void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
              const Value& value) {
  const Words* const lanes = exchange({{a[0], a[1], a[2], a[3], b0, b1}});
  const unsigned lane = thread_index().x % 32, g = lane / 4, c = lane % 4;
  for (unsigned j = 0; j < 4; ++j) {
    const unsigned column = 2 * c + j % 2;
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned shift = k % 2 * 16;
      const uint32_t of_a = lanes[4 * g + k % 8 / 2].of[k / 8 * 2 + j / 2] >> shift;
      const uint32_t of_b = lanes[4 * column + k % 8 / 2].of[4 + k / 8] >> shift;
      sum[j] = __builtin_fmaf(value(static_cast<uint16_t>(of_a)),
                              value(static_cast<uint16_t>(of_b)), sum[j]);
    }
  }
}
// ldmatrix.x4
template <bool kTransposed>
void load_matrices(uint32_t (&to)[4], const void* row) {
  const auto at = reinterpret_cast<uintptr_t>(row);
  const Words* const lanes =
      exchange({{static_cast<uint32_t>(at), static_cast<uint32_t>(uint64_t{at} >> 32)}});
  const unsigned lane = thread_index().x % 32, g = lane / 4, c = lane % 4;
  for (unsigned i = 0; i < 4; ++i) {
    to[i] = 0;
    for (unsigned j = 0; j < 2; ++j) {
      const Words& pointer = lanes[8 * i + (kTransposed ? 2 * c + j : g)];
      const auto* const elements = reinterpret_cast<const uint16_t*>(
          static_cast<uintptr_t>(pointer.of[0] | uint64_t{pointer.of[1]} << 32));
      to[i] |= uint32_t{elements[kTransposed ? g : 2 * c + j]} << 16 * j;
    }
  }
}

// Dependent launch (src/cuda/runtime.cuh).
void launch_dependents();
void wait_for_prerequisites();
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
      *config, [kernel, values] { std::apply(kernel, values); }, __PRETTY_FUNCTION__,
      reinterpret_cast<const void*>(kernel));
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
template <class... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute, int value) {
  return stand_in::allow_dynamic(reinterpret_cast<const void*>(kernel), static_cast<size_t>(value),
                                 kStandInSharedMemory);
}

// Of a device with eight groups of sixteen multiprocessors, and a few that no cluster gets.
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
void __syncwarp();
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
