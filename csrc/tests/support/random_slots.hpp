// The parameters of a random call, moved to slots of longer arrays.
#pragma once

#include <algorithm>
#include <numeric>

#include "support/random_case.hpp"

namespace cases {

class RandomSlots {
 public:
  // from: the call, over memory that stands only now. Wild: a slot may be of any value.
  template <class Params>
  RandomSlots(Random& random, Block& inputs, const Params& from, bool wild)
      : num_slots_(from.batch + random.below(4)) {
    std::vector<int64_t> slots(static_cast<size_t>(num_slots_));
    std::iota(slots.begin(), slots.end(), 0);
    for (size_t i = slots.size(); i > 1; --i)
      std::swap(slots[i - 1], slots[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);
    slots.resize(static_cast<size_t>(from.batch));
    temperature_ = scatter(inputs, slots, from.sampling.temperature.data, 1);
    top_k_ = scatter(inputs, slots, from.sampling.top_k.data, 1);
    top_p_ = scatter(inputs, slots, from.sampling.top_p.data, 1);
    min_p_ = scatter(inputs, slots, from.sampling.min_p.data, 1);
    seed_ = scatter(inputs, slots, from.draw.seed.data, 1);
    position_ = scatter(inputs, slots, from.draw.position.data, 1);
    round_ = scatter(inputs, slots, from.draw.round.data, 1);
    room_ = scatter(inputs, slots, from.cut.room.data, 1);
    if (from.cut.eos_stride != 0) eos_ = scatter(inputs, slots, from.cut.eos, from.cut.eos_count);
    const int64_t odd[] = {-1, num_slots_, INT64_MIN, INT64_MAX};
    if (wild && random.chance(0.5))
      slots[static_cast<size_t>(random.below(from.batch))] = random.one_of(odd);
    slots_ = inputs.put(slots);
  }

  template <class Params>
  void apply(const unsigned char* in, Params* p) const {
    Knobs::point(in, slots_, &p->slots);
    p->num_slots = num_slots_;
    repoint(in, temperature_, &p->sampling.temperature.data);
    repoint(in, top_k_, &p->sampling.top_k.data);
    repoint(in, top_p_, &p->sampling.top_p.data);
    repoint(in, min_p_, &p->sampling.min_p.data);
    repoint(in, seed_, &p->draw.seed.data);
    repoint(in, position_, &p->draw.position.data);
    repoint(in, round_, &p->draw.round.data);
    repoint(in, room_, &p->cut.room.data);
    repoint(in, eos_, &p->cut.eos);
  }

 private:
  template <class T>
  size_t scatter(Block& inputs, const std::vector<int64_t>& slots, const T* each, int64_t width) {
    if (each == nullptr) return kNone;
    std::vector<T> all(static_cast<size_t>(num_slots_ * width), static_cast<T>(77));
    for (size_t b = 0; b < slots.size(); ++b) {
      std::copy(each + static_cast<int64_t>(b) * width, each + static_cast<int64_t>(b + 1) * width,
                all.begin() + slots[b] * width);
    }
    return inputs.put(all);
  }

  template <class T>
  static void repoint(const unsigned char* in, size_t at, const T** pointer) {
    if (at != kNone) Knobs::point(in, at, pointer);
  }

  int64_t num_slots_;
  size_t slots_ = kNone, temperature_ = kNone, top_k_ = kNone, top_p_ = kNone, min_p_ = kNone;
  size_t seed_ = kNone, position_ = kNone, round_ = kNone, room_ = kNone, eos_ = kNone;
};

}  // namespace cases
