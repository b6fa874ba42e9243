// Random calls of polyspec::schedule_due, schedule_next and schedule_report, as random_case.hpp for
// polyspec::sample. The rows are any within the bounds, not only rows that a driver reaches.
#pragma once

#include <algorithm>

#include "polyspec/round_state.hpp"
#include "support/random_case.hpp"

namespace cases {

// State rows of 1 to 100 requests, so that they are more than one block of threads.
class RandomRows {
 public:
  explicit RandomRows(Random& random) {
    polyspec::RoundShape& shape = params.shape;
    shape.levels = 2 + static_cast<int32_t>(random.below(5));
    shape.capacity = 1 + random.below(30);
    shape.steps = random.below(4);
    params.batch = 1 + random.below(random.chance(0.5) ? 4 : 100);
    words.assign(static_cast<size_t>(params.batch * shape.words()), -3);
    for (int64_t row = 0; row < params.batch; ++row)
      fill(random, words.data() + row * shape.words());
  }

  polyspec::RoundParams params;
  std::vector<int64_t> words;

 private:
  using Shape = polyspec::RoundShape;

  void fill(Random& random, int64_t* line) const {
    const Shape& shape = params.shape;
    const int64_t total = random.below(shape.capacity + 1);
    line[Shape::kTotal] = total;
    line[Shape::kRoom] = random.below(12);
    line[Shape::kStopped] = random.chance(0.05);
    line[Shape::kStep] = random.below(shape.steps + 1);
    line[Shape::kTailWindow] = random.chance(0.5) ? 0 : random.below(5);
    int64_t left = total;  // pending tokens are in the text, too
    for (int32_t level = 1; level <= shape.levels; ++level) {
      int64_t* own = line + shape.level_at(level);
      own[Shape::kCached] = random.below(total + 1);
      own[Shape::kRound] = random.below(1000);
      own[Shape::kWindow] = random.chance(0.1) ? INT64_MAX : random.below(7);
      own[Shape::kBound] = random.below(4);
      own[Shape::kPending] =
          level == shape.levels ? 0 : random.below(std::min<int64_t>(left, 4) + 1);
      left -= own[Shape::kPending];
      if (level == 1) line[Shape::kTailPending] = random.below(own[Shape::kPending] + 1);
      own[Shape::kBlocks] = random.below(3);
      own[Shape::kClosed] = random.chance(0.1) ? 1 + random.below(2) : 0;
    }
    for (int64_t i = 0; i < total; ++i) line[shape.text_at() + i] = random.below(9);
  }
};

// The poison that Block puts after each output.
inline void check_poison(const std::vector<unsigned char>& bytes, size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) CHECK_EQ(int{Block::kPoison}, int{bytes[i]});
}

class ScheduleDueCase {
 public:
  explicit ScheduleDueCase(uint64_t seed, Extent = {}) : random_(seed), rows_(random_) {
    state_ = inputs.put(rows_.words);
    due_ = outputs.reserve<int64_t>(2 * static_cast<size_t>(rows_.params.batch));
  }

  polyspec::ScheduleDueParams params(const unsigned char* in, unsigned char* out) const {
    polyspec::ScheduleDueParams p;
    p.in = rows_.params;
    // Only schedule_report writes the rows.
    p.in.state = reinterpret_cast<int64_t*>(const_cast<unsigned char*>(in + state_));
    Knobs::point(out, due_, &p.due);
    return p;
  }

  Block inputs, outputs;  // `outputs` stays poisoned: run over a copy of it

 private:
  Random random_;
  RandomRows rows_;
  size_t state_, due_;
};

class ScheduleNextCase {
 public:
  explicit ScheduleNextCase(uint64_t seed, Extent = {}) : random_(seed), rows_(random_) {
    level_ = 1 + static_cast<int32_t>(random_.below(rows_.params.shape.levels));
    width_ = 1 + random_.below(12);
    state_ = inputs.put(rows_.words);
    const size_t batch = static_cast<size_t>(rows_.params.batch);
    input_ids_ = outputs.reserve<int64_t>(batch * static_cast<size_t>(width_));
    plan_ = outputs.reserve<int64_t>(batch * polyspec::kPlanRows);
    most_ = random_.below(12);
    if (random_.chance(0.5)) {
      std::vector<int64_t> unread(batch);
      for (int64_t& position : unread) position = random_.below(12) - 1;
      unread_ = inputs.put(unread);
    }
    pending_ = outputs.reserve<int64_t>(batch * static_cast<size_t>(most_));
  }

