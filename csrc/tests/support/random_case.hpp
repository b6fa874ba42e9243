// Random calls of polyspec::sample (and, in random_verify.hpp, of polyspec::verify), shared by the
// tests that compare backends.
//
// A call's inputs lie in one block of memory and its outputs in another, so that a test can run it
// again over other memory (a separate output block, or a device) and compare all outputs, and the
// gaps between them, with one memcmp. Output blocks are poisoned: a byte that one backend leaves
// unwritten and the other does not shows.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "polyspec/verify.hpp"
#include "support/check.hpp"

namespace cases {

using polyspec::DType;
using polyspec::PerRequest;
using polyspec::RowStatistics;
using polyspec::SampleParams;
using polyspec::VerifyParams;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// SplitMix64: the same cases with every standard library.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  double unit() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  bool chance(double probability) { return unit() < probability; }
  float normal() {  // near enough: a sum of uniforms
    double sum = -6.0;
    for (int i = 0; i < 12; ++i) sum += unit();
    return static_cast<float>(sum);
  }
  template <class T, size_t n>
  T one_of(const T (&values)[n]) {
    return values[below(n)];
  }

 private:
  uint64_t state_;
};

// A block of memory that pointers are handed out into before its address is known.
class Block {
 public:
  // Room for n values, 16-byte aligned, with 16 bytes of poison after them. Returns the offset.
  template <class T>
  size_t reserve(size_t n) {
    const size_t size = n * sizeof(T);
    if (with_guards) return reserve_before_guard(size);
    const size_t at = (bytes.size() + 15) / 16 * 16;
    bytes.resize(at + size + 16, kPoison);
    return at;
  }
  template <class T>
  size_t put(const std::vector<T>& values) {
    const size_t at = reserve<T>(values.size());
    if (!values.empty()) std::memcpy(bytes.data() + at, values.data(), values.size() * sizeof(T));
    return at;
  }
  static constexpr unsigned char kPoison = 0xa5;
  std::vector<unsigned char> bytes;

  // From then on arrays are aligned as their values only, and end where a page of the block ends; a
  // test may protect the page after it: `guards` are their offsets.
  static inline bool with_guards = false;
  static constexpr size_t kPage = 4096;
  std::vector<size_t> guards;

 private:
  size_t reserve_before_guard(size_t size) {
    guards.push_back(bytes.size() + (size + kPage - 1) / kPage * kPage);
    bytes.resize(guards.back() + kPage, kPoison);
    return guards.back() - size;
  }
};

inline uint16_t bfloat16_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline uint16_t float16_bits(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (value != value) return 0x7e00;
  if (magnitude >= 65520.0) return sign | 0x7c00;
  int exponent = -14;
  if (magnitude > 0.0) exponent = std::max(std::ilogb(magnitude), -14);
  const int significand = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return static_cast<uint16_t>(sign | (((exponent + 14) << 10) + significand));
}

inline size_t put_logits(Block& block, DType dtype, const std::vector<float>& logits) {
  if (dtype == DType::kFloat32) return block.put(logits);
  std::vector<uint16_t> halves(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) {
    halves[i] = dtype == DType::kBFloat16 ? bfloat16_bits(logits[i]) : float16_bits(logits[i]);
  }
  return block.put(halves);
}

// One row of logits of a random kind.
inline void random_row(Random& random, float* row, int64_t vocab, bool faults) {
  static const float kScales[] = {0.01f, 0.5f, 1.0f, 3.0f, 8.0f};
  const float scale = random.one_of(kScales);
  const int64_t kind = random.below(8);
  for (int64_t i = 0; i < vocab; ++i) {
    float z = scale * random.normal();
    if (kind == 0) z = std::nearbyint(z * 2.0f) / 2.0f;      // many ties
    if (kind == 1) z = random.chance(0.5) ? z : -kInf;       // half the vocabulary impossible
    if (kind == 2) z = i == vocab / 2 ? 1.0f : -kInf;        // one-hot
    if (kind == 3) z = random.chance(0.5) ? 0.0f : -0.0f;    // uniform, signs of zero mixed
    if (kind == 4) z = random.chance(0.01) ? z * 1e36f : z;  // a range that overflows differences
    row[i] = z;
  }
  if (!faults || !random.chance(0.06)) return;
  const int64_t at = random.below(vocab);
  const int64_t fault = random.below(3);
  if (fault == 0) row[at] = random.chance(0.5) ? kNan : -kNan;
  if (fault == 1) row[at] = kInf;
  if (fault == 2) {
    for (int64_t i = 0; i < vocab; ++i) row[i] = -kInf;
  }
}

