// Helpers of the C interface: codes for exceptions, and structs that grow.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <new>
#include <stdexcept>
#include <string>

#include "polyspec/polyspec.h"

namespace polyspec {
namespace c_api {

// A struct_size beyond this is a forgotten initialisation, not a later release: its tail is not
// read.
constexpr size_t kMaxStructSize = 4096;

// Keeps the text for polyspec_last_error; returns `code`.
polyspec_code fail(polyspec_code code, const char* function, const char* text);

// Runs `body` and turns exceptions into a code.
template <class Body>
polyspec_code guarded(const char* function, Body&& body) noexcept {
  try {
    return body();
  } catch (const std::invalid_argument& error) {
    return fail(POLYSPEC_INVALID_ARGUMENT, function, error.what());
  } catch (const std::logic_error& error) {
    return fail(POLYSPEC_WRONG_STATE, function, error.what());
  } catch (const std::bad_alloc&) {
    return fail(POLYSPEC_OUT_OF_MEMORY, function, "out of memory");
  } catch (const std::exception& error) {
    return fail(POLYSPEC_INTERNAL_ERROR, function, error.what());
  } catch (...) {
    return fail(POLYSPEC_INTERNAL_ERROR, function, "an exception of unknown type");
  }
}

// For use inside `guarded`.
template <class T>
void require(const T* pointer, const char* name) {
  if (pointer == nullptr)
    throw std::invalid_argument(std::string(name) + ": expected a pointer, given NULL");
}
inline void require_windows(int32_t given, int64_t expected) {
  if (given == expected) return;
  throw std::invalid_argument("num_windows: expected " + std::to_string(expected) + ", given " +
                              std::to_string(given));
}

// The struct sizes of earlier releases; a release that adds a field adds the size before it.
using Sizes = std::initializer_list<size_t>;

// Whether the caller's struct can be read: its size is that of an earlier release, the present one,
// or a larger one that is zero past the present one.
template <class T>
polyspec_code check_size(const char* function, const T* given, Sizes earlier) {
  if (given == nullptr)
    return fail(POLYSPEC_INVALID_ARGUMENT, function, "a struct: expected a pointer, given NULL");
  const size_t size = given->struct_size;
  char text[160];
  const bool known = std::find(earlier.begin(), earlier.end(), size) != earlier.end();
  if (!known && (size < sizeof(T) || size > kMaxStructSize)) {
    std::snprintf(text, sizeof text, "struct_size is %zu; this library (%s) knows %zu and %zu",
                  size, polyspec_version(), earlier.size() > 0 ? *earlier.begin() : sizeof(T),
                  sizeof(T));
    return fail(POLYSPEC_BAD_STRUCT_SIZE, function, text);
  }
  const char* bytes = reinterpret_cast<const char*>(given);
  for (size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] != 0) {
      std::snprintf(text, sizeof text,
                    "byte %zu of a struct is set, but this library (%s) knows only %zu", i,
                    polyspec_version(), sizeof(T));
      return fail(POLYSPEC_BAD_STRUCT_SIZE, function, text);
    }
  }
  return POLYSPEC_OK;
}

// Reads the fields that the caller has over `out`, which holds the defaults.
template <class T>
polyspec_code read_struct(const char* function, const T* given, Sizes earlier, T* out) {
  const polyspec_code code = check_size(function, given, earlier);
  if (code == POLYSPEC_OK) std::memcpy(out, given, std::min(given->struct_size, sizeof(T)));
  return code;
}

// An optional struct: NULL leaves the defaults.
template <class T>
polyspec_code read_optional(const char* function, const T* given, T* out, Sizes earlier = {}) {
  return given == nullptr ? POLYSPEC_OK : read_struct(function, given, earlier, out);
}

}  // namespace c_api
}  // namespace polyspec
