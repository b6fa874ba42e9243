// How the kernels are launched: over CTAs or clusters, on a stream.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <type_traits>

#include "cuda/kernels.cuh"
#include "cuda/launch.hpp"
#include "cuda/launch_shape.hpp"
#include "cuda/runtime.cuh"

namespace polyspec::cuda {

constexpr int kMostDevices = 64;

// Properties of the current device for launches, queried once per device. `clusters` is false where
// the attribute cannot be read.
struct DeviceShape {
  int device = 0;
  int multiprocessors = 0;
  bool clusters = false;
  int shared_memory = 0;  // bytes that a CTA may ask for; 0: not known
};
DeviceShape current_device();

// Instead of launch_shape.hpp's choices, for tests (force_shape); 0 and -1: none.
extern std::atomic<int> forced_ctas;
extern std::atomic<int> forced_groups;
extern std::atomic<int> forced_memory;  // 0: none

// Lets launches of a kernel ask for so many bytes of dynamic shared memory: once for each device.
template <auto kernel>
cudaError_t allow_dynamic(const DeviceShape& device, int bytes) {
  static std::atomic<int> allowed[kMostDevices];
  const bool known = device.multiprocessors > 0;  // its number as well
  if (known && allowed[device.device].load(std::memory_order_relaxed) == bytes) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess && known) {
    allowed[device.device].store(bytes, std::memory_order_relaxed);
  } else if (error != cudaSuccess) {
    cudaGetLastError();
  }
  return error;
}

// A launch over groups of `ctas` CTAs, clusters when there are several.
class GroupLaunch {
 public:
  GroupLaunch(int64_t groups, int ctas, int threads, CUstream_st* stream, int dynamic = 0) {
    const int64_t most = 0x7fffffff / ctas;  // beyond it a group takes several requests
    if (groups > most) groups = most;
    config_.gridDim = dim3(static_cast<unsigned>(groups * ctas));
    config_.blockDim = dim3(static_cast<unsigned>(threads));
    config_.stream = stream;
    config_.dynamicSmemBytes = static_cast<size_t>(dynamic);
    config_.attrs = attributes_;
    if (ctas > 1) {
      cudaLaunchAttribute& cluster = attributes_[config_.numAttrs++];
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim = {static_cast<unsigned>(ctas), 1, 1};
    }
  }
  GroupLaunch(const GroupLaunch&) = delete;
  GroupLaunch& operator=(const GroupLaunch&) = delete;
  const cudaLaunchConfig_t& config() const { return config_; }

 private:
  cudaLaunchAttribute attributes_[1] = {};
  cudaLaunchConfig_t config_ = {};
};

// Keeps an answer of cudaOccupancyMaxActiveClusters for active_clusters (launch.hpp).
void note_active_clusters(const char* kernel, int ctas, int clusters);

// How many groups of `ctas` CTAs of a kernel the device runs at the same time: a cluster lies
// within a part of the device, so that some multiprocessors may be left over. 0: it runs none of
// that size. Asked once for each kernel, size and device.
template <auto kernel>
int64_t groups_at_once(const DeviceShape& device, int ctas, int threads, int dynamic = 0) {
  if (ctas == 1) return device.multiprocessors;
  static std::atomic<int> known[kMostDevices][kMaxClusterCtas + 1];  // one more; 0: not asked yet
  std::atomic<int>& own = known[device.device][ctas];
  int found = own.load(std::memory_order_relaxed) - 1;
  if (found < 0) {
    const GroupLaunch launch(1, ctas, threads, nullptr, dynamic);
    if (cudaOccupancyMaxActiveClusters(&found, kernel, &launch.config()) != cudaSuccess) {
      cudaGetLastError();
      found = 0;
    }
    note_active_clusters(__PRETTY_FUNCTION__, ctas, found);
    own.store(found + 1, std::memory_order_relaxed);
  }
  return found;
}