inline DType random_dtype(Random& random) { return static_cast<DType>(random.below(3)); }

// A parameter as a scalar or as an array; the array's offset in the inputs, or kNone.
constexpr size_t kNone = ~size_t{0};
template <class T, size_t n>
void random_parameter(Random& random, Block& inputs, int64_t batch, const T (&values)[n], T* scalar,
                      size_t* at) {
  *scalar = random.one_of(values);
  *at = kNone;
  if (random.chance(0.5)) return;
  std::vector<T> each(static_cast<size_t>(batch));
  for (T& value : each) value = random.one_of(values);
  *at = inputs.put(each);
}

// Sampling and draw parameters of a call, still without addresses.
struct Knobs {
  Knobs(Random& random, Block& inputs, int64_t batch, int64_t vocab, int64_t slots) {
    const bool faults = random.chance(0.1);
    const bool filters = random.chance(0.7);
    const float hot[] = {0.0f,
                         0.0f,
                         0.3f,
                         1.0f,
                         1.0f,
                         2.5f,
                         1e-6f,
                         1e-42f,
                         faults ? kNan : 1e30f,
                         faults ? -1.0f : 0.7f};
    random_parameter(random, inputs, batch, hot, &call.temperature.value, &temperature);
    if (filters) {
      const int64_t k[] = {0, 0, 1, 2, 7, 50, vocab, vocab + 5, faults ? -1 : 3};
      const float p[] = {1.0f, 1.0f, 0.9f, 0.5f, 0.01f, 0.0f, 0.999999f, faults ? 1.5f : 0.8f};
      const float m[] = {0.0f, 0.0f, 0.05f, 0.5f, 1.0f, faults ? kNan : 1e-30f};
      random_parameter(random, inputs, batch, k, &call.top_k.value, &top_k);
      random_parameter(random, inputs, batch, p, &call.top_p.value, &top_p);
      random_parameter(random, inputs, batch, m, &call.min_p.value, &min_p);
    }
    const uint64_t seeds[] = {0, 1, random.bits(), ~uint64_t{0}};
    const int64_t positions[] = {0, 17, int64_t{1} << 40, faults ? -1 : 3};
    const int64_t rounds[] = {0, 5, 0xffffffff, faults ? int64_t{1} << 32 : 2};
    random_parameter(random, inputs, batch, seeds, &draw.seed.value, &seed);
    random_parameter(random, inputs, batch, positions, &draw.position.value, &position);
    random_parameter(random, inputs, batch, rounds, &draw.round.value, &round);
    draw.level = 1 + static_cast<int32_t>(random.below(65535));
    if (random.chance(0.3)) {
      std::vector<uint64_t> injected(static_cast<size_t>(batch * slots));
      for (uint64_t& one : injected) {
        const uint64_t choices[] = {0, ~uint64_t{0}, random.bits(), random.bits(), random.bits()};
        one = random.one_of(choices);
      }
      bits = inputs.put(injected);
    }
  }

  template <class Params>
  void apply(const unsigned char* inputs, Params* params) const {
    params->sampling = call;
    params->draw = draw;
    point(inputs, temperature, &params->sampling.temperature.data);
    point(inputs, top_k, &params->sampling.top_k.data);
    point(inputs, top_p, &params->sampling.top_p.data);
    point(inputs, min_p, &params->sampling.min_p.data);
    point(inputs, seed, &params->draw.seed.data);
    point(inputs, position, &params->draw.position.data);
    point(inputs, round, &params->draw.round.data);
    point(inputs, bits, &params->draw.bits);
  }

  template <class T>
  static void point(const unsigned char* base, size_t at, const T** pointer) {
    *pointer = at == kNone ? nullptr : reinterpret_cast<const T*>(base + at);
  }
  template <class T>
  static void point(unsigned char* base, size_t at, T** pointer) {
    *pointer = at == kNone ? nullptr : reinterpret_cast<T*>(base + at);
  }

  polyspec::SamplingParams call;
  polyspec::DrawParams draw;
  size_t temperature = kNone, top_k = kNone, top_p = kNone, min_p = kNone;
  size_t seed = kNone, position = kNone, round = kNone, bits = kNone;
};

inline int64_t random_vocab(Random& random) {
  static const int64_t kSizes[] = {1, 2, 3, 5, 31, 32, 33, 100, 1000, 1023, 1024, 1025, 2049, 5000};
  return random.chance(0.8) ? random.one_of(kSizes) : 1 + random.below(5000);
}

