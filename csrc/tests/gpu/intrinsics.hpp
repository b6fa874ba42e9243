// The results of the kernels' instructions in corners that a CPU cannot settle. Part of cuda_test.
#pragma once

#include <string>
#include <vector>

namespace intrinsics {

// Runs them on the current device; one line for each result that the kernels do not expect. Throws
// std::runtime_error with CUDA's message where the device fails.
std::vector<std::string> wrong_answers();

}  // namespace intrinsics
