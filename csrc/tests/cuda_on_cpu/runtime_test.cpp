// The replacement of CUDA itself: kernels that use it rightly, and kernels with one mistake each,
// which has to be found.
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "cuda_runtime.h"
#include "support/check.hpp"

namespace {

constexpr unsigned kAll = 0xffffffffu;

template <class T>
class Device {
 public:
  explicit Device(size_t n) {
    CHECK(cudaMalloc(reinterpret_cast<void**>(&data), n * sizeof(T)) == cudaSuccess);
    std::memset(data, 0, n * sizeof(T));
  }
  ~Device() { cudaFree(data); }
  T* data;
};

template <class... Params, class... Args>
cudaError_t run(void (*kernel)(Params...), unsigned ctas, unsigned threads, unsigned cluster,
                const Args&... args) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(ctas);
  config.blockDim = dim3(threads);
  config.attrs = &attribute;
  config.numAttrs = 1;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args...);
  return error == cudaSuccess ? cudaDeviceSynchronize() : error;
}

// Each CTA writes its sum into the next one's shared memory.
__global__ void pass_on(unsigned* sums) {
  POLYSPEC_SHARED(unsigned, passed);
  const unsigned ctas = __clusterSizeInBlocks(), rank = __clusterRelativeBlockRank();
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
  unsigned sum = threadIdx.x;
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAll, sum, step);
  if (threadIdx.x == 0)
    *static_cast<unsigned*>(__cluster_map_shared_rank(&passed, (rank + 1) % ctas)) = sum + rank;
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
  if (threadIdx.x == 0) sums[blockIdx.x] = passed;
}

void test_clusters() {
  for (unsigned ctas = 1; ctas <= 16; ++ctas) {
    Device<unsigned> sums(3 * ctas);
    const uint64_t before = stand_in::clusters_run(static_cast<int>(ctas));
    CHECK(run(pass_on, 3 * ctas, 32, ctas, sums.data) == cudaSuccess);
    CHECK_EQ(uint64_t{3}, stand_in::clusters_run(static_cast<int>(ctas)) - before);
    for (unsigned i = 0; i < 3 * ctas; ++i) CHECK_EQ(496 + (i + ctas - 1) % ctas, sums.data[i]);
  }
  Device<unsigned> sums(34);
  CHECK(run(pass_on, 34, 32, 17, sums.data) == cudaErrorInvalidConfiguration);
  CHECK(run(pass_on, 3, 32, 2, sums.data) == cudaErrorInvalidConfiguration);
  CHECK(run(pass_on, 0, 32, 1, sums.data) == cudaErrorInvalidConfiguration);
}

// The order in which threads come is another with every seed, and the same with the same.
__global__ void line_up(unsigned* next, unsigned* order) {
  order[atomicAdd(next, 1u)] = blockIdx.x * 64 + threadIdx.x;
}

std::vector<unsigned> order_of(uint64_t seed) {
  Device<unsigned> next(1), order(256);
  stand_in::seed(seed);
  CHECK(run(line_up, 4, 64, 1, next.data, order.data) == cudaSuccess);
  return {order.data, order.data + 256};
}

void test_order() {
  CHECK(order_of(1) == order_of(1));
  CHECK(order_of(1) != order_of(2));
}

// The first launch waits for a value that the second writes: only in two streams does that end.
__global__ void spin(unsigned* flag) {
  while (atomicAdd(flag, 0u) == 0) {
  }
}
__global__ void set(unsigned* flag) { atomicAdd(flag, 1u); }

void test_two_streams() {
  Device<unsigned> flag(1);
  cudaStream_t streams[2];
  for (cudaStream_t& stream : streams) cudaStreamCreate(&stream);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(32);
  config.stream = streams[0];
  CHECK(cudaLaunchKernelEx(&config, spin, flag.data) == cudaSuccess);
  config.stream = streams[1];
  CHECK(cudaLaunchKernelEx(&config, set, flag.data) == cudaSuccess);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK_EQ(32u, *flag.data);
  for (const cudaStream_t stream : streams) cudaStreamDestroy(stream);
}

