// Rows read in vectors of 16 bytes: the CUDA backend's loops over a row's logits, in place of the
// element by element ones of distribution.hpp, select.hpp and tiles.hpp (overload resolution
// prefers these for rows whose type is known).
//
// Rows begin anywhere, so a row, or each tile where tiles are summed, is read as a head up to the
// first 16-byte boundary, whole vectors, and a tail. A warp takes 128 vectors at a time, which of
// 16 bits are a tile: each multiprocessor reads nearly the same part of a row in every pass, and a
// CTA alone finds some of it in its own cache (a cluster's barriers empty that cache, so its second
// pass comes from L2). Nothing is added up but integers, so the order does not show.
#pragma once

#include <type_traits>

#include "core/verify_parts.hpp"
#include "cuda/cta_group.cuh"

namespace polyspec::POLYSPEC_CORE {

struct alignas(16) Words {
  uint32_t word[4];
};

// Loads from a multiple of 16; elsewhere hardware faults, and so does this on the host.
POLYSPEC_FN Words load_vector(const void* from) {
#ifndef __CUDACC__
  if ((reinterpret_cast<uintptr_t>(from) & 15) != 0) __builtin_trap();
#endif
  return *reinterpret_cast<const Words*>(from);
}

// Element j of a vector.
template <class T>
POLYSPEC_FN float element(const Words& words, int j) {
  if constexpr (sizeof(T) == 4) {
    return bit_cast<float>(words.word[j]);
  } else {
    return to_float(T{static_cast<uint16_t>(words.word[j / 2] >> (16 * (j % 2)))});
  }
}

// How n elements of which the first has address `element` (in elements) split into vectors.
template <int kWidth>
struct VectorSplit {
  int head;     // elements before the first vector
  int vectors;  // whole ones
  int ends;     // elements before the first and behind the last vector