// Launches with `ctas` CTAs per group, 0: as many as fit the device, all groups at the same time: a
// group more than the device runs at once would begin when others end. Where a cluster cannot be
// launched (a slice of a device, say) groups of one CTA do the same, and standard error says so
// once; a size that is forced is launched, or its error returned.
template <auto kernel, class Params>
cudaError_t launch(int64_t groups, int threads, const Params& params, const Stream& stream,
                   int ctas = 0) {
  const DeviceShape device = current_device();
  const int forced = forced_ctas.load(std::memory_order_relaxed);
  if (!device.clusters) {
    ctas = 1;
  } else if (forced != 0) {
    ctas = forced;
    groups_at_once<kernel>(device, ctas, threads);  // for active_clusters
  } else {
    if (ctas == 0) ctas = ctas_per_group(groups, params.vocab, device.multiprocessors);
    while (ctas > 1 && groups_at_once<kernel>(device, ctas, threads) < groups) ctas /= 2;
  }
  const cudaError_t error =
      launch_kernel(kernel, GroupLaunch(groups, ctas, threads, stream.cuda).config(), params);
  if (error == cudaSuccess || ctas == 1 || forced != 0) return error;
  static std::atomic<bool> said{false};
  if (!said.exchange(true)) {
    std::fprintf(stderr, "polyspec: clusters of %d CTAs cannot be launched (%s): one CTA each\n",
                 ctas, cudaGetErrorString(error));
  }
  return launch_kernel(kernel, GroupLaunch(groups, 1, threads, stream.cuda).config(), params);
}

// f(an integral_constant of the requests): launches the kernel compiled for them.
template <class F>
cudaError_t with_requests(Requests requests, const F& f) {
  if (requests == Requests::kGreedy)
    return f(std::integral_constant<Requests, Requests::kGreedy>());
  if (requests == Requests::kUnfiltered)
    return f(std::integral_constant<Requests, Requests::kUnfiltered>());
  return f(std::integral_constant<Requests, Requests::kAny>());
}

template <class T, Rule rule, Requests kind>
cudaError_t launch_rule(const VerifyParams& params, const Stream& stream) {
  constexpr int kThreads = rule == Rule::kBlock ? kResidualThreads : kVerifyThreads;
  const DeviceShape device = current_device();
  const int64_t rows = params.draft_len + 1;
  const auto groups_of = [&](bool clusters) {
    constexpr bool kResiduals = rule == Rule::kBlock && kind == Requests::kUnfiltered;
    return row_groups(params.batch, rows, params.vocab, device.multiprocessors, clusters,
                      kResiduals);
  };
  RowGroups chosen = groups_of(device.clusters);
  constexpr auto kRowsKernel = rows_kernel<T, rule, kind, kThreads>;
  const int64_t at_once = groups_at_once<kRowsKernel>(device, chosen.ctas, kThreads);
  if (at_once == 0) {
    chosen = groups_of(false);
  } else if (chosen.groups > at_once) {
    chosen.groups = at_once;  // one more would begin when others end, with a row that has waited
  }
  const int forced = forced_groups.load(std::memory_order_relaxed);
  if (forced >= 0) {
    const bool fits = has_room(params.batch, rows) && rows <= kMarkedRows;
    chosen.groups = fits ? std::min<int64_t>(forced, params.batch * rows) : 0;
  }
  if (params.workspace != nullptr && chosen.groups > 0) {
    return launch<kRowsKernel>(chosen.groups, kThreads, params, stream, chosen.ctas);
  }
  return launch<verify_kernel<T, rule, kind, kThreads>>(params.batch, kThreads, params, stream);
}

// The kernels of one element type, each in a separate file: verify_<type>.cu. Greedy requests give
// the same under both rules.
template <class T>
cudaError_t launch_verify_kernel(const VerifyParams& params, const Stream& stream) {
  // A separate kernel, for both rules and requests of any kind.
  if (params.allowed != nullptr)
    return launch_rule<core::Masked<T>, Rule::kBlock, Requests::kAny>(params, stream);
  const bool typed = params.draft_logits == nullptr || params.draft_dtype == core::kDTypeOf<T>;
  return with_requests(requests_of(params.sampling, typed), [&](auto requests) {
    constexpr Requests kind = decltype(requests)::value;
    if constexpr (kind != Requests::kGreedy) {
      if (params.rule == Rule::kBlock) return launch_rule<T, Rule::kBlock, kind>(params, stream);
    }
    return launch_rule<T, Rule::kToken, kind>(params, stream);
  });
}

template <class T>
cudaError_t launch_verify(const VerifyParams& params, const Stream& stream);

// Trees by the block rule: verify_paths.cu. Not for greedy requests.
Result launch_paths(const VerifyTreeParams& params, Requests requests, const Stream& stream);

}  // namespace polyspec::cuda