void test_capture() {
  Device<unsigned> flag(1);
  cudaStream_t stream;
  cudaStreamCreate(&stream);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(32);
  config.stream = stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
  CHECK(cudaLaunchKernelEx(&config, set, flag.data) == cudaSuccess);
  CHECK(cudaStreamSynchronize(stream) == cudaErrorStreamCaptureUnsupported);
  CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  CHECK(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK_EQ(0u, *flag.data);
  for (int i = 0; i < 2; ++i) CHECK(cudaGraphLaunch(executable, stream) == cudaSuccess);
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  CHECK_EQ(64u, *flag.data);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

// The second kernel begins before the first has ended, and sees the first one's writes.
// kWaits: whether it waits.
__global__ void write_late(unsigned* values) {
  stand_in::launch_dependents();
  for (int i = 0; i < 1000; ++i) atomicAdd(&values[0], 1u);
}
template <bool kWaits>
__global__ void read_early(unsigned* values) {
  if (kWaits) stand_in::wait_for_prerequisites();
  if (threadIdx.x == 0) values[1] = values[0];
}

template <bool kWaits>
void run_dependent(unsigned* values) {
  cudaLaunchAttribute dependent = {};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(32);
  CHECK(cudaLaunchKernelEx(&config, write_late, values) == cudaSuccess);
  config.attrs = &dependent;
  config.numAttrs = 1;
  CHECK(cudaLaunchKernelEx(&config, read_early<kWaits>, values) == cudaSuccess);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
}

void test_dependent_launch() {
  Device<unsigned> values(2);
  const uint64_t before = stand_in::early_kernels();
  run_dependent<true>(values.data);
  CHECK_EQ(uint64_t{1}, stand_in::early_kernels() - before);
  CHECK_EQ(32000u, values.data[1]);
}

struct alignas(16) Sixteen {
  unsigned char bytes[32];
};

// A warp's product of matrices of small whole numbers, in dynamic shared memory by copies.
struct Matrices {
  uint16_t a[16][16], b[8][16];
};

__global__ void multiply(const Matrices* in, float* out) {
  POLYSPEC_DYNAMIC_SHARED(Matrices, shared);
  unsigned char* const to = reinterpret_cast<unsigned char*>(&shared);
  for (unsigned at = 16 * threadIdx.x; at < sizeof(Matrices); at += 16 * 32)
    stand_in::copy_async(to + at, reinterpret_cast<const unsigned char*>(in) + at, 16);
  stand_in::end_batch();
  stand_in::wait_for_batches(0);
  __syncthreads();
  const unsigned g = threadIdx.x / 4, c = threadIdx.x % 4;
  const auto pair = [](const uint16_t* at) { return at[0] | uint32_t{at[1]} << 16; };
  const uint32_t a[4] = {pair(&shared.a[g][2 * c]), pair(&shared.a[g + 8][2 * c]),
                         pair(&shared.a[g][2 * c + 8]), pair(&shared.a[g + 8][2 * c + 8])};
  float sum[4] = {0.5f, 0.5f, 0.5f, 0.5f};
  stand_in::multiply(sum, a, pair(&shared.b[g][2 * c]), pair(&shared.b[g][2 * c + 8]),
                     [](uint16_t bits) { return static_cast<float>(bits); });
  for (unsigned j = 0; j < 4; ++j) out[(g + j / 2 * 8) * 8 + 2 * c + j % 2] = sum[j];
}

void test_product() {
  Device<Matrices> in(1);
  Device<float> out(128);
  for (unsigned i = 0; i < 256; ++i) in.data->a[i / 16][i % 16] = static_cast<uint16_t>(i * i % 37);
  for (unsigned i = 0; i < 128; ++i) in.data->b[i / 16][i % 16] = static_cast<uint16_t>(i * i % 29);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(32);
  config.dynamicSmemBytes = 64 * 1024;
  const auto launch = [&] { return cudaLaunchKernelEx(&config, multiply, in.data, out.data); };
  CHECK(launch() == cudaErrorInvalidValue);  // without leave
  const auto allow = [](int bytes) {
    return cudaFuncSetAttribute(multiply, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  };
  CHECK(allow(228 * 1024) == cudaErrorInvalidValue);
  CHECK(allow(64 * 1024) == cudaSuccess);
  CHECK(launch() == cudaSuccess);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  for (unsigned i = 0; i < 128; ++i) {
    float sum = 0.5f;
    for (unsigned k = 0; k < 16; ++k)
      sum += static_cast<float>(in.data->a[i / 8][k] * in.data->b[i % 8][k]);
    CHECK_EQ(sum, out.data[i]);
  }
}

// A warp brings four blocks of numbers through a ring of two, and sums them up.
struct Ring {
  unsigned numbers[2][32];
  uint64_t full[2];
};

// Of `kMistake` 1 it does not wait; 2: for the wrong phase; 3: it overwrites values that others
// read; 4: a phase has two copies; 5: it leaves before its last
// copy.
template <int kMistake>
__global__ void sum_blocks(const unsigned* in, unsigned* out) {
  POLYSPEC_SHARED(Ring, ring);
  const unsigned lane = threadIdx.x % 32;
  if (lane == 0) {
    stand_in::make_barrier(&ring.full[0]);
    stand_in::make_barrier(&ring.full[1]);
  }
  __syncwarp();
  const auto load = [&](unsigned block) {
    if (block >= 4 || lane != 0) return;
    stand_in::copy_bulk(ring.numbers[block % 2], in + 32 * block, 128, &ring.full[block % 2]);
    if (kMistake == 4)
      stand_in::copy_bulk(ring.numbers[block % 2], in + 32 * block, 128, &ring.full[block % 2]);
  };
  load(0);
  load(1);
  unsigned sum = 0;
  for (unsigned block = 0; block < 4; ++block) {
    if (kMistake != 1)
      stand_in::wait_for_phase(&ring.full[block % 2],
                               static_cast<int>(block / 2 + (kMistake == 2)) % 2);
    for (unsigned i = 0; i < 32; ++i) sum += ring.numbers[block % 2][(i + lane) % 32];
    if (kMistake != 3) __syncwarp();
    load(block + 2);
  }
  if (kMistake == 5 && lane == 0) stand_in::copy_bulk(ring.numbers[0], in, 128, &ring.full[0]);
  out[threadIdx.x] = sum;
}

// Whether the sums of some runs are all right; a run in which a fault is found ends the program.
template <int kMistake>
bool sums_are_right() {
  Device<unsigned> in(128), out(32);
  unsigned expected = 0;
  for (unsigned i = 0; i < 128; ++i) expected += in.data[i] = i * i + 1;
  bool right = true;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    stand_in::seed(seed);
    CHECK(run(sum_blocks<kMistake>, 1, 32, 1, in.data, out.data) == cudaSuccess);
    for (unsigned i = 0; i < 32; ++i) right = right && out.data[i] == expected;
  }
  return right;
}

void test_bulk_copies() { CHECK(sums_are_right<0>()); }

// Kernels with a mistake.
__global__ void one_warp_skips_the_barrier(unsigned*) {
  if (threadIdx.x < 32) __syncthreads();
}
__global__ void one_lane_skips_the_shuffle(unsigned* out) {
  if (threadIdx.x % 32 != 5) *out = __shfl_sync(kAll, 1u, 0);
}
__global__ void lanes_shuffle_differently(unsigned* out) {
  if (threadIdx.x % 2 == 0) {
    *out = __shfl_xor_sync(kAll, 1u, 1);
  } else {
    *out = __shfl_up_sync(kAll, 1u, 1);
  }
}
__global__ void does_not_wait_for_the_others_to_begin(unsigned* out) {
  POLYSPEC_SHARED(unsigned, value);
  value = 1;
  for (unsigned rank = 0; rank < __clusterSizeInBlocks(); ++rank)
    *out += *static_cast<unsigned*>(__cluster_map_shared_rank(&value, rank));
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
}
__global__ void does_not_wait_for_the_others_to_end(unsigned* out) {
  POLYSPEC_SHARED(unsigned, value);
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
  for (unsigned rank = 0; rank < __clusterSizeInBlocks(); ++rank)
    *out += *static_cast<unsigned*>(__cluster_map_shared_rank(&value, rank));
}
__global__ void arrives_twice(unsigned*) {
  __cluster_barrier_arrive();
  __cluster_barrier_arrive();
}
__global__ void ends_without_waiting(unsigned*) { __cluster_barrier_arrive(); }
__global__ void reads_behind_the_end(unsigned* out) { *out = out[4]; }
__global__ void maps_what_is_not_shared(unsigned* out) { __cluster_map_shared_rank(out, 0); }
__global__ void synchronises_the_device(unsigned*) { cudaDeviceSynchronize(); }
__global__ void does_not_wait_for_its_copies(unsigned* out) {
  POLYSPEC_SHARED(Sixteen, copied);
  stand_in::copy_async(copied.bytes, out, 16);
}
__global__ void copies_to_what_is_not_shared(unsigned* out) { stand_in::copy_async(out, out, 16); }
__global__ void copies_eight_bytes_behind(unsigned* out) {
  POLYSPEC_SHARED(Sixteen, copied);
  stand_in::copy_async(copied.bytes + 8, out, 16);
}
__global__ void copies_bulks_by_eight_bytes(unsigned* out) {
  POLYSPEC_SHARED(Ring, ring);
  stand_in::make_barrier(&ring.full[threadIdx.x % 2]);
  stand_in::copy_bulk(ring.numbers[0], out, 24, &ring.full[threadIdx.x % 2]);
}
__global__ void copies_without_a_barrier(unsigned* out) {
  POLYSPEC_SHARED(Ring, ring);
  stand_in::copy_bulk(ring.numbers[0], out, 16, &ring.full[0]);
}
__global__ void waits_for_nothing(unsigned*) {
  POLYSPEC_SHARED(Ring, ring);
  if (threadIdx.x > 0) return;
  stand_in::make_barrier(&ring.full[0]);
  stand_in::wait_for_phase(&ring.full[0], 0);
}
__global__ void asks_for_no_dynamic_memory(unsigned*) {
  POLYSPEC_DYNAMIC_SHARED(unsigned, value);
  value = 1;
}

__global__ void makes_no_mistake(unsigned* out) {
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(out, __clusterRelativeBlockRank());
}

// Runs in a separate process; returns the fault found, "" if none.
template <class Run>
std::string found_by(const Run& in_process) {
  int ends[2];
  CHECK_EQ(0, pipe(ends));
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    in_process();
    _exit(0);
  }
  close(ends[1]);
  std::string message;
  char text[256];
  for (ssize_t n; (n = read(ends[0], text, sizeof text)) > 0;)
    message.append(text, static_cast<size_t>(n));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV) message += "SIGSEGV";
  return message;
}

