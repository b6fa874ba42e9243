// Verification with draft rows in a pool, parameters at slots and the target's rows without gaps:
// any arrangement gives the results of the rectangular call, bit for bit; proposals of both kinds
// can be in one block; an index out of range is a status of its request and reads nothing.
#include <limits>

#include "polyspec/verify.hpp"
#include "support/check.hpp"
#include "support/random_indexed.hpp"

namespace {

using polyspec::RowStatistics;
using polyspec::Rule;
using polyspec::VerifyParams;

constexpr float kInf = std::numeric_limits<float>::infinity();

void test_arrangements() {
  int compared = 0, wild = 0, refused = 0;
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    const cases::IndexedVerifyCase call(seed);
    std::vector<unsigned char> expected = call.outputs.bytes, got = expected;
    const VerifyParams params = call.params(call.inputs.bytes.data(), got.data());
    CHECK(polyspec::verify(params).ok());
    if (call.wild) {
      ++wild;
      for (int64_t b = 0; b < call.batch; ++b)
        refused += (params.status[b] & polyspec::kStatusBadIndex) != 0 ? 1 : 0;
      continue;
    }
    if (call.bare) continue;
    const cases::VerifyCase& plain = call.rectangular;
    CHECK(polyspec::verify(plain.params(plain.inputs.bytes.data(), expected.data())).ok());
    cases::check_same(expected, got, "arrangement " + std::to_string(seed));
    ++compared;
  }
  std::printf("%d arrangements compared, %d wild ones, %d of their requests refused\n", compared,
              wild, refused);
  CHECK(compared > 2000 && refused > 100);
}

// Two requests with three draft tokens each over four tokens; everything by hand.
struct Call {
  Call() {
    cases::Random random(3);
    for (float& z : target) z = random.normal();
    for (float& z : pool) z = random.normal();
    p.batch = 2;
    p.draft_len = 3;
    p.vocab = p.draft_vocab = 4;
    p.target_logits = target;
    p.target_stride[0] = 16;
    p.target_stride[1] = 4;
    p.draft_logits = pool;
    p.draft_stride[1] = 4;
    p.draft_rows = rows;
    p.draft_rows_stride = 3;
    p.num_draft_rows = 6;
    p.draft_tokens = drafted;
    p.draft_tokens_stride = 3;
    p.tokens = tokens;
    p.num_accepted = accepted;
    p.logprobs = logprobs;
    p.status = status;
    p.statistics = statistics;
  }
  void run() { CHECK(polyspec::verify(p).ok()); }
  bool same(const Call& other, int64_t b) const {
    const size_t at = static_cast<size_t>(b) * 4;
    return std::equal(tokens + at, tokens + at + 4, other.tokens + at) &&
           std::memcmp(logprobs + at, other.logprobs + at, sizeof(float) * 4) == 0 &&
           std::memcmp(statistics + at, other.statistics + at, sizeof(RowStatistics) * 4) == 0 &&
           accepted[b] == other.accepted[b] && status[b] == other.status[b];
  }
  float target[32], pool[24];
  int64_t rows[6] = {0, 1, 2, 3, 4, 5};
  int64_t drafted[6] = {0, 1, 2, 3, 0, 1};
  VerifyParams p;
  int64_t tokens[8], accepted[2];
  float logprobs[8];
  int32_t status[2];
  RowStatistics statistics[8];
};

// A deterministic proposal is equal to a one-hot draft row, for any other proposals.
void test_mixed_proposals() {
  int64_t stood = 0, fell = 0;
  for (const Rule rule : {Rule::kToken, Rule::kBlock}) {
    for (uint64_t seed = 0; seed < 500; ++seed) {
      Call by_id, by_row;
      for (Call* call : {&by_id, &by_row}) {
        call->p.rule = rule;
        call->p.draw.seed.value = seed;
      }
      for (const int i : {1, 3, 4}) {
        by_id.rows[i] = -1;
        for (int x = 0; x < 4; ++x) by_row.pool[4 * i + x] = x == by_row.drafted[i] ? 0.5f : -kInf;
      }
      by_id.run();
      by_row.run();
      for (const int64_t b : {0, 1}) CHECK(by_id.same(by_row, b));
      for (const int64_t accepted : by_id.accepted) accepted > 1 ? ++stood : ++fell;
    }
  }
  CHECK(stood > 100 && fell > 100);
}

