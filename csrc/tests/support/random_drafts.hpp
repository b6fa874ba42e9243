// Random drafts and cuts for calls of both verifications.
#pragma once

#include <cstring>

#include "polyspec/verify.hpp"
#include "support/random_case.hpp"

namespace cases {

struct Drafted {
  int64_t token;  // 0 where the row has none
  RowStatistics statistics;
};

// A token of the row of logits that lies at byte `at`, by the sampling parameters of request b.
inline Drafted draft_token(const Block& inputs, const Knobs& knobs, int64_t b, DType dtype,
                           int64_t vocab, size_t at, uint64_t seed) {
  SampleParams p;
  p.batch = b + 1;  // per-request parameters are read at b
  p.vocab = vocab;
  p.dtype = dtype;
  const auto row = inputs.bytes.begin() + static_cast<std::ptrdiff_t>(at);
  const int64_t bytes = vocab * (dtype == DType::kFloat32 ? 4 : 2);
  std::vector<typename std::decay_t<decltype(inputs.bytes)>::value_type> rows;
  for (int64_t i = 0; i <= b; ++i) rows.insert(rows.end(), row, row + bytes);
  p.logits = rows.data();
  knobs.apply(inputs.bytes.data(), &p);
  p.draw = {};
  p.draw.seed.value = seed;
  std::vector<int64_t> token(static_cast<size_t>(b + 1));
  std::vector<float> logprob(token.size());
  std::vector<int32_t> status(token.size());
  std::vector<RowStatistics> statistics(token.size());
  p.tokens = token.data();
  p.logprobs = logprob.data();
  p.status = status.data();
  p.statistics = statistics.data();
  CHECK(polyspec::sample(p).ok());
  return {token.back() < 0 ? 0 : token.back(), statistics.back()};
}

// In half of the cases: tokens that end a text, room, and the outputs for them.
class Cuts {
 public:
  // drafted: ids, some of which end a text.
  Cuts(Random& random, Block& inputs, Block& outputs, int64_t batch, int64_t vocab,
       const std::vector<int64_t>& drafted) {
    if (random.chance(0.5)) return;
    const int64_t few = vocab < 8 ? vocab : 8;
    if (random.chance(0.7)) {
      eos_stride_ = random.chance(0.5) ? kEosCount : 0;
      std::vector<int64_t> ids(static_cast<size_t>(batch * kEosCount));
      const int64_t count = static_cast<int64_t>(drafted.size());
      for (int64_t& id : ids) id = random.chance(0.3) ? -1 : random.below(few);
      for (int64_t& id : ids) {
        if (count > 0 && random.chance(0.3)) id = drafted[static_cast<size_t>(random.below(count))];
      }
      eos_ = inputs.put(ids);
    }
    const int64_t rooms[] = {INT64_MAX, INT64_MAX, 0, 1, 2, 3, 100};
    random_parameter(random, inputs, batch, rooms, &room_value_, &room_);
    if (room_ != kNone && random.chance(0.1)) {
      const int64_t bad = -1;
      std::memcpy(inputs.bytes.data() + room_, &bad, sizeof bad);
    }
    for (size_t& one : told_) {
      if (random.chance(0.8)) one = outputs.reserve<int64_t>(static_cast<size_t>(batch));
    }
  }

  void apply(const unsigned char* in, unsigned char* out, polyspec::CutParams* cut) const {
    Knobs::point(in, eos_, &cut->eos);
    cut->eos_count = eos_ == kNone ? 0 : kEosCount;
    cut->eos_stride = eos_stride_;
    cut->room.value = room_value_;
    Knobs::point(in, room_, &cut->room.data);
    int64_t** told[] = {&cut->num_emitted, &cut->ended, &cut->cache_lengths, &cut->next_ids,
                        &cut->next_positions};
    for (int i = 0; i < 5; ++i) Knobs::point(out, told_[i], told[i]);
  }

 private:
  static constexpr int64_t kEosCount = 3;
  int64_t eos_stride_ = 0, room_value_ = INT64_MAX;
  size_t eos_ = kNone, room_ = kNone;
  size_t told_[5] = {kNone, kNone, kNone, kNone, kNone};
};

}  // namespace cases
