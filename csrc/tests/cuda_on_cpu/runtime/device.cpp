// The device and its memory, from the host.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "cuda_runtime_api.h"
#include "fault.hpp"

namespace stand_in {

void fault(const std::string& what) {
  std::fprintf(stderr, "FAULT on the stand-in device: %s\n", what.c_str());
  std::_Exit(70);
}

namespace {

constexpr size_t kPage = 4096;
constexpr int kPoison = 0xc3;

struct Pages {
  unsigned char* first;
  size_t bytes;
};
std::map<void*, Pages> allocations;

}  // namespace
}  // namespace stand_in

using namespace stand_in;

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorNotSupported:
      return "operation not supported";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
  }
  return "unknown error";
}
cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return cudaSuccess; }

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  const size_t inside = (bytes + kPage - 1) / kPage * kPage;
  void* pages =
      mmap(nullptr, inside + 2 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return cudaErrorMemoryAllocation;
  unsigned char* first = static_cast<unsigned char*>(pages);
  mprotect(first, kPage, PROT_NONE);
  mprotect(first + kPage + inside, kPage, PROT_NONE);
  std::memset(first + kPage, kPoison, inside);
  *memory = first + kPage + inside - (bytes + 15) / 16 * 16;
  allocations[*memory] = {first, inside + 2 * kPage};
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  const cudaError_t error = cudaDeviceSynchronize();
  if (error != cudaSuccess || memory == nullptr) return error;
  const auto found = allocations.find(memory);
  if (found == allocations.end()) return cudaErrorInvalidValue;
  munmap(found->second.first, found->second.bytes);
  allocations.erase(found);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  const cudaError_t error = cudaDeviceSynchronize();
  if (error == cudaSuccess && bytes > 0) std::memcpy(to, from, bytes);
  return error;
}
