// The CUDA backend of polyspec::sample and polyspec::verify. Without POLYSPEC_CUDA stub.cpp answers
// kUnsupported.
#pragma once

#include <string>
#include <vector>

#include "polyspec/verify_tree.hpp"

namespace polyspec::cuda {

// Arguments are checked already (operators.cpp). Both launch on stream.cuda and return.
Result sample(const SampleParams& params, const Stream& stream);
Result verify(const VerifyParams& params, const Stream& stream);
Result verify_tree(const VerifyTreeParams& params, const Stream& stream);

// As clear_workspace and is_capturing of verify.hpp.
Result clear(void* memory, int64_t bytes, const Stream& stream);
bool is_capturing(const Stream& stream);

// Whether a device that these kernels run on is there. Never fails.
bool available();

// From now on a group has this many CTAs, 1, 2, 4 or 8, and where there is a workspace so many
// groups at most share the rows of blocks out, for any batch, and trees have one for each row;
// `groups` 0: each request has a group that walks. 0 and -1: the backend chooses. For tests and
// measurements. Results do not depend on it.
// A cluster that cannot be launched is then an error. `shared_memory`: bytes that the device gives
// a CTA for streamed weights and for many queries; 0: all. Where `groups` is not -1, attention has
// as many CTAs as it needs, or up to `groups`.
void force_shape(int ctas, int groups, int shared_memory = 0);

// How many clusters of so many CTAs of a kernel the device runs at the same time, as
// cudaOccupancyMaxActiveClusters has answered the launches so far. For tests and measurements.
struct ActiveClusters {
  std::string kernel;
  int ctas, clusters;
};
std::vector<ActiveClusters> active_clusters();

}  // namespace polyspec::cuda