void test_out_of_range() {
  Call good;
  good.p.sampling.temperature.value = 2.0f;
  good.run();
  CHECK(good.status[0] == 0 && good.status[1] == 0);
  const auto refused = [&](const Call& call, int64_t b, int32_t status) {
    CHECK_EQ(status, call.status[b]);
    CHECK(good.same(call, 1 - b));
  };
  for (const int64_t bad : {int64_t{-2}, int64_t{6}, INT64_MAX, INT64_MIN}) {
    Call call;
    call.p.sampling.temperature.value = 2.0f;
    call.rows[3] = bad;  // request 1's first token
    call.run();
    refused(call, 1, polyspec::kStatusBadIndex | polyspec::kStatusDraftRow);
    CHECK(call.accepted[1] == 0 && call.tokens[4] == -1);
  }
  // Ids after a rejected row are not read.
  const uint64_t reject[8] = {~0ull, ~0ull, ~0ull, 0, ~0ull, ~0ull, ~0ull, 0};
  Call late;
  late.p.draw.bits = reject;
  late.drafted[0] = 0;
  late.target[0] = -kInf;  // so that token 0 is rejected
  late.rows[2] = 99;
  late.run();
  CHECK(late.status[0] == 0 && late.accepted[0] == 0);

  const float temperatures[] = {-5.0f, 2.0f, 2.0f};
  int64_t slots[] = {1, 2};
  Call slotted;
  slotted.p.sampling.temperature.data = temperatures;
  slotted.p.slots = slots;
  slotted.p.num_slots = 3;
  slotted.run();
  CHECK(good.same(slotted, 0) && good.same(slotted, 1));
  int64_t ended[2];
  slotted.p.cut.ended = ended;
  for (const int64_t bad : {int64_t{-1}, int64_t{3}, INT64_MAX}) {
    slots[0] = bad;
    slotted.run();
    refused(slotted, 0, polyspec::kStatusBadIndex);
    CHECK(ended[0] == 0 && slotted.tokens[0] == -1);
  }
  slots[0] = 0;
  slotted.run();
  refused(slotted, 0, polyspec::kStatusBadParameter);

  Call packed;
  packed.p.sampling.temperature.value = 2.0f;
  int64_t offsets[] = {0, 4, 8}, padded[] = {0, 1, 2, -7, 3, 0, 1, -7};
  int64_t rows[] = {0, 1, 2, 99, 3, 4, 5, 99};
  packed.p.offsets = offsets;
  packed.p.num_rows = 8;
  packed.p.draft_tokens = padded;
  packed.p.draft_rows = rows;
  packed.run();
  CHECK(good.same(packed, 0) && good.same(packed, 1));
  for (const int64_t bad : {int64_t{-1}, int64_t{9}, INT64_MAX, INT64_MIN}) {
    offsets[2] = bad;
    packed.run();
    refused(packed, 1, polyspec::kStatusBadIndex);
  }
  for (const int64_t bad : {int64_t{4}, int64_t{0}}) {  // no row, fewer than none
    offsets[2] = bad;
    packed.run();
    refused(packed, 1, polyspec::kStatusBadLength);
  }
  offsets[0] = 0, offsets[1] = 5, offsets[2] = 8;  // four draft tokens, and room for three
  packed.run();
  CHECK_EQ(int32_t{polyspec::kStatusBadLength}, packed.status[0]);
  CHECK_EQ(0, packed.status[1]);
}

// Request 0 has three draft tokens and rows, request 1 a token and unused rows: the tokens are the
// rectangular call's with room for them.
void test_without_bonus() {
  const int64_t offsets[3] = {0, 3, 8}, lengths[2] = {3, 1}, room[2] = {3, 9};
  int64_t whole = 0;
  for (uint64_t seed = 0; seed < 500; ++seed) {
    Call cut, bare;
    const std::vector<float> pool(bare.pool, bare.pool + 24);
    std::copy(pool.begin(), pool.begin() + 12, cut.target);  // so that many are accepted
    std::copy(pool.begin(), pool.begin() + 12, bare.target);
    std::copy(cut.target + 16, cut.target + 32, bare.target + 12);
    cut.p.cut.room.data = room;
    bare.p.offsets = offsets;
    bare.p.num_rows = 8;
    bare.p.draft_rows_stride = bare.p.draft_tokens_stride = bare.p.target_stride[0] = -1;
    int64_t cached[2], next[2], ended[2];
    bare.p.cut.cache_lengths = cached;
    bare.p.cut.next_positions = next;
    bare.p.cut.ended = ended;
    for (Call* call : {&cut, &bare}) {
      call->p.rule = seed % 2 == 0 ? Rule::kToken : Rule::kBlock;
      call->p.draft_lengths = lengths;
      call->p.draw.seed.value = seed;
      call->run();
    }
    for (const int64_t b : {0, 1}) CHECK(cut.same(bare, b));
    CHECK(ended[0] == 0 && ended[1] == 0);
    CHECK_EQ(next[0], cached[0]);
    whole += bare.accepted[0] == 3 ? 1 : 0;
  }
  CHECK(whole > 100);
  Call few;
  const int64_t more[2] = {3, 6};
  few.p.offsets = offsets;
  few.p.num_rows = 8;
  few.p.draft_lengths = more;
  few.p.draft_len = 6;
  few.p.draft_rows = nullptr;
  few.p.draft_logits = nullptr;
  int64_t tokens[14];
  float logprobs[14];
  few.p.tokens = tokens;
  few.p.logprobs = logprobs;
  few.p.statistics = nullptr;
  few.run();
  CHECK_EQ(0, few.status[0]);
  CHECK_EQ(int32_t{polyspec::kStatusBadLength}, few.status[1]);
}

void test_arguments() {
  const auto invalid = [](auto change) {
    Call call;
    change(call.p);
    const polyspec::Result result = polyspec::verify(call.p);
    CHECK(result.code == polyspec::Result::Code::kInvalidArgument);
  };
  const int64_t offsets[3] = {0, 4, 8}, slots[2] = {0, 1};
  invalid([](VerifyParams& p) { p.num_draft_rows = -1; });
  invalid([](VerifyParams& p) { p.draft_logits = nullptr; });
  invalid([&](VerifyParams& p) { p.offsets = offsets, p.num_rows = -1; });
  invalid([&](VerifyParams& p) { p.slots = slots, p.num_slots = -1; });
  Call empty;  // no pool at all: everything is deterministic, or an id out of range
  empty.p.draft_logits = nullptr;
  empty.p.num_draft_rows = 0;
  std::fill(empty.rows, empty.rows + 3, -1);
  empty.run();
  CHECK(empty.status[0] == 0 &&
        empty.status[1] == (polyspec::kStatusBadIndex | polyspec::kStatusDraftRow));
}

}  // namespace

int main() {
  test_arrangements();
  test_mixed_proposals();
  test_out_of_range();
  test_without_bonus();
  test_arguments();
  return 0;
}
