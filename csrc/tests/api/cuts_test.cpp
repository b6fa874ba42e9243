// EOS and length cuts of polyspec::verify: with cuts a call emits a prefix of the tokens that it
// emits without, and returns the begin of the next pass. The test derives the prefix again from the
// uncut call.
#include <algorithm>
#include <vector>

#include "support/random_verify.hpp"

namespace {

using polyspec::CutParams;
using polyspec::VerifyParams;

template <class T>
T* at(std::vector<T>& values, int64_t i) {
  return values.data() + i;
}

// The outputs of a call, poisoned, in separate memory.
struct Outputs {
  explicit Outputs(const VerifyParams& p)
      : rows(p.draft_len + 1),
        tokens(static_cast<size_t>(p.batch * rows), -99),
        logprobs(tokens.size(), 99.0f),
        statistics(tokens.size(), RowStatisticsOf{9.0f, 9.0f, 9}),
        accepted(static_cast<size_t>(p.batch), -99),
        status(accepted.size(), -99),
        emitted(accepted),
        ended(accepted),
        cached(accepted),
        next(accepted),
        where(accepted) {}

  VerifyParams into(VerifyParams p, bool cut) {
    p.tokens = tokens.data();
    p.logprobs = logprobs.data();
    p.statistics = statistics.data();
    p.num_accepted = accepted.data();
    p.status = status.data();
    if (!cut) {
      p.cut = {};
      return p;
    }
    p.cut.num_emitted = emitted.data();
    p.cut.ended = ended.data();
    p.cut.cache_lengths = cached.data();
    p.cut.next_ids = next.data();
    p.cut.next_positions = where.data();
    return p;
  }

