// The EOS and length cuts of one request, applied to the tokens that a rule emits, and the first
// tokens of the next pass. Integers of one thread: the cost is that of reading a few tokens back.
#pragma once

#include "core/verify_parts.hpp"

namespace polyspec::POLYSPEC_CORE {

// Whether anything is to be cut or written; the same for all requests of a call.
POLYSPEC_FN bool wants_cuts(const CutParams& cut) {
  return cut.eos_count > 0 || cut.room.data != nullptr || cut.room.value != INT64_MAX ||
         cut.num_emitted != nullptr || cut.ended != nullptr || cut.cache_lengths != nullptr ||
         cut.next_ids != nullptr || cut.next_positions != nullptr;
}

POLYSPEC_FN bool is_eos(const CutParams& cut, int64_t slot, int64_t token) {
  const int64_t* ids = cut.eos + slot * cut.eos_stride;
  bool found = false;
  POLYSPEC_ROLLED
  for (int64_t i = 0; i < cut.eos_count; ++i) found = found || ids[i] == token;
  return found;
}

// Most tokens that a request may emit; anything but 0 where nothing is cut.
POLYSPEC_FN int64_t room_for(const CutParams& cut, int64_t slot) {
  return wants_cuts(cut) ? value_for(cut.room, slot) : INT64_MAX;
}

// Cuts the `emitted` tokens written for a view's request; returns how many remain and removes the
// tokens after the cut from the outcome. By the thread that wrote the tokens (rank 0).
template <class View>
POLYSPEC_FN int64_t cut_emitted(const View& view, const int64_t* tokens, int64_t emitted,
                                Outcome* outcome) {
  const CutParams& cut = view.params.cut;
  const int64_t room = view.room;
  int64_t kept = emitted < room ? emitted : room;
  if (room < 0) kept = 0;  // a bad parameter, as the status says
  int64_t ended = 0;
  POLYSPEC_ROLLED
  for (int64_t i = 0; i < kept; ++i) {
    if (!is_eos(cut, view.slot, tokens[i])) continue;
    kept = i + 1;
    ended = kEndedEos;
  }
  if (kept == room) ended |= kEndedRoom;
  if (ended != 0 && kept <= outcome->accepted) {
    outcome->accepted = kept;
    outcome->status = 0;  // it was about a row that the text does not reach
  }
  const int64_t b = view.request;
  const int64_t position = view.draws.position;
  int64_t cached = outcome->accepted < kept ? outcome->accepted : kept;
  if (view.unread(cached)) --cached;
  if (cut.num_emitted != nullptr) cut.num_emitted[b] = kept;
  if (cut.ended != nullptr) cut.ended[b] = ended;
  if (cut.cache_lengths != nullptr) cut.cache_lengths[b] = position + cached;
  if (cut.next_ids != nullptr) cut.next_ids[b] = kept > 0 ? tokens[kept - 1] : -1;
  if (cut.next_positions != nullptr) cut.next_positions[b] = kept > 0 ? position + kept - 1 : -1;
  return kept;
}

}  // namespace polyspec::POLYSPEC_CORE