  POLYSPEC_FN VectorSplit(uint64_t element, int n) {
    head = static_cast<int>((kWidth - element % kWidth) % kWidth);
    head = head < n ? head : n;
    vectors = (n - head) / kWidth;
    ends = n - vectors * kWidth;
  }
  // First element of vector v; element number e of those in no vector.
  POLYSPEC_FN int vector_at(int v) const { return head + v * kWidth; }
  POLYSPEC_FN int end_at(int e) const { return e < head ? e : vectors * kWidth + e; }
};

// Behind a call the compiler does not know any more where a pointer leads.
POLYSPEC_FN void assume_global([[maybe_unused]] const void* pointer) {
#ifdef __CUDACC__
  __builtin_assume(__isGlobal(pointer));
#endif
}
POLYSPEC_FN void assume_shared([[maybe_unused]] const void* pointer) {
#ifdef __CUDACC__
  __builtin_assume(__isShared(pointer));
#endif
}

// Who goes over a part of a row, and among how many: a lane of a team, alone or one of several.
struct Worker {
  int lane, lanes;
  int team = 0, teams = 1;
};
template <class Group>
POLYSPEC_FN Worker worker_of(const Group& group) {
  return {group.lane(), group.lanes(), group.team(), group.teams()};
}

// Goes over this worker's share of the less than 2^31 elements in [begin, end): together the
// workers cover each once. on_vector(i, words) gets those of a vector, i the first of them,
// on_element(i, row[i]) the others. kAhead vectors are loaded before the first is used: where the
// loads are all that takes time, enough of them have to be under way.
template <int kAhead, class T, class OnVector, class OnElement>
POLYSPEC_FN void visit_vectors(const Row<T>& row, int64_t begin, int64_t end, const Worker& worker,
                               const OnVector& on_vector, const OnElement& on_element) {
  constexpr int kWidth = 16 / sizeof(T);
  const T* data = row.data + begin;
  const VectorSplit<kWidth> split(reinterpret_cast<uintptr_t>(data) / sizeof(T),
                                  static_cast<int>(end - begin));
  const int lanes = worker.lanes;
  const int step = kAhead * lanes;
  int v = worker.team * step + worker.lane;
  POLYSPEC_ROLLED
  for (; v + (kAhead - 1) * lanes < split.vectors; v += worker.teams * step) {
    Words words[kAhead];
    POLYSPEC_UNROLL
    for (int u = 0; u < kAhead; ++u) words[u] = load_vector(data + split.vector_at(v + u * lanes));
    POLYSPEC_UNROLL
    for (int u = 0; u < kAhead; ++u) on_vector(begin + split.vector_at(v + u * lanes), words[u]);
  }
  if constexpr (kAhead > 1) {  // those of the last step may be fewer
    POLYSPEC_ROLLED
    for (; v < split.vectors; v += lanes)
      on_vector(begin + split.vector_at(v), load_vector(data + split.vector_at(v)));
  }
  POLYSPEC_ROLLED
  for (int e = worker.team * lanes + worker.lane; e < split.ends; e += worker.teams * lanes) {
    const int at = split.end_at(e);
    on_element(begin + at, to_float(data[at]));
  }
}

// The same with f(i, row[i]) for each.
template <int kAhead, class T, class F>
POLYSPEC_FN void visit(const Row<T>& row, int64_t begin, int64_t end, const Worker& worker,
                       const F& f) {
  const auto each = [&](int64_t at, const Words& words) {
    POLYSPEC_UNROLL
    for (int j = 0; j < static_cast<int>(16 / sizeof(T)); ++j) f(at + j, element<T>(words, j));
  };
  visit_vectors<kAhead>(row, begin, end, worker, each, f);
}

// The larger of the elements in two words, a NaN if either is one.
template <class T>
POLYSPEC_FN uint32_t larger_elements(uint32_t a, uint32_t b) {
#ifdef __CUDACC__
  uint32_t larger;
  if constexpr (std::is_same_v<T, float>) {
    asm("max.NaN.f32 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  }
  return larger;
#else
  uint32_t larger = 0;
  for (int j = 0; j < static_cast<int>(4 / sizeof(T)); ++j) {
    const Words both = {{a, b, 0, 0}};
    const float x = element<T>(both, j);
    const float y = element<T>(both, j + static_cast<int>(4 / sizeof(T)));
    const uint32_t kept = !(x <= y) && !(y != y) ? a : b;
    const uint32_t mask = sizeof(T) == 4 ? ~0u : 0xffffu << (16 * j);
    larger |= kept & mask;
  }
  return larger;
#endif
}

// Whether all elements of a vector are below a bound. Not where one is a NaN.
template <class T>
POLYSPEC_FN bool all_below(const Words& words, float bound) {
  const uint32_t most = larger_elements<T>(larger_elements<T>(words.word[0], words.word[1]),
                                           larger_elements<T>(words.word[2], words.word[3]));
  const Words both = {{most, 0, 0, 0}};
  bool below = element<T>(both, 0) < bound;
  if constexpr (sizeof(T) == 2) below = below && element<T>(both, 1) < bound;
  return below;
}

// visit for the elements that are not below a bound: vectors of none cost little.
template <class T, class F>
POLYSPEC_FN void visit_from(const Row<T>& row, const Worker& worker, float bound, const F& f) {
  const auto each = [&](int64_t i, float z) {
    if (z >= bound) f(i, z);
  };
  visit_vectors<4>(
      row, 0, row.n, worker,
      [&](int64_t at, const Words& words) {
        if (all_below<T>(words, bound)) return;
        // Read again, one by one: unrolled this would be the most of a kernel's code.
        POLYSPEC_ROLLED
        for (int64_t i = at; i < at + static_cast<int>(16 / sizeof(T)); ++i) each(i, row[i]);
      },
      each);
}

// A NaN stays one whatever it is compared with.
template <class T>
POLYSPEC_CALLED int32_t largest_order_of(Row<T> row, Worker worker) {
  assume_global(row.data);
  constexpr uint32_t kLowest = std::is_same_v<T, float>      ? 0xff800000u
                               : std::is_same_v<T, BFloat16> ? 0xff80ff80u
                                                             : 0xfc00fc00u;
  Words most = {{kLowest, kLowest, kLowest, kLowest}};
  float at_ends = -kInfinity;
  visit_vectors<4>(
      row, 0, row.n, worker,
      [&](int64_t, const Words& words) {
        POLYSPEC_UNROLL
        for (int j = 0; j < 4; ++j) most.word[j] = larger_elements<T>(most.word[j], words.word[j]);
      },
      [&](int64_t, float z) { at_ends = z > at_ends || z != z ? z : at_ends; });
  int32_t largest = order_or_nan(order_of(at_ends));
  POLYSPEC_UNROLL
  for (int j = 0; j < static_cast<int>(16 / sizeof(T)); ++j) {
    const int32_t order = order_or_nan(order_of(element<T>(most, j)));
    largest = order > largest ? order : largest;
  }
  return largest;
}

template <class Group, class T>
POLYSPEC_FN int32_t largest_order(Group& group, const Row<T>& row) {
  return largest_order_of(row, worker_of(group));
}

template <class Group, class T>
POLYSPEC_FN int64_t first_of(Group& group, const Row<T>& row, float max) {
  int64_t first = row.n;
  visit<2>(row, 0, row.n, worker_of(group), [&](int64_t i, float z) {
    if (z == max && i < first) first = i;
  });
  return first;
}

// Adds the weight of a token with logit z.
POLYSPEC_FN void add_weight(uint64_t* bin, const One&, float) {
  atomicAdd(reinterpret_cast<unsigned*>(bin), 1u);  // a vocabulary has fewer than 2^31 tokens
}
template <class RowType>
POLYSPEC_FN void add_weight(uint64_t* bin, const TokenMass<RowType>& weight, float z) {
  add_to_bin(bin, weight.of(z));
}

template <class T, class Weight>
POLYSPEC_CALLED void count_digit_of(Row<T> row, Weight weight, Digit digit, Worker worker,
                                    uint64_t* bins) {
  assume_global(row.data);
  assume_shared(bins);
  visit<4>(row, 0, row.n, worker, [&](int64_t, float z) {
    const uint32_t key = key_of(z);
    if (digit.counts(key)) add_weight(&bins[digit.of(key)], weight, z);
  });
}

template <class Group, class T, class Weight>
POLYSPEC_FN void count_digit(Group& group, const Row<T>& row, const Weight& weight,
                             const Digit& digit) {
  count_digit_of(row, weight, digit, worker_of(group), group.bins());
}

// Not inlined: a kernel sums masses in many places, and each copy of the loop takes 10 KB.
template <class T>
POLYSPEC_CALLED uint64_t mass_of_span(TokenMass<Row<T>> weight, int lane, int lanes) {
  const Worker worker{lane, lanes};
  assume_global(weight.row.data);
  uint64_t sum = 0;
  if (weight.threshold > -kInfinity) {
    visit_from(weight.row, worker, weight.threshold,
               [&](int64_t, float z) { sum += weight.of(z); });
  } else {
    visit<4>(weight.row, 0, weight.row.n, worker,
             [&](int64_t, float z) { sum += weight.unfiltered(z); });
  }
  return sum;
}

template <class Group, class T>
POLYSPEC_FN uint64_t lane_mass(Group& group, const TokenMass<Row<T>>& weight, int64_t begin,
                               int64_t end) {
  TokenMass<Row<T>> span = weight;
  span.row = {weight.row.data + begin, end - begin};
  return mass_of_span(span, group.lane(), group.lanes());
}

// 16 bytes from any address.
template <class T>
POLYSPEC_FN Words load_words(const T* from, bool aligned) {
  if (aligned) return load_vector(from);
  Words words = {};
  POLYSPEC_UNROLL
  for (int j = 0; j < static_cast<int>(16 / sizeof(T)); ++j) {
    if constexpr (sizeof(T) == 4) words.word[j] = bit_cast<uint32_t>(from[j]);
    if constexpr (sizeof(T) == 2)
      words.word[j / 2] |= static_cast<uint32_t>(from[j].bits) << (16 * (j % 2));
  }
  return words;
}

// Residual masses of draft and target rows of one type and one vocabulary: vectors of both rows are
// read side by side, the draft's element by element where it lies differently.
template <class T>
POLYSPEC_FN uint64_t both_masses(const ResidualWeight<T>& weight, int64_t begin, int64_t end,
                                 int worker, int workers) {
  constexpr int kWidth = 16 / sizeof(T);
  const T* p = weight.p.row.data + begin;
  const T* q = static_cast<const T*>(weight.q.row.data) + begin;
  const VectorSplit<kWidth> split(reinterpret_cast<uintptr_t>(p) / sizeof(T),
                                  static_cast<int>(end - begin));
  const bool aligned =
      ((reinterpret_cast<uintptr_t>(p) ^ reinterpret_cast<uintptr_t>(q)) & 15) == 0;
  uint64_t sum = 0;
  POLYSPEC_ROLLED
  for (int v = worker; v < split.vectors; v += workers) {
    const Words p_words = load_words(p + split.vector_at(v), true);
    const Words q_words = load_words(q + split.vector_at(v), aligned);
    POLYSPEC_UNROLL
    for (int j = 0; j < kWidth; ++j)
      sum += weight.of(weight.p.of(element<T>(p_words, j)), weight.q.of(element<T>(q_words, j)));
  }
  POLYSPEC_ROLLED
  for (int e = worker; e < split.ends; e += workers) {
    const int at = split.end_at(e);
    sum += weight.of(weight.p.of(to_float(p[at])), weight.q.of(to_float(q[at])));
  }
  return sum;
}

template <class Group, class T>
POLYSPEC_FN uint64_t lane_mass(Group& group, const ResidualWeight<T>& weight, int64_t begin,
                               int64_t end) {
  if (weight.proposed < 0 && weight.target_to_draft == nullptr && end <= weight.draft_vocab &&
      weight.q.row.dtype == kDTypeOf<T>) {
    return both_masses(weight, begin, end, group.lane(), group.lanes());
  }
  uint64_t sum = 0;
  POLYSPEC_ROLLED
  for (int64_t i = begin + group.lane(); i < end; i += group.lanes()) sum += weight(i);
  return sum;
}

}  // namespace polyspec::POLYSPEC_CORE
