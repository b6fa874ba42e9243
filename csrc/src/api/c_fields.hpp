// Copies the fields of a struct of the C interface into the operator's parameters of the same
// names.
//
// The fields are listed once, as a macro: #define FIELDS(F) F(batch) F(vocab) ... A list that lacks
// one is an error of the compiler.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

#include "polyspec/kv_cache.hpp"
#include "polyspec/polyspec.h"
#include "polyspec/types.hpp"

namespace polyspec {
namespace c_api {

// By assignment; int32_t to an enum or a bool; a parameter of one kind to one of the other.
template <class From, class To>
void convert(const From& from, To* to) {
  if constexpr (std::is_enum_v<To>) {
    *to = static_cast<To>(from);
  } else if constexpr (std::is_same_v<To, bool>) {
    *to = from != 0;
  } else {
    *to = from;
  }
}
template <class From, class T>
void convert(const From& from, PerRequest<T>* to) {
  if constexpr (std::is_pointer_v<From>) {
    to->data = from;
  } else {
    to->data = from.data;
    to->value = from.value;
  }
}
template <class T, size_t N>
void convert(const T (&from)[N], T (*to)[N]) {
  for (size_t i = 0; i < N; ++i) (*to)[i] = from[i];
}
inline void convert(const polyspec_kv_source& from, KvSource* to) {
  to->data = from.data;
  convert(from.stride, &to->stride);
}
inline void convert(const polyspec_kv_cache& from, KvCache* to) {
  to->data = from.data;
  convert(from.stride, &to->stride);
}

// The same 16 bytes under two names.
static_assert(sizeof(polyspec_row_statistics) == sizeof(RowStatistics), "row distribution");
static_assert(offsetof(polyspec_row_statistics, threshold) == offsetof(RowStatistics, threshold),
              "row distribution");
static_assert(offsetof(polyspec_row_statistics, mass) == offsetof(RowStatistics, mass),
              "row distribution");
inline void convert(polyspec_row_statistics* from, RowStatistics** to) {
  *to = reinterpret_cast<RowStatistics*>(from);
}
inline void convert(const polyspec_row_statistics* from, const RowStatistics** to) {
  *to = reinterpret_cast<const RowStatistics*>(from);
}

// Numbers in braces that fill a struct: its fields, of an array each element.
struct Anything {
  template <class T>
  operator T() const;
};
template <size_t>
using AnythingAt = Anything;
template <class Struct, class Numbers, class = void>
struct Takes : std::false_type {};
template <class Struct, size_t... I>
struct Takes<Struct, std::index_sequence<I...>, std::void_t<decltype(Struct{AnythingAt<I>{}...})>>
    : std::true_type {};
template <class Struct, size_t N = 1>
constexpr size_t count_fields() {
  if constexpr (Takes<Struct, std::make_index_sequence<N>>::value) {
    return count_fields<Struct, N + 1>();
  } else {
    return N - 1;
  }
}
template <class Field>
constexpr size_t count_elements() {
  return std::is_array_v<Field> ? std::extent_v<Field> : 1;
}

// With `in`, a struct of the C interface, and `to`, a pointer.
#define POLYSPEC_FIELD(name) ::polyspec::c_api::convert(in.name, &to->name);
#define POLYSPEC_COUNT(name) +::polyspec::c_api::count_elements<decltype(in.name)>()

// copy(in, to) for a struct of which FIELDS lists all but `others`, which are read by hand;
// struct_size is one of them.
#define POLYSPEC_COPY(Struct, Params, others, FIELDS)                                         \
  void copy(const Struct& in, ::polyspec::Params* to) {                                       \
    static_assert(::polyspec::c_api::count_fields<Struct>() == others FIELDS(POLYSPEC_COUNT), \
                  "a field of " #Struct " is not copied");                                    \
    FIELDS(POLYSPEC_FIELD)                                                                    \
  }

}  // namespace c_api
}  // namespace polyspec
