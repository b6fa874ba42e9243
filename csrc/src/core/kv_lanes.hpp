// How many bytes a thread may move at once: the widest lane that every address of a call is a
// multiple of.
#pragma once

#include <cstdint>

#include "polyspec/kv_cache.hpp"

namespace polyspec::core {

// 16, 8, 4, 2 or 1; the lowest bit set in any of the addresses, or'd together by the caller.
inline int lane_bytes(uint64_t addresses) {
  const uint64_t lowest = addresses & (~addresses + 1);
  return lowest == 0 || lowest > 16 ? 16 : static_cast<int>(lowest);
}

// The addresses of [n0, n1, n2, dim] at `data`: a dimension of size 1 is never strided over.
inline uint64_t addresses_of(const void* data, const int64_t (&stride)[3], int64_t n0, int64_t n1,
                             int64_t n2, int64_t dim, int32_t element_size) {
  uint64_t elements = static_cast<uint64_t>(dim);
  if (n0 > 1) elements |= static_cast<uint64_t>(stride[0]);
  if (n1 > 1) elements |= static_cast<uint64_t>(stride[1]);
  if (n2 > 1) elements |= static_cast<uint64_t>(stride[2]);
  return reinterpret_cast<uintptr_t>(data) | elements * static_cast<uint64_t>(element_size);
}

inline uint64_t addresses_of(const NewTokens& in) {
  return addresses_of(in.keys.data, in.keys.stride, in.batch, in.heads, in.tokens, in.key_dim,
                      in.element_size) |
         addresses_of(in.values.data, in.values.stride, in.batch, in.heads, in.tokens, in.value_dim,
                      in.element_size);
}

inline int lane_bytes(const AppendParams& p) {
  const NewTokens& in = p.in;
  return lane_bytes(addresses_of(in) |
                    addresses_of(p.keys.data, p.keys.stride, in.batch, in.heads, p.capacity,
                                 in.key_dim, in.element_size) |
                    addresses_of(p.values.data, p.values.stride, in.batch, in.heads, p.capacity,
                                 in.value_dim, in.element_size));
}

inline int lane_bytes(const PagedAppendParams& p) {
  const NewTokens& in = p.in;
  return lane_bytes(addresses_of(in) |
                    addresses_of(p.keys.data, p.keys.stride, p.pages, in.heads, p.page_size,
                                 in.key_dim, in.element_size) |
                    addresses_of(p.values.data, p.values.stride, p.pages, in.heads, p.page_size,
                                 in.value_dim, in.element_size));
}

inline int lane_bytes(const CopyRowsParams& p) {
  uint64_t all = reinterpret_cast<uintptr_t>(p.from) | reinterpret_cast<uintptr_t>(p.to) |
                 static_cast<uint64_t>(p.bytes);
  for (const int64_t stride : {p.from_stride[0], p.from_stride[1], p.to_stride[0], p.to_stride[1]})
    all |= static_cast<uint64_t>(stride);
  return lane_bytes(all);
}

inline int lane_bytes(const CompactTreeParams& p) {
  const auto base = reinterpret_cast<const void*>(static_cast<uintptr_t>(p.alignment));
  return lane_bytes(
      addresses_of(base, p.key_stride, p.batch, p.heads, p.capacity, p.key_dim, p.element_size) |
      addresses_of(base, p.value_stride, p.batch, p.heads, p.capacity, p.value_dim,
                   p.element_size));
}

}  // namespace polyspec::core
