// The CUDA backend's entry points: kernels by the logits' element type, queries of the device.
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "cuda/launch.cuh"

namespace polyspec::cuda {
namespace {

std::mutex answers_mutex;
std::vector<ActiveClusters> answers;

__global__ void probe() {}

// Whether this build has code for the current device; this makes its context, as the first launch
// would.
bool has_image() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&probe)) == cudaSuccess;
}

bool current_device_runs_kernels() {
  int count = 0;
  int device = 0;
  int major = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0 &&
         cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major >= 8 && has_image();
}

}  // namespace

std::atomic<int> forced_ctas{0};
std::atomic<int> forced_groups{-1};
std::atomic<int> forced_memory{0};

void force_shape(int ctas, int groups, int shared_memory) {
  forced_ctas.store(ctas, std::memory_order_relaxed);
  forced_groups.store(groups, std::memory_order_relaxed);
  forced_memory.store(shared_memory, std::memory_order_relaxed);
}

void note_active_clusters(const char* kernel, int ctas, int clusters) {
  const std::lock_guard<std::mutex> lock(answers_mutex);
  answers.push_back({kernel, ctas, clusters});
}

std::vector<ActiveClusters> active_clusters() {
  const std::lock_guard<std::mutex> lock(answers_mutex);
  return answers;
}

Result clear(void* memory, int64_t bytes, const Stream& stream) {
  cudaError_t error = cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), stream.cuda);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream.cuda);
  if (error != cudaSuccess) cudaGetLastError();
  return result_of(error);
}

bool is_capturing(const Stream& stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream.cuda, &status) != cudaSuccess) cudaGetLastError();
  return status != cudaStreamCaptureStatusNone;
}

bool is_dependent(CUstream_st* stream) {
  static const bool wanted = [] {
    const char* const value = std::getenv("POLYSPEC_DEPENDENT_LAUNCH");
    return value == nullptr || std::strcmp(value, "0") != 0;
  }();
  return wanted && current_device().clusters && cuda::is_capturing(Stream::on(stream));
}

DeviceShape current_device() {
  // Multiprocessors * 2 + clusters, and bytes of shared memory; 0: not asked yet.
  static std::atomic<int> known[kMostDevices], shared[kMostDevices];
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMostDevices) {
    cudaGetLastError();
    return {};
  }
  int shape = known[device].load(std::memory_order_acquire);
  if (shape == 0) {
    int multiprocessors = 1;
    int clusters = 0;
    if (cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) !=
            cudaSuccess ||
        cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, device) != cudaSuccess) {
      cudaGetLastError();
      clusters = 0;
    }
    int bytes = 0;
    if (cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
        cudaSuccess) {
      cudaGetLastError();
      bytes = 0;
    }
    shared[device].store(bytes, std::memory_order_relaxed);
    shape = multiprocessors * 2 + (clusters != 0);
    known[device].store(shape, std::memory_order_release);
  }
  return {device, shape / 2, shape % 2 != 0, shared[device].load(std::memory_order_relaxed)};
}

Result verify(const VerifyParams& params, const Stream& stream) {
  switch (params.target_dtype) {
    case DType::kFloat32:
      return result_of(launch_verify<float>(params, stream));
    case DType::kBFloat16:
      return result_of(launch_verify<core::BFloat16>(params, stream));
    case DType::kFloat16:
      return result_of(launch_verify<core::Float16>(params, stream));
  }
  return {Result::Code::kInvalidArgument, "target_dtype: expected a DType, given another number"};
}

bool available() {
  const bool runs = current_device_runs_kernels();
  if (!runs) cudaGetLastError();  // a machine without a device is no error of anybody's
  return runs;
}

}  // namespace polyspec::cuda
