// Streams: which launches may begin.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "grid.hpp"

namespace stand_in {

// Launches of which a cluster may begin now: the first of each stream, and one behind it that
// overlaps, when all clusters of the launch before it have begun.
std::vector<std::shared_ptr<Launch>> beginning_launches();

// Kernels submitted to a stream so far.
int64_t launches_so_far();

// Takes launches that have ended out of the stream, in order, and wakes who waits for that.
void end_launches(Stream& stream);

// What the stream itself does is done in this context.
race::Context context_of(const Stream& stream);

// Whether all launches before this one in its stream have ended; and their clock.
bool is_first(const Launch& launch);
const void* clock_of(const Stream& stream);

}  // namespace stand_in
