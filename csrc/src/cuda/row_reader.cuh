// Rows read in vectors of 16 bytes: the CUDA backend's loops over a row's logits, instead of the
// loops element by element of distribution.hpp, select.hpp and tiles.hpp (overload resolution
// prefers these loops for rows of a known type).
//
// Rows begin anywhere, so a row, or each tile where tiles are summed, is read as a head up to the
// first 16-byte boundary, whole vectors, and a tail. A warp takes 128 vectors at a time, which of
// 16 bits are a tile: each multiprocessor reads nearly the same part of a row in every pass, and a
// CTA alone finds some of it in its cache (a cluster's barriers empty that cache, so its second
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
    const uint16_t half = static_cast<uint16_t>(words.word[j / 2] >> (16 * (j % 2)));
    return to_float(Plain<T>{half});
  }
}

// How n elements of which the first has address `element` (in elements) split into vectors.
template <int kWidth>
struct VectorSplit {
  int head;     // elements before the first vector
  int vectors;  // whole vectors
  int ends;     // elements before the first and after the last vector

  POLYSPEC_FN VectorSplit(uint64_t element, int n) {
    head = static_cast<int>((kWidth - element % kWidth) % kWidth);
    head = head < n ? head : n;
    vectors = (n - head) / kWidth;
    ends = n - vectors * kWidth;
  }
  POLYSPEC_FN void use_none() {
    ends += vectors * kWidth;
    vectors = 0;
  }
  // First element of vector v; element number e of the elements in no vector.
  POLYSPEC_FN int vector_at(int v) const { return head + v * kWidth; }
  POLYSPEC_FN int end_at(int e) const { return e < head ? e : vectors * kWidth + e; }
};

// Who goes over a part of a row, and among how many: a lane of a team, alone or one of several.
struct Worker {
  int lane, lanes;
  int team = 0, teams = 1;
};
template <class Group>
POLYSPEC_FN Worker worker_of(const Group& group) {
  return {group.lane(), group.lanes(), group.team(), group.teams()};
}

// -inf, as often as a word holds it: an element that changes no maximum and has no mass.
template <class T>
constexpr uint32_t kLowest = std::is_same_v<Plain<T>, float>      ? 0xff800000u
                             : std::is_same_v<Plain<T>, BFloat16> ? 0xff80ff80u
                                                                  : 0xfc00fc00u;

// A vector from element i of a masked row on, with -inf for forbidden ids.
template <class T>
POLYSPEC_FN Words allowed_words(const Row<Masked<T>>& row, int64_t i, Words words) {
  constexpr int kWidth = 16 / sizeof(T);
  constexpr int kEach = kWidth / 4;  // elements of a word
  const uint32_t bits = row.template bits_at<kWidth>(i);
  POLYSPEC_UNROLL
  for (int j = 0; j < kWidth; ++j) {
    const uint32_t all = kEach == 1 ? ~0u : 0xffffu << (16 * (j % kEach));
    uint32_t& word = words.word[j / kEach];
    if ((bits >> j & 1) == 0) word = (word & ~all) | (kLowest<T> & all);
  }
  return words;
}

