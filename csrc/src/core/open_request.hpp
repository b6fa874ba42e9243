// Opens a view of one request, of a block or of a tree: its parameters, checked, and where its rows
// lie among those of the batch.
#pragma once

#include "core/cuts.hpp"

namespace polyspec::POLYSPEC_CORE {

// A request's rows of the target.
struct Extent {
  int64_t first = 0;   // with offsets: its first of all rows; 0 without
  int64_t length = 0;  // draft tokens; it has one row more
};

// Finds a request's rows: by the offsets, or of so many draft tokens, nullptr: of `most`. Error
// bits or 0.
template <class Params>
POLYSPEC_FN int32_t find_rows(const Params& params, const int64_t* lengths, int64_t most,
                              int64_t request, Extent* extent) {
  if (params.offsets != nullptr) {
    const int64_t first = params.offsets[request];
    const int64_t end = params.offsets[request + 1];
    if (first < 0 || first > params.num_rows || end < 0 || end > params.num_rows)
      return kStatusBadIndex;
    *extent = {first, end - first - 1};
  } else {
    extent->length = lengths != nullptr ? lengths[request] : most;
  }
  return extent->length < 0 || extent->length > most ? kStatusBadLength : 0;
}

// Reads a view's parameters and finds its rows; error bits or 0. `places` is the number of injected
// draws of a request.
template <class View>
POLYSPEC_FN int32_t open_request(View* view, const int64_t* lengths, int64_t most, int64_t places,
                                 Extent* extent) {
  const auto& params = view->params;
  const int64_t request = view->request;
  view->slot = params.slots != nullptr ? params.slots[request] : request;
  if (params.slots != nullptr && (view->slot < 0 || view->slot >= params.num_slots))
    return kStatusBadIndex;
  view->room = room_for(params.cut, view->slot);
  const int32_t error = find_rows(params, lengths, most, request, extent) |
                        read_filter(params.sampling, view->slot, &view->filter) |
                        read_draws(params.draw, request, view->slot, places, &view->draws) |
                        (view->room < 0 ? kStatusBadParameter : 0);
  // The last token that may be emitted has a position too.
  const bool fits = error != 0 || view->draws.position <= INT64_MAX - extent->length;
  return fits ? error : kStatusBadParameter;
}

}  // namespace polyspec::POLYSPEC_CORE
