// Replaces the host side of the CUDA runtime, as far as the CUDA sources and their tests call it.
// Launches wait in their streams until something synchronises; then all streams run together, in an
// order drawn at random (README.md).
#pragma once

#include <cstddef>
#include <cstdint>

#define CUDART_VERSION 13000

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorNotSupported = 801,
  cudaErrorStreamCaptureUnsupported = 900,
};
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();

// One device. Its features follow from the architecture that the caller is compiled for.
#ifdef __CUDA_ARCH__
constexpr int kStandInArchitecture = __CUDA_ARCH__;
#else
constexpr int kStandInArchitecture = 900;
#endif
// Of a CTA: before sm_90 as on the devices that have least.
constexpr int kStandInSharedMemory = (kStandInArchitecture >= 900 ? 227 : 99) * 1024;
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
  cudaDevAttrClusterLaunch = 120,
};
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = 132;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = kStandInArchitecture / 100;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = kStandInSharedMemory;
      return cudaSuccess;
    case cudaDevAttrClusterLaunch:
      *value = kStandInArchitecture >= 900;
      return cudaSuccess;
  }
  return cudaErrorInvalidValue;
}
struct cudaFuncAttributes {
  int unused;
};
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel);

// Memory in separate pages, between pages that fault; 16-byte aligned.
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
cudaError_t cudaMalloc(void** memory, size_t bytes);
cudaError_t cudaFree(void* memory);
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);

struct CUstream_st;
using cudaStream_t = CUstream_st*;
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaStreamCreate(cudaStream_t* stream);
constexpr unsigned cudaStreamNonBlocking = 1;
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaDeviceSynchronize();

enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal };
struct StandInGraph;
using cudaGraph_t = StandInGraph*;
using cudaGraphExec_t = StandInGraph*;
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
// The graph so far; the addresses after it are not read.
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const void* dependencies, const void* edges, size_t* count);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);

// An object that lives as long as the graphs that retain it and their instances.
struct StandInUserObject;
using cudaUserObject_t = StandInUserObject*;
constexpr unsigned cudaUserObjectNoDestructorSync = 1, cudaGraphUserObjectMove = 1;
cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* argument, void (*release)(void*),
                                 unsigned references, unsigned flags);
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object,
                                      unsigned references, unsigned flags);

namespace stand_in {

// The order of everything from now on. The same seed gives the same order.
void seed(uint64_t seed);

// Clusters of n CTAs that have run since the program began; n from 1 to 16.
uint64_t clusters_run(int ctas);

// Kernels that began before the one before them in their stream had ended.
uint64_t early_kernels();

// Barriers that all threads have arrived at since the program began: once for each CTA, and once
// for each cluster.
struct Barriers {
  uint64_t of_ctas, of_clusters;
};
Barriers barriers_passed();
// Bytes that threads have read by asynchronous copies, bulk copies not counted.
uint64_t bytes_copied();

}  // namespace stand_in
