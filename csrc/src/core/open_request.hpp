// Opens a view of one request, of a block or of a tree: its parameters, checked, and the offsets of
// its rows in the batch.
#pragma once

#include "core/cuts.hpp"

namespace polyspec::POLYSPEC_CORE {

// A request's rows of the target.
struct Extent {
  int64_t first = 0;   // with offsets: its first of all rows; 0 without
  int64_t length = 0;  // draft tokens
  int64_t rows = 0;    // that count: length + 1, or `length` where there is none for a bonus
};

// Finds a request's rows: by the offsets, or `most` + 1, of so many draft tokens, nullptr: of one
// less. Error bits or 0.
template <class Params>
POLYSPEC_FN int32_t find_rows(const Params& params, const int64_t* lengths, int64_t most,
                              int64_t request, Extent* extent) {
  int64_t rows = most + 1;
  if (params.offsets != nullptr) {
    const int64_t first = params.offsets[request];
    const int64_t end = params.offsets[request + 1];
    if (first < 0 || first > params.num_rows || end < 0 || end > params.num_rows)
      return kStatusBadIndex;
    extent->first = first;
    rows = end - first;
  }
  const int64_t length = lengths != nullptr ? lengths[request] : rows - 1;
  // Negative lengths become too large as unsigned numbers.
  if (static_cast<uint64_t>(length) > static_cast<uint64_t>(most) || length > rows)
    return kStatusBadLength;
  extent->length = length;
  extent->rows = length < rows ? length + 1 : length;
  return 0;
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