// Goes over this worker's share of the less than 2^31 elements in [begin, end): together the
// workers cover each once. on_vectors(at, step, is_there, words) gets kAhead vectors, the first at
// element `at`, each `step` elements after the previous. Vectors with is_there(number) false are
// past the row, all kLowest. on_element(i, row[i]) gets the elements in no vector. kAhead vectors
// are loaded before the first is used: where only the loads take time, enough of them have to be in
// flight.
template <int kAhead, class T, class OnVectors, class OnElement>
POLYSPEC_FN void visit_vectors(const Row<T>& row, int64_t begin, int64_t end, const Worker& worker,
                               const OnVectors& on_vectors, const OnElement& on_element) {
  constexpr int kWidth = 16 / sizeof(T);
  const Plain<T>* data = row.data + begin;
  const VectorSplit<kWidth> split(reinterpret_cast<uintptr_t>(data) / sizeof(T),
                                  static_cast<int>(end - begin));
  const int lanes = worker.lanes;
  const int step = kAhead * lanes;
  POLYSPEC_ROLLED
  for (int v = worker.team * step + worker.lane; v < split.vectors; v += worker.teams * step) {
    const auto is_there = [&](int u) { return v + u * lanes < split.vectors; };
    const auto load = [&](int u) {
      const int at = split.vector_at(v + u * lanes);
      const Words words = load_vector(data + at);
      if constexpr (kIsMasked<T>) return allowed_words(row, begin + at, words);
      return words;
    };
    Words words[kAhead];
    if (is_there(kAhead - 1)) {
      POLYSPEC_UNROLL
      for (int u = 0; u < kAhead; ++u) words[u] = load(u);
    } else {
      POLYSPEC_UNROLL
      for (int u = 0; u < kAhead; ++u) {
        words[u] = {{kLowest<T>, kLowest<T>, kLowest<T>, kLowest<T>}};
        if (is_there(u)) words[u] = load(u);
      }
    }
    on_vectors(begin + split.vector_at(v), kWidth * lanes, is_there, words);
  }
  POLYSPEC_ROLLED
  for (int e = worker.team * lanes + worker.lane; e < split.ends; e += worker.teams * lanes) {
    const int at = split.end_at(e);
    if constexpr (kIsMasked<T>) {
      on_element(begin + at, row[begin + at]);
    } else {
      on_element(begin + at, to_float(data[at]));
    }
  }
}

// on_vector(words) for each vector, on_element(row[i]) for each element that is in none.
template <int kAhead, class T, class OnVector, class OnElement>
POLYSPEC_FN void visit_each(const Row<T>& row, const Worker& worker, const OnVector& on_vector,
                            const OnElement& on_element) {
  visit_vectors<kAhead>(
      row, 0, row.n, worker,
      [&](int64_t, int, const auto& is_there, const Words* words) {
        POLYSPEC_UNROLL
        for (int u = 0; u < kAhead; ++u) {
          if (!is_there(u)) break;
          on_vector(words[u]);
        }
      },
      [&](int64_t, float z) { on_element(z); });
}

// f(row[i]) for each element.
template <int kAhead, class T, class F>
POLYSPEC_FN void visit(const Row<T>& row, const Worker& worker, const F& f) {
  const auto each = [&](const Words& words) {
    POLYSPEC_UNROLL
    for (int j = 0; j < static_cast<int>(16 / sizeof(T)); ++j) f(element<T>(words, j));
  };
  visit_each<kAhead>(row, worker, each, f);
}