  polyspec::ScheduleNextParams params(const unsigned char* in, unsigned char* out) const {
    polyspec::ScheduleNextParams p;
    p.in = rows_.params;
    // Only schedule_report writes the rows.
    p.in.state = reinterpret_cast<int64_t*>(const_cast<unsigned char*>(in + state_));
    p.level = level_;
    p.width = width_;
    Knobs::point(out, input_ids_, &p.input_ids);
    Knobs::point(out, plan_, &p.plan);
    p.most = most_;
    Knobs::point(out, pending_, &p.pending);
    Knobs::point(in, unread_, &p.unread);
    return p;
  }
  void check_gaps(const std::vector<unsigned char>& out) const {
    const size_t rows = static_cast<size_t>(rows_.params.batch) * sizeof(int64_t);
    check_poison(out, input_ids_ + rows * static_cast<size_t>(width_), plan_);
    check_poison(out, plan_ + rows * polyspec::kPlanRows, pending_);
    check_poison(out, pending_ + rows * static_cast<size_t>(most_), out.size());
  }

  Block inputs, outputs;  // `outputs` stays poisoned: run over a copy of it

 private:
  Random random_;
  RandomRows rows_;
  int32_t level_;
  int64_t width_, most_;
  size_t state_, input_ids_, plan_, pending_, unread_ = kNone;
};

// The rows are outputs here: the call changes them.
class ScheduleReportCase {
 public:
  explicit ScheduleReportCase(uint64_t seed, Extent = {}) : random_(seed), rows_(random_) {
    const polyspec::RoundShape& shape = rows_.params.shape;
    const int64_t batch = rows_.params.batch;
    level_ = 1 + static_cast<int32_t>(random_.below(shape.levels));
    const bool draft = level_ == shape.levels;
    width_ = 1 + random_.below(6);
    num_eos_ = random_.below(3);
    std::vector<int64_t> plan(static_cast<size_t>(batch * polyspec::kPlanRows), -5);
    std::vector<int64_t> tokens, counts, eos;
    std::vector<int32_t> status;
    for (int64_t row = 0; row < batch; ++row) {
      const int64_t total = rows_.words[row * shape.words() + polyspec::RoundShape::kTotal];
      const int64_t length = random_.below(std::min<int64_t>(draft ? 6 : total, 6) + 1);
      plan[polyspec::kPlanPart * batch + row] = random_.chance(0.8);
      plan[polyspec::kPlanLengths * batch + row] = length;
      plan[polyspec::kPlanOfTail * batch + row] = random_.chance(0.5) ? 0 : length;
      for (int64_t i = 0; i < width_; ++i)
        tokens.push_back(random_.chance(0.05) ? -1 : random_.below(9));
      for (int64_t i = 0; i < (draft ? width_ : 1); ++i)
        status.push_back(random_.chance(0.1) ? polyspec::kStatusInf : 0);
      if (random_.chance(0.1)) status.back() |= polyspec::kStatusZeroResidual;
      counts.push_back(random_.below(length + 1));
      for (int64_t i = 0; i < num_eos_; ++i) eos.push_back(random_.below(10) - 1);
    }
    plan_ = inputs.put(plan);
    tokens_ = inputs.put(tokens);
    counts_ = draft && random_.chance(0.5) ? kNone : inputs.put(counts);
    status_ = inputs.put(status);
    eos_ = inputs.put(eos);
    state_ = outputs.put(rows_.words);
    appended_ = outputs.reserve<int64_t>(static_cast<size_t>(2 * batch));
    kept_ = outputs.reserve<int64_t>(static_cast<size_t>(batch * shape.levels));
  }

  polyspec::ScheduleReportParams params(const unsigned char* in, unsigned char* out) const {
    polyspec::ScheduleReportParams p;
    p.in = rows_.params;
    Knobs::point(out, state_, &p.in.state);
    p.level = level_;
    Knobs::point(in, plan_, &p.plan);
    p.width = width_;
    Knobs::point(in, tokens_, &p.tokens);
    Knobs::point(in, counts_, &p.counts);
    Knobs::point(in, status_, &p.status);
    p.num_eos = num_eos_;
    Knobs::point(in, eos_, &p.eos);
    Knobs::point(out, appended_, &p.appended);
    Knobs::point(out, kept_, &p.kept);
    return p;
  }
  void check_gaps(const std::vector<unsigned char>& out) const {
    check_poison(out, state_ + rows_.words.size() * sizeof(int64_t), appended_);
    const size_t places = static_cast<size_t>(2 * rows_.params.batch);
    check_poison(out, appended_ + places * sizeof(int64_t), kept_);
    const size_t lengths = static_cast<size_t>(rows_.params.batch * rows_.params.shape.levels);
    check_poison(out, kept_ + lengths * sizeof(int64_t), out.size());
  }

  Block inputs, outputs;  // run over a copy of `outputs`

 private:
  Random random_;
  RandomRows rows_;
  int32_t level_;
  int64_t width_, num_eos_;
  size_t plan_, tokens_, counts_, status_, eos_, state_, appended_, kept_;
};

}  // namespace cases
