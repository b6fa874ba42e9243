// What the kernels' instructions answer in corners that a CPU cannot settle. Part of cuda_test.
#pragma once

#include <string>
#include <vector>

namespace intrinsics {

// Runs them on the current device; one line for each answer that is not what the kernels take it
// for. Throws std::runtime_error with CUDA's own words where the device fails.
std::vector<std::string> wrong_answers();

}  // namespace intrinsics