std::string found_in(void (*kernel)(unsigned*)) {
  return found_by([&] {
    Device<unsigned> out(4);
    run(kernel, 8, 64, 4, out.data);
  });
}

// `message`: "": any of several, by the order of the threads.
template <int kMistake>
void check_bulk_mistake(const char* message) {
  const std::string found = found_by([] {
    if (!sums_are_right<kMistake>()) std::fprintf(stderr, "other sums");
  });
  if (found.empty() || found.find(message) == std::string::npos)
    check::fail(__FILE__, __LINE__, message, found);
}

void test_faults() {
  check_bulk_mistake<1>("ends without having waited for its bulk copies");
  check_bulk_mistake<2>("deadlock");
  check_bulk_mistake<3>("");
  check_bulk_mistake<4>("");
  check_bulk_mistake<5>("ends without having waited for its bulk copies");

  const struct {
    void (*kernel)(unsigned*);
    const char* message;
  } kFaults[] = {
      {one_warp_skips_the_barrier, "deadlock"},
      {one_lane_skips_the_shuffle, "deadlock"},
      {lanes_shuffle_differently, "different shuffles"},
      {does_not_wait_for_the_others_to_begin, "has not begun"},
      {does_not_wait_for_the_others_to_end, "has ended"},
      {arrives_twice, "arrives twice"},
      {ends_without_waiting, "between the halves"},
      {reads_behind_the_end, "SIGSEGV"},
      {maps_what_is_not_shared, "not in this one's shared memory"},
      {synchronises_the_device, "the host's side"},
      {does_not_wait_for_its_copies, "without having waited for its copies"},
      {copies_to_what_is_not_shared, "not to shared memory"},
      {copies_eight_bytes_behind, "not of 16 aligned bytes"},
      {copies_bulks_by_eight_bytes, "not of 16 aligned bytes"},
      {copies_without_a_barrier, "was not made"},
      {waits_for_nothing, "for bulk copies"},
      {asks_for_no_dynamic_memory, "more dynamic shared memory than the launch asked for"},
  };
  for (const auto& fault : kFaults) {
    const std::string found = found_in(fault.kernel);
    if (found.find(fault.message) == std::string::npos)
      check::fail(__FILE__, __LINE__, fault.message, found);
  }
  CHECK_EQ(std::string(), found_in(makes_no_mistake));
  const std::string found = found_by([] {
    Device<unsigned> values(2);
    run_dependent<false>(values.data);
  });
  if (found.find("without having waited for the kernels before") == std::string::npos)
    check::fail(__FILE__, __LINE__, "a kernel that does not wait", found);
}

}  // namespace

int main() {
  test_clusters();
  test_order();
  test_two_streams();
  test_capture();
  test_dependent_launch();
  test_product();
  test_bulk_copies();
  test_faults();
  return 0;
}