// The larger of the elements in two words, a NaN if either is one.
template <class T>
POLYSPEC_FN uint32_t larger_elements(uint32_t a, uint32_t b) {
#ifdef __CUDACC__
  uint32_t larger;
  if constexpr (std::is_same_v<Plain<T>, float>) {
    asm("max.NaN.f32 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  } else if constexpr (std::is_same_v<Plain<T>, BFloat16>) {
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

// f(i, row[i]) for each element that is not below a bound: vectors of none cost little.
template <class T, class F>
POLYSPEC_FN void visit_from(const Row<T>& row, const Worker& worker, float bound, const F& f) {
  constexpr int kAhead = 4;
  constexpr int kWidth = 16 / sizeof(T);
  const auto each = [&](int64_t i, float z) {
    if (z >= bound) f(i, z);
  };
  visit_vectors<kAhead>(
      row, 0, row.n, worker,
      [&](int64_t at, int step, const auto& is_there, const Words* words) {
        unsigned some = 0;  // vectors that are not skipped
        POLYSPEC_UNROLL
        for (int u = 0; u < kAhead; ++u) {
          if (!all_below<T>(words[u], bound) && is_there(u)) some |= 1u << u;
        }
        if (some == 0) return;
        // Read again, one by one: unrolled this would be the most of a kernel's code.
        POLYSPEC_ROLLED
        for (int i = 0; i < kAhead * kWidth; ++i) {
          const int u = i / kWidth;
          if ((some >> u & 1) == 0) continue;
          const int64_t token = at + u * step + i % kWidth;
          each(token, row[token]);
        }
      },
      each);
}

// A NaN stays NaN in every comparison.
template <class T>
POLYSPEC_CALLED int32_t largest_order_of(Row<T> row, Worker worker) {
  assume_global(row.data);
  Words most = {{kLowest<T>, kLowest<T>, kLowest<T>, kLowest<T>}};
  float at_ends = -kInfinity;
  constexpr int kAhead = 4;
  visit_vectors<kAhead>(
      row, 0, row.n, worker,
      [&](int64_t, int, const auto&, const Words* words) {
        POLYSPEC_UNROLL
        for (int u = 0; u < kAhead; ++u) {
          POLYSPEC_UNROLL
          for (int j = 0; j < 4; ++j)
            most.word[j] = larger_elements<T>(most.word[j], words[u].word[j]);
        }
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

template <class T>
POLYSPEC_CALLED int64_t first_from(Row<T> row, Worker worker, float max) {
  assume_global(row.data);
  int64_t first = row.n;
  visit_from(row, worker, max, [&](int64_t i, float) { first = i < first ? i : first; });
  return first;
}
template <class Group, class T>
POLYSPEC_FN int64_t first_of(Group& group, const Row<T>& row, float max) {
  return first_from(row, worker_of(group), max);
}

// Adds the weight of a token with logit z.
POLYSPEC_FN void add_weight(uint64_t* bin, const One&, float) {
  atomicAdd(reinterpret_cast<unsigned*>(bin), 1u);  // a vocabulary has fewer than 2^31 tokens
}
template <class RowType>
POLYSPEC_FN void add_weight(uint64_t* bin, const TokenMass<RowType>& weight, float z) {
  add_to_bin(bin, weight.of(z));
}

// The upper halves of the keys of two logits.
POLYSPEC_FN uint32_t upper_keys(uint32_t word) {
#ifdef __CUDACC__
  uint32_t value, negative;  // once 1 plus 0: -0 becomes +0 (sm_80 has no sum of bfloat16)
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(value) : "r"(word), "r"(0x3f803f80), "r"(0));
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(negative) : "r"(value));  // each half's sign, 16 times
  return value ^ (negative | 0x80008000u);
#else
  const Words words = {{word, 0, 0, 0}};
  return key_of(element<BFloat16>(words, 0)) >> 16 |
         (key_of(element<BFloat16>(words, 1)) & 0xffff0000u);
#endif
}

// Two logits at a time; the lower halves of their keys carry no information.
template <int kAhead>
POLYSPEC_FN void count_pairs(const Row<BFloat16>& row, const Digit& digit, const Worker& worker,
                             uint64_t* bins) {
  const uint32_t prefix = digit.prefix >> 16 | (digit.prefix & 0xffff0000u);
  const int shift = digit.shift - 16;
  const uint32_t kept = (0xffffu >> shift) * 0x10001u;
  const auto count = [&](uint32_t bin) {
    if (bin <= digit.most) add_weight(&bins[bin], One{}, 0.0f);
  };
  const auto count_vector = [&](const Words& words) {
    POLYSPEC_UNROLL
    for (int j = 0; j < 4; ++j) {
      const uint32_t both = (upper_keys(words.word[j]) ^ prefix) >> shift & kept;
      count(both & 0xffffu);
      count(both >> 16);
    }
  };
  visit_each<kAhead>(row, worker, count_vector, [&](float z) { count(digit.of(key_of(z))); });
}

template <int kAhead, class T, class Weight>
POLYSPEC_CALLED void count_digit_of(Row<T> row, Weight weight, Digit digit, Worker worker,
                                    uint64_t* bins) {
  assume_global(row.data);
  assume_shared(bins);
  if constexpr (std::is_same_v<Weight, One> && std::is_same_v<T, BFloat16>) {
    count_pairs<kAhead>(row, digit, worker, bins);
  } else {
    visit<kAhead>(row, worker, [&](float z) {
      const uint32_t bin = digit.of(key_of(z));
      if (bin <= digit.most) add_weight(&bins[bin], weight, z);
    });
  }
}

template <class Group, class T, class Weight>
POLYSPEC_FN void count_digit(Group& group, const Row<T>& row, const Weight& weight,
                             const Digit& digit) {
  // Masses take so many instructions that one load under way for each thread hides them.
  constexpr int kAhead = std::is_same_v<Weight, One> ? 4 : 2;
  count_digit_of<kAhead>(row, weight, digit, worker_of(group), group.bins());
}

// Not inlined: a kernel sums masses often, and each copy of the loop takes 10 KB.
template <class T, bool kFiltered>
POLYSPEC_CALLED uint64_t mass_of_span(TokenMass<Row<T>, kFiltered> weight, int lane, int lanes) {
  const Worker worker{lane, lanes};
  assume_global(weight.row.data);
  uint64_t sum = 0;
  if (kFiltered && weight.threshold > -kInfinity) {
    visit_from(weight.row, worker, weight.threshold,
               [&](int64_t, float z) { sum += weight.of(z); });
  } else {
    constexpr int kAhead = 4;
    const auto add = [&](float z) { sum += weight.unfiltered(z); };
    visit_vectors<kAhead>(
        weight.row, 0, weight.row.n, worker,
        [&](int64_t, int, const auto&, const Words* words) {  // missing elements have no mass
          POLYSPEC_UNROLL
          for (int u = 0; u < kAhead; ++u) {
            POLYSPEC_UNROLL
            for (int j = 0; j < static_cast<int>(16 / sizeof(T)); ++j) add(element<T>(words[u], j));
          }
        },
        [&](int64_t, float z) { add(z); });
  }
  return sum;
}

template <class Group, class T, bool kFiltered>
POLYSPEC_FN uint64_t lane_mass(Group& group, const TokenMass<Row<T>, kFiltered>& weight,
                               int64_t begin, int64_t end) {
  TokenMass<Row<T>, kFiltered> span = weight;
  span.row = part_of(weight.row, begin, end - begin);
  return mass_of_span(span, group.lane(), group.lanes());
}

template <class T, bool kFiltered>
POLYSPEC_FN uint64_t run_mass(const TokenMass<Row<T>, kFiltered>& weight, int64_t begin,
                              int64_t end) {
  TokenMass<Row<T>, kFiltered> run = weight;
  run.row = part_of(weight.row, begin, end - begin);
  return mass_of_span(run, 0, 1);
}

// Not inlined, since kernels pick often.
template <class T, bool kFiltered>
POLYSPEC_CALLED int64_t pick_of(TokenMass<Row<T>, kFiltered> weight, const uint64_t* tiles,
                                uint64_t target) {
  return token_at(Warp{}, weight.row.n, weight, tiles, target);
}
template <class Group, class T, bool kFiltered>
POLYSPEC_FN int64_t team_pick(Group& group, int64_t, const TokenMass<Row<T>, kFiltered>& weight,
                              uint64_t target) {
  return pick_of(weight, group.scratch().tiles, target);
}

// trunc(max(left, 0)), below 2^63; a device's conversion turns negative numbers into 0.
POLYSPEC_FN uint64_t whole_part(double left) {
#ifdef __CUDACC__
  return __double2ull_rz(left);
#else
  return left > 0.0 ? static_cast<uint64_t>(left) : 0;
#endif
}

// Residual masses of draft and target rows of one type and one vocabulary, where no filter cuts the
// target's: vectors of both rows are read side by side where they lie alike.
template <class T, Requests kind>
POLYSPEC_FN uint64_t both_masses(const ResidualWeight<T, kind>& weight, int64_t begin, int64_t end,
                                 int lane, int lanes) {
  constexpr int kWidth = 16 / sizeof(T);
  const Row<T> draft = as_row<T>(weight.q.row);
  assume_global(weight.p.row.data);
  assume_global(draft.data);
  const T* p = weight.p.row.data + begin;
  const T* q = draft.data + begin;
  VectorSplit<kWidth> split(reinterpret_cast<uintptr_t>(p) / sizeof(T),
                            static_cast<int>(end - begin));
  if (((reinterpret_cast<uintptr_t>(p) ^ reinterpret_cast<uintptr_t>(q)) & 15) != 0)
    split.use_none();
  // The unit is a power of two, so that either factor can be scaled by it.
  const double p_scale = weight.p_scale * weight.unit;
  const double q_scale = weight.q_scale * weight.unit;
  const TokenMass<Row<T>, Filter<kind>::kMayCut> q_mass{
      {q, 0}, weight.q.max, weight.q.threshold, weight.q.slope, weight.q.head};
  const auto left = [&](float p_logit, float q_logit) {
    return whole_part(weight.p.unfiltered_double(p_logit) * p_scale -
                      q_mass.double_of(q_logit) * q_scale);
  };
  uint64_t sum = 0;
  POLYSPEC_ROLLED
  for (int v = lane; v < split.vectors; v += lanes) {
    const Words p_words = load_vector(p + split.vector_at(v));
    const Words q_words = load_vector(q + split.vector_at(v));
    POLYSPEC_UNROLL
    for (int j = 0; j < kWidth; ++j) sum += left(element<T>(p_words, j), element<T>(q_words, j));
  }
  POLYSPEC_ROLLED
  for (int e = lane; e < split.ends; e += lanes) {
    const int at = split.end_at(e);
    sum += left(to_float(p[at]), to_float(q[at]));
  }
  return sum;
}

template <class Group, class T, Requests kind>
POLYSPEC_FN uint64_t lane_mass(Group& group, const ResidualWeight<T, kind>& weight, int64_t begin,
                               int64_t end) {
  float bound = weight.p.threshold;
  if constexpr (kIsMasked<T>) {
    bound = bound > -kLargest ? bound : -kLargest;  // skip forbidden ids, which have no mass
  } else if (weight.proposed < 0 && weight.target_to_draft == nullptr &&
             end <= weight.draft_vocab && is_row<T>(weight.q.row) && bound == -kInfinity) {
    return both_masses(weight, begin, end, group.lane(), group.lanes());
  }
  uint64_t sum = 0;
  const auto add = [&](int64_t i) { sum += weight(i); };
  if constexpr (Filter<kind>::kMayCut) {
    visit_from(part_of(weight.p.row, begin, end - begin), Worker{group.lane(), group.lanes()},
               bound, [&](int64_t i, float) { add(begin + i); });
  } else {
    POLYSPEC_ROLLED
    for (int64_t i = begin + group.lane(); i < end; i += group.lanes()) add(i);
  }
  return sum;
}

// Not inlined, like the search for bins. The caller no longer needs the weight, which takes many
// registers.
template <class Group, class Weight>
POLYSPEC_CALLED Drawn residual_pass(Group group, Weight weight, bool wanted, uint64_t bits) {
  group.assume_shared_memory();
  assume_global(weight.p.row.data);
  return draw_residual<Group>(group, weight, wanted, bits);
}
template <int kThreads, class Weight>
POLYSPEC_FN Drawn draw_residual(CtaGroup<kThreads>& group, const Weight& weight, bool wanted,
                                uint64_t bits) {
  const Drawn drawn = residual_pass(group, weight, wanted, bits);
  group.skip_reduction();
  return drawn;
}

}  // namespace polyspec::POLYSPEC_CORE
