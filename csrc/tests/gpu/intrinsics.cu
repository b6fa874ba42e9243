#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "cuda/row_reader.cuh"
#include "cuda/runtime.cuh"
#include "gpu/intrinsics.hpp"

namespace {

namespace device = polyspec::POLYSPEC_CORE;

constexpr int kLanes = 32;
constexpr int kDoubles = 12;
constexpr int kPatterns = 10;
constexpr double kInf = std::numeric_limits<double>::infinity();

// Bit patterns of one type: zeros of both signs, numbers, infinities, quiet and signalling NaNs.
struct Patterns {
  uint32_t bits[kPatterns];
};
constexpr Patterns kOfFloat = {{0x00000000, 0x80000000, 0x3f800000, 0xbf800000, 0x7f800000,
                                0xff800000, 0x7fc00000, 0xffc00000, 0x7f800001, 0xffbfffff}};
constexpr Patterns kOfBFloat16 = {
    {0x0000, 0x8000, 0x3f80, 0xbf80, 0x7f80, 0xff80, 0x7fc0, 0xffc0, 0x7f81, 0xffbf}};
constexpr Patterns kOfFloat16 = {
    {0x0000, 0x8000, 0x3c00, 0xbc00, 0x7c00, 0xfc00, 0x7e00, 0xfe00, 0x7c01, 0xfdff}};

struct Answers {
  uint64_t whole[kDoubles];
  uint32_t larger[3][kPatterns][kPatterns];
  uint64_t smallest[kLanes], sum[kLanes], largest[kLanes];
};

struct ProbeParams {
  Answers* answers;
  double doubles[kDoubles];
  Patterns patterns[3];
  uint64_t values[kLanes];
};

// Of 16 bits the halves of a word are two elements: these bits, and the same turned around.
template <class T>
__device__ uint32_t larger(const Patterns& patterns, int a, int b) {
  if (sizeof(T) == 4) return device::larger_elements<T>(patterns.bits[a], patterns.bits[b]);
  const auto word = [&](int low, int high) {
    return patterns.bits[high] << 16 | patterns.bits[low];
  };
  return device::larger_elements<T>(word(a, b), word(b, a));
}

__global__ void probe_kernel(const __grid_constant__ ProbeParams p) {
  const int lane = static_cast<int>(threadIdx.x);
  if (lane < kDoubles) p.answers->whole[lane] = device::whole_part(p.doubles[lane]);
  if (lane < kPatterns) {
    for (int other = 0; other < kPatterns; ++other) {
      p.answers->larger[0][lane][other] = larger<float>(p.patterns[0], lane, other);
      p.answers->larger[1][lane][other] = larger<device::BFloat16>(p.patterns[1], lane, other);
      p.answers->larger[2][lane][other] = larger<device::Float16>(p.patterns[2], lane, other);
    }
  }
  p.answers->smallest[lane] = device::Smaller::of_warp(p.values[lane] >> 6);
  p.answers->sum[lane] = device::Plus::of_warp(p.values[lane] >> 6);
  p.answers->largest[lane] = device::BothLarger::of_warp(p.values[lane]);
}

void require(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

Answers answers_of(ProbeParams params) {
  void* memory = nullptr;
  require(cudaMalloc(&memory, sizeof(Answers)));
  params.answers = static_cast<Answers*>(memory);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(kLanes);
  require(polyspec::cuda::launch_kernel(&probe_kernel, config, params));
  require(cudaDeviceSynchronize());
  Answers answers;
  require(cudaMemcpy(&answers, memory, sizeof(Answers), cudaMemcpyDeviceToHost));
  require(cudaFree(memory));
  return answers;
}

// On the host, where functions of `device` end the program: nvcc compiles their calls to exit(1).
template <class T>
float number(uint32_t bits) {
  if constexpr (std::is_same<T, device::Float16>::value) {
    const int exponent = bits >> 10 & 31;
    const float fraction = static_cast<float>(bits & 1023);
    const float sign = bits & 0x8000 ? -1.0f : 1.0f;
    if (exponent == 31) return fraction == 0 ? sign * static_cast<float>(kInf) : std::nanf("");
    return sign * (exponent == 0 ? std::ldexp(fraction, -24)
                                 : std::ldexp(fraction + 1024.0f, exponent - 25));
  }
  const uint32_t wide = sizeof(T) == 2 ? bits << 16 : bits;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

bool is_larger(float got, float a, float b) {
  if (a != a || b != b) return got != got;
  return got == std::max(a, b);
}

template <class T>
void check_larger(const uint32_t (&got)[kPatterns][kPatterns], const Patterns& patterns,
                  const char* type, std::vector<std::string>* wrong) {
  for (int i = 0; i < kPatterns; ++i) {
    for (int j = 0; j < kPatterns; ++j) {
      const float a = number<T>(patterns.bits[i]), b = number<T>(patterns.bits[j]);
      bool right = is_larger(number<T>(got[i][j]), a, b);
      if (sizeof(T) == 2) right = right && is_larger(number<T>(got[i][j] >> 16), a, b);
      if (right) continue;
      char line[128];
      std::snprintf(line, sizeof line, "larger_elements<%s> of %08x and %08x: %08x", type,
                    patterns.bits[i], patterns.bits[j], got[i][j]);
      wrong->push_back(line);
    }
  }
}

}  // namespace

std::vector<std::string> intrinsics::wrong_answers() {
  ProbeParams params = {
      nullptr,
      {-1.0, -0.0, -0.75, -1e300, 0.0, 0.75, 1.999, 0x1p53, 3e15, 1e-310, 0x1p62 - 512, -kInf},
      {kOfFloat, kOfBFloat16, kOfFloat16},
      {}};
  for (int lane = 0; lane < kLanes; ++lane)
    params.values[lane] = static_cast<uint64_t>(lane + 1) * 0x9e3779b97f4a7c15u;
  const Answers got = answers_of(params);
  std::vector<std::string> wrong;
  for (int i = 0; i < kDoubles; ++i) {
    const double value = params.doubles[i];
    const uint64_t expected = value > 0 ? static_cast<uint64_t>(value) : 0;
    if (got.whole[i] != expected)
      wrong.push_back("whole_part(" + std::to_string(value) + "): " + std::to_string(got.whole[i]));
  }
  check_larger<float>(got.larger[0], params.patterns[0], "float", &wrong);
  check_larger<device::BFloat16>(got.larger[1], params.patterns[1], "bfloat16", &wrong);
  check_larger<device::Float16>(got.larger[2], params.patterns[2], "float16", &wrong);
  uint64_t smallest = ~uint64_t{0}, sum = 0;
  int32_t high = INT32_MIN, low = INT32_MIN;  // of the halves
  for (const uint64_t value : params.values) {
    smallest = std::min(smallest, value >> 6);
    sum += value >> 6;
    high = std::max(high, static_cast<int32_t>(value >> 32));
    low = std::max(low, static_cast<int32_t>(value & 0xffffffffu));
  }
  const uint64_t largest =
      static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 | static_cast<uint32_t>(low);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (got.smallest[lane] != smallest || got.sum[lane] != sum || got.largest[lane] != largest) {
      wrong.push_back("reductions of a warp, lane " + std::to_string(lane));
    }
  }
  return wrong;
}