// The sizes of a call: all of them random where the vocabulary is 0.
struct Extent {
  Extent(int64_t vocab = 0, int64_t batch = 1, int64_t drafted = 0)
      : vocab(vocab), batch(batch), drafted(drafted) {}
  bool random() const { return vocab == 0; }
  int64_t vocab, batch;
  int64_t drafted;  // tokens of a block, nodes of a tree; 0: a few
};

// A call of polyspec::sample.
// The allow-masks of rows, from none allowed to all allowed. Bits past the vocabulary mean nothing.
inline std::vector<int32_t> random_masks(Random& random, int64_t rows, int64_t vocab) {
  const int64_t words = (vocab + 31) / 32;
  std::vector<int32_t> masks;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t density = random.chance(0.05) ? -1 : random.below(5);
    for (int64_t word = 0; word < words; ++word) {
      const uint64_t bits = random.bits(), more = random.bits();
      const uint64_t kinds[] = {0, bits & more & (more >> 32), bits, bits | more, ~uint64_t{0}};
      masks.push_back(static_cast<int32_t>(density < 0 ? 0 : kinds[density]));
    }
    if (density == 0) masks[masks.size() - static_cast<size_t>(1 + random.below(words))] = 1;
  }
  return masks;
}

class SampleCase {
 public:
  explicit SampleCase(uint64_t seed, Extent extent = {}) : random_(seed) {
    vocab = extent.random() ? random_vocab(random_) : extent.vocab;
    batch = extent.random() ? 1 + random_.below(4) : extent.batch;
    stride_ = vocab + random_.below(4);
    dtype_ = random_dtype(random_);
    std::vector<float> logits(static_cast<size_t>(batch * stride_),
                              kNan);  // NaN in the gaps: not to be read
    for (int64_t b = 0; b < batch; ++b)
      random_row(random_, logits.data() + b * stride_, vocab, true);
    logits_ = put_logits(inputs, dtype_, logits);
    knobs_.emplace_back(random_, inputs, batch, vocab, 1);
    ahead_ = random_.chance(0.5) ? 0 : random_.below(20);
    tokens_ = outputs.reserve<int64_t>(static_cast<size_t>(batch));
    logprobs_ = outputs.reserve<float>(static_cast<size_t>(batch));
    status_ = outputs.reserve<int32_t>(static_cast<size_t>(batch));
    statistics_ =
        random_.chance(0.8) ? outputs.reserve<RowStatistics>(static_cast<size_t>(batch)) : kNone;
    if (random_.chance(0.3)) allowed_ = inputs.put(random_masks(random_, batch, vocab));
  }

  SampleParams params(const unsigned char* in, unsigned char* out) const {
    SampleParams p;
    p.batch = batch;
    p.vocab = vocab;
    p.dtype = dtype_;
    p.logits = in + logits_;
    p.logits_stride = stride_;
    p.allowed_stride = (vocab + 31) / 32;
    Knobs::point(in, allowed_, &p.allowed);
    knobs_[0].apply(in, &p);
    p.ahead = ahead_;
    Knobs::point(out, tokens_, &p.tokens);
    Knobs::point(out, logprobs_, &p.logprobs);
    Knobs::point(out, status_, &p.status);
    Knobs::point(out, statistics_, &p.statistics);
    return p;
  }

  Block inputs, outputs;  // `outputs` stays poisoned: run over a copy of it
  int64_t batch, vocab;

 private:
  Random random_;
  int64_t stride_, ahead_;
  DType dtype_;
  std::vector<Knobs> knobs_;
  size_t logits_, tokens_, logprobs_, status_, statistics_, allowed_ = kNone;
};

// Names the first byte that differs; empty: none does.
inline std::string difference(const std::vector<unsigned char>& expected,
                              const std::vector<unsigned char>& got) {
  if (expected.size() != got.size()) return "another number of bytes";
  for (size_t i = 0; i < expected.size(); ++i) {
    if (expected[i] == got[i]) continue;
    return "output byte " + std::to_string(i) + " is " + std::to_string(got[i]) + ", expected " +
           std::to_string(expected[i]);
  }
  return "";
}

// Fails, naming the case and the first byte that differs.
inline void check_same(const std::vector<unsigned char>& expected,
                       const std::vector<unsigned char>& got, const std::string& name) {
  const std::string found = difference(expected, got);
  if (!found.empty()) check::fail(__FILE__, __LINE__, name + ": equal outputs", found);
}

}  // namespace cases
