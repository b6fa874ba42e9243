// Streams: which launches may begin.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "grid.hpp"

namespace stand_in {

// Launches of which a cluster may begin now: the first of each stream.
std::vector<std::shared_ptr<Launch>> beginning_launches();

// Kernels submitted to a stream so far.
int64_t launches_so_far();

// Takes launches that have ended out of the stream, in order.
void end_launches(Stream& stream);

// The context of the stream's operations.
race::Context context_of(const Stream& stream);

}  // namespace stand_in
