// The texts of the C interface: version, codes and status bits.
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "polyspec/polyspec.h"

#define POLYSPEC_STRING(x) #x
#define POLYSPEC_JOIN(a, b, c) POLYSPEC_STRING(a) "." POLYSPEC_STRING(b) "." POLYSPEC_STRING(c)

const char* polyspec_version(void) {
  return POLYSPEC_JOIN(POLYSPEC_VERSION_MAJOR, POLYSPEC_VERSION_MINOR, POLYSPEC_VERSION_PATCH);
}

const char* polyspec_code_string(polyspec_code code) {
  switch (code) {
    case POLYSPEC_OK:
      return "ok";
    case POLYSPEC_INVALID_ARGUMENT:
      return "invalid argument";
    case POLYSPEC_UNSUPPORTED:
      return "not supported by this build";
    case POLYSPEC_CUDA_ERROR:
      return "CUDA error";
    case POLYSPEC_BAD_STRUCT_SIZE:
      return "bad struct size";
    case POLYSPEC_WRONG_STATE:
      return "wrong state";
    case POLYSPEC_OUT_OF_MEMORY:
      return "out of memory";
    case POLYSPEC_INTERNAL_ERROR:
      return "internal error";
    default:
      return "unknown code";
  }
}

size_t polyspec_status_string(int32_t status, char* text, size_t size) {
  static const struct {
    int32_t bit;
    const char* name;
  } kNames[] = {
      {POLYSPEC_STATUS_NAN, "NaN in a row of logits"},
      {POLYSPEC_STATUS_INF, "+inf in a row of logits"},
      {POLYSPEC_STATUS_EMPTY_ROW, "no token has probability"},
      {POLYSPEC_STATUS_DRAFT_ROW, "the row is the draft's"},
      {POLYSPEC_STATUS_TOKEN_OUT_OF_RANGE, "draft token out of range"},
      {POLYSPEC_STATUS_BAD_LENGTH, "length out of range"},
      {POLYSPEC_STATUS_BAD_PARAMETER, "sampling parameter out of range"},
      {POLYSPEC_STATUS_DRAFT_STATISTICS_MISMATCH,
       "draft token without probability under its distribution, or no distribution of its row"},
      {POLYSPEC_STATUS_BAD_INDEX, "slot, offset or draft row id out of range"},
      {POLYSPEC_STATUS_BAD_TREE, "no tree: parents, equal siblings or depth"},
      {POLYSPEC_STATUS_BAD_PATH, "tree path that does not increase, or leaves the cache"},
      {POLYSPEC_STATUS_CACHE_FULL, "cache full, or no page is free"},
      {POLYSPEC_STATUS_BAD_PAGE, "page or count of pages that cannot be"},
      {POLYSPEC_STATUS_ZERO_RESIDUAL, "residual rounds to zero (note)"},
  };
  size_t length = 0;
  const auto append = [&](const char* part) {
    const size_t n = std::strlen(part);
    if (length < size) {
      const size_t copied = std::min(n, size - length - 1);
      std::memcpy(text + length, part, copied);
      text[length + copied] = '\0';
    }
    length += n;
  };
  if (text == nullptr) size = 0;
  append(status == 0 ? "ok" : "");
  int32_t unknown = status;
  for (const auto& entry : kNames) {
    if ((status & entry.bit) == 0) continue;
    if (length > 0) append(", ");
    append(entry.name);
    unknown &= ~entry.bit;
  }
  if (unknown != 0) append(length > 0 ? ", unknown bits" : "unknown bits");
  return length;
}