  using RowStatisticsOf = polyspec::RowStatistics;
  int64_t rows;
  std::vector<int64_t> tokens;
  std::vector<float> logprobs;
  std::vector<RowStatisticsOf> statistics;
  std::vector<int64_t> accepted;
  std::vector<int32_t> status;
  std::vector<int64_t> emitted, ended, cached, next, where;
};

int64_t of(const polyspec::PerRequest<int64_t>& parameter, int64_t b) {
  return parameter.data != nullptr ? parameter.data[b] : parameter.value;
}

// Compares request b of a call with cuts with the same request without; counts the cases.
void check_request(const VerifyParams& p, const Outputs& plain, const Outputs& got, int64_t b,
                   int seen[5]) {
  const size_t r = static_cast<size_t>(b);
  const int64_t room = of(p.cut.room, b);
  const int64_t position = of(p.draw.position, b);
  if (room < 0) {
    CHECK_EQ(int32_t{polyspec::kStatusBadParameter},
             got.status[r] & int32_t{polyspec::kStatusBadParameter});
    CHECK_EQ(0, got.emitted[r]);
    CHECK_EQ(0, got.ended[r]);
    CHECK_EQ(-1, got.tokens[static_cast<size_t>(b * got.rows)]);
    ++seen[0];
    return;
  }
  std::vector<int64_t> text;
  for (int64_t i = 0; i < plain.rows; ++i) {
    const int64_t token = plain.tokens[static_cast<size_t>(b * plain.rows + i)];
    if (token >= 0) text.push_back(token);
  }
  const size_t whole = text.size();
  std::vector<int64_t> eos;
  for (int64_t i = 0; i < p.cut.eos_count; ++i) eos.push_back(p.cut.eos[b * p.cut.eos_stride + i]);
  const auto end = std::find_first_of(text.begin(), text.end(), eos.begin(), eos.end());
  const bool stops = end != text.end() && end - text.begin() < room;
  if (stops) text.erase(end + 1, text.end());
  if (static_cast<int64_t>(text.size()) > room) text.resize(static_cast<size_t>(room));
  const int64_t n = static_cast<int64_t>(text.size());
  const bool full = n == room;
  const int64_t accepted = stops || full ? std::min(plain.accepted[r], n) : plain.accepted[r];
  // The row that the status speaks of, if it does, is num_accepted of the plain call.
  const bool reached = !(stops || full) || n > plain.accepted[r];

  CHECK_EQ(n, got.emitted[r]);
  CHECK_EQ((stops ? 1 : 0) + (full ? 2 : 0), got.ended[r]);
  CHECK_EQ(accepted, got.accepted[r]);
  CHECK_EQ(reached ? plain.status[r] : 0, got.status[r]);
  CHECK_EQ(position + std::min(accepted, n), got.cached[r]);
  CHECK_EQ(n > 0 ? text.back() : -1, got.next[r]);
  CHECK_EQ(n > 0 ? position + n - 1 : -1, got.where[r]);
  for (int64_t i = 0; i < got.rows; ++i) {
    const size_t slot = static_cast<size_t>(b * got.rows + i);
    CHECK_EQ(i < n ? text[static_cast<size_t>(i)] : -1, got.tokens[slot]);
    if (i < n) {
      CHECK_EQ(plain.logprobs[slot], got.logprobs[slot]);
      CHECK_EQ(plain.statistics[slot].mass, got.statistics[slot].mass);
    } else {
      CHECK(std::isnan(got.logprobs[slot]));
      CHECK_EQ(uint64_t{0}, got.statistics[slot].mass);
    }
  }
  if (stops) ++seen[1];
  if (full && n > 0) ++seen[2];
  if (!reached && plain.status[r] != 0) ++seen[3];
  if (static_cast<size_t>(n) < whole && n <= plain.accepted[r]) ++seen[4];
}

// Random calls; every kind of cut must occur.
void test_random() {
  int seen[5] = {0, 0, 0, 0, 0};
  for (uint64_t seed = 0; seed < 1500; ++seed) {
    const cases::VerifyCase call(seed);
    std::vector<unsigned char> scrap = call.outputs.bytes;
    const VerifyParams p = call.params(call.inputs.bytes.data(), scrap.data());
    Outputs plain(p), got(p);
    CHECK(polyspec::verify(plain.into(p, false)).ok());
    CHECK(polyspec::verify(got.into(p, true)).ok());
    for (int64_t b = 0; b < p.batch; ++b) check_request(p, plain, got, b, seen);
  }
  for (const int count : seen) CHECK_ABOVE(3, count);
}

// Worked out by hand: argmax 3, 1, 2, drafted 3, 1, from position 40.
struct Toy {
  Toy() {
    p.batch = 1;
    p.draft_len = 2;
    p.vocab = 4;
    p.target_logits = logits;
    p.target_stride[1] = 4;
    p.draft_tokens = drafted;
    p.sampling.temperature.value = 0.0f;
    p.draw.position.value = 40;
  }
  void check(int64_t n, int64_t ended, int64_t cached, int64_t next, int64_t where) {
    Outputs out(p);
    CHECK(polyspec::verify(out.into(p, true)).ok());
    const int64_t text[] = {3, 1, 2};
    for (int64_t i = 0; i < 3; ++i) CHECK_EQ(i < n ? text[i] : -1, *at(out.tokens, i));
    CHECK_EQ(n, out.emitted[0]);
    CHECK_EQ(ended, out.ended[0]);
    CHECK_EQ(cached, out.cached[0]);
    CHECK_EQ(next, out.next[0]);
    CHECK_EQ(where, out.where[0]);
    CHECK_EQ(0, out.status[0]);
  }
  void eos(const std::vector<int64_t>& ids) {
    list = ids;
    p.cut.eos = list.data();
    p.cut.eos_count = static_cast<int64_t>(list.size());
  }
  const float logits[12] = {0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 1, 0};
  const int64_t drafted[2] = {3, 1};
  std::vector<int64_t> list;
  VerifyParams p;
};

void test_by_hand() {
  Toy toy;
  toy.check(3, 0, 42, 2, 42);
  toy.eos({0, -1});
  toy.check(3, 0, 42, 2, 42);
  toy.eos({-1, 2});
  toy.check(3, polyspec::kEndedEos, 42, 2, 42);
  toy.eos({1, 2});
  toy.check(2, polyspec::kEndedEos, 42, 1, 41);
  toy.p.cut.room.value = 2;
  toy.check(2, polyspec::kEndedEos | polyspec::kEndedRoom, 42, 1, 41);
  toy.p.cut.room.value = 1;
  toy.check(1, polyspec::kEndedRoom, 41, 3, 40);
  toy.p.cut.room.value = 0;
  // A request without room is not read: an address that nothing may be read from does no harm.
  toy.p.target_logits = reinterpret_cast<const void*>(uintptr_t{64});
  toy.check(0, polyspec::kEndedRoom, 40, -1, -1);
}

// The last token's position is the largest there is; beyond it the request's position is wrong.
void test_last_position() {
  Toy toy;
  toy.p.draw.position.value = INT64_MAX - 2;
  toy.check(3, 0, INT64_MAX, 2, INT64_MAX);
  for (const int64_t position : {INT64_MAX - 1, INT64_MAX}) {
    toy.p.draw.position.value = position;
    Outputs out(toy.p);
    CHECK(polyspec::verify(out.into(toy.p, true)).ok());
    CHECK_EQ(int32_t{polyspec::kStatusBadParameter}, out.status[0]);
    CHECK_EQ(int64_t{-1}, *at(out.tokens, 0));
    CHECK_EQ(position, out.cached[0]);
    CHECK_EQ(int64_t{-1}, out.where[0]);
  }
}

// Only the outputs that are asked for are written, and a wrong argument is named.
void test_arguments() {
  Toy toy;
  Outputs out(toy.p);
  VerifyParams p = out.into(toy.p, true);
  p.cut = {};
  p.cut.next_ids = out.next.data();
  CHECK(polyspec::verify(p).ok());
  CHECK_EQ(2, out.next[0]);
  CHECK_EQ(-99, out.emitted[0]);
  CHECK_EQ(-99, out.where[0]);
  p.cut.eos_count = 1;
  CHECK(polyspec::verify(p).code == polyspec::Result::Code::kInvalidArgument);
  p.cut.eos_count = -1;
  CHECK(polyspec::verify(p).code == polyspec::Result::Code::kInvalidArgument);
  p.cut.eos_count = 0;
  p.cut.room.value = -1;
  CHECK(polyspec::verify(p).code == polyspec::Result::Code::kInvalidArgument);
}

}  // namespace

int main() {
  test_by_hand();
  test_last_position();
  test_random();
  test_arguments();
  return 0;
}
