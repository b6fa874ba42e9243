// Resources of calls that are captured into CUDA graphs.
#pragma once

#include "polyspec/export.h"
#include "polyspec/status.hpp"
#include "polyspec/types.hpp"

namespace polyspec {

// Has `release(argument)` called once the graph that the stream is being captured into, everything
// instantiated from it and all of their launches are over. It is called from a thread of the
// driver, where it must not call CUDA. kInvalidArgument where nothing is being captured; after an
// error it is never called.
POLYSPEC_API Result when_graph_goes(Stream stream, void (*release)(void*), void* argument);

}  // namespace polyspec
