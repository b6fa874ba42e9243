// How the kernels are launched: over CTAs or clusters, on a stream, with or without overlap.
#pragma once

#include <algorithm>
#include <atomic>

#include "cuda/kernels.cuh"
#include "cuda/launch.hpp"
#include "cuda/launch_shape.hpp"
#include "cuda/runtime.cuh"

namespace polyspec::cuda {

// What launches ask of the current device, found out once per device. `clusters` is false where the
// attribute cannot be read.
struct DeviceShape {
  int multiprocessors = 0;
  bool clusters = false;
};
DeviceShape current_device();

// In place of launch_shape.hpp's choices, for tests (force_shape); 0 and -1: none.
extern std::atomic<int> forced_ctas;
extern std::atomic<int> forced_groups;

// Launches a kernel over groups of `ctas` CTAs, clusters when there are several.
template <class Params>
cudaError_t launch_over(void (*kernel)(Params), int64_t groups, int ctas, int threads,
                        const Params& params, const Stream& stream) {
  const int64_t most = 0x7fffffff / ctas;  // beyond it a group takes several requests
  if (groups > most) groups = most;
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(groups * ctas));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream.cuda;
  config.attrs = attributes;
  if (ctas > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim = {static_cast<unsigned>(ctas), 1, 1};
    ++config.numAttrs;
  }
  if (stream.overlap) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs].val.programmaticStreamSerializationAllowed = 1;
    ++config.numAttrs;
  }
  return launch_kernel(kernel, config, params);
}

// Launches with `ctas` CTAs per group, 0: as many as fit the device. Where a cluster cannot be had
// (a slice of a device, say) groups of one CTA do the same.
template <class Params>
cudaError_t launch(void (*kernel)(Params), int64_t groups, int threads, const Params& params,
                   const Stream& stream, int ctas = 0) {
  const DeviceShape device = current_device();
  const int forced = forced_ctas.load(std::memory_order_relaxed);
  if (forced != 0) ctas = forced;
  if (ctas == 0) ctas = ctas_per_group(groups, params.vocab, device.multiprocessors);
  Stream on = stream;
  on.overlap = stream.overlap && device.clusters;  // both came with sm_90
  if (ctas > 1 && device.clusters &&
      launch_over(kernel, groups, ctas, threads, params, on) == cudaSuccess) {
    return cudaSuccess;
  }
  return launch_over(kernel, groups, 1, threads, params, on);
}

template <class T, Rule rule>
cudaError_t launch_rule(const VerifyParams& params, const Stream& stream) {
  constexpr int kThreads = rule == Rule::kBlock ? kResidualThreads : kVerifyThreads;
  const DeviceShape device = current_device();
  const int64_t rows = params.draft_len + 1;
  RowGroups chosen =
      row_groups(params.batch, rows, params.vocab, device.multiprocessors, device.clusters);
  const int forced = forced_groups.load(std::memory_order_relaxed);
  if (forced >= 0) {
    const bool fits = has_room(params.batch, rows) && rows <= kMarkedRows;
    chosen.groups = fits ? std::min<int64_t>(forced, params.batch * rows) : 0;
  }
  if (params.workspace != nullptr && chosen.groups > 0) {
    return launch(rows_kernel<T, rule, kThreads>, chosen.groups, kThreads, params, stream,
                  chosen.ctas);
  }
  return launch(verify_kernel<T, rule, kThreads>, params.batch, kThreads, params, stream);
}

// The kernels of one element type, each in a file of its own: verify_<type>.cu.
template <class T>
cudaError_t launch_verify_kernel(const VerifyParams& params, const Stream& stream) {
  return params.rule == Rule::kToken ? launch_rule<T, Rule::kToken>(params, stream)
                                     : launch_rule<T, Rule::kBlock>(params, stream);
}

template <class T>
cudaError_t launch_verify(const VerifyParams& params, const Stream& stream);

}  // namespace polyspec::cuda
