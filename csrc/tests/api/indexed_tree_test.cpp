// Verification of trees with the target's rows and the nodes without gaps and parameters at slots:
// any arrangement gives the results of the rectangular call, bit for bit; an index out of range is
// a status of its request and reads nothing.
#include "polyspec/verify_tree.hpp"
#include "support/check.hpp"
#include "support/random_indexed.hpp"

namespace {

using polyspec::RowStatistics;
using polyspec::VerifyTreeParams;

void test_arrangements() {
  int compared = 0, wild = 0, refused = 0;
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    const cases::IndexedTreeCase call(seed);
    std::vector<unsigned char> expected = call.outputs.bytes, got = expected;
    const VerifyTreeParams params = call.params(call.inputs.bytes.data(), got.data());
    CHECK(polyspec::verify_tree(params).ok());
    if (call.wild) {
      ++wild;
      for (int64_t b = 0; b < call.batch; ++b)
        refused += (params.status[b] & polyspec::kStatusBadIndex) != 0 ? 1 : 0;
      continue;
    }
    const cases::TreeCase& plain = call.rectangular;
    CHECK(polyspec::verify_tree(plain.params(plain.inputs.bytes.data(), expected.data())).ok());
    cases::check_same(expected, got, "arrangement " + std::to_string(seed));
    ++compared;
  }
  std::printf("%d arrangements compared, %d wild ones, %d of their requests refused\n", compared,
              wild, refused);
  CHECK(compared > 2000 && refused > 100);
}

// Two requests over four tokens with two and three nodes, one after the other.
struct Call {
  Call() {
    cases::Random random(3);
    for (float& z : target) z = random.normal();
    p.batch = 2;
    p.nodes = p.depth = 3;
    p.vocab = 4;
    p.target_logits = target;
    p.target_stride[1] = 4;
    p.draft_tokens = drafted;
    p.parents = parents;
    p.offsets = offsets;
    p.num_rows = 7;
    p.sampling.temperature.value = 2.0f;
    p.tokens = tokens;
    p.num_accepted = accepted;
    p.path = path;
    p.rows = rows;
    p.logprobs = logprobs;
    p.status = status;
    p.statistics = statistics;
  }
  void run() { CHECK(polyspec::verify_tree(p).ok()); }
  bool same(const Call& other, int64_t b) const {
    const size_t at = static_cast<size_t>(b) * 4, nodes = static_cast<size_t>(b) * 3;
    return std::equal(tokens + at, tokens + at + 4, other.tokens + at) &&
           std::equal(rows + at, rows + at + 4, other.rows + at) &&
           std::equal(path + nodes, path + nodes + 3, other.path + nodes) &&
           std::memcmp(logprobs + at, other.logprobs + at, sizeof(float) * 4) == 0 &&
           std::memcmp(statistics + at, other.statistics + at, sizeof(RowStatistics) * 4) == 0 &&
           accepted[b] == other.accepted[b] && status[b] == other.status[b];
  }
  float target[28];
  // The entry after a request's nodes is not a node's.
  int64_t drafted[7] = {0, 1, -7, 2, 1, 3, -7}, parents[7] = {-1, -1, -7, -1, 0, 1, -7};
  int64_t offsets[3] = {0, 3, 7};
  VerifyTreeParams p;
  int64_t tokens[8], accepted[2], path[6], rows[8];
  float logprobs[8];
  int32_t status[2];
  RowStatistics statistics[8];
};

void test_out_of_range() {
  Call good;
  good.run();
  CHECK(good.status[0] == 0 && good.status[1] == 0);
  const auto refused = [&](const Call& call, int64_t b, int32_t status) {
    CHECK_EQ(status, call.status[b]);
    CHECK(call.accepted[b] == 0 && call.tokens[4 * b] == -1);
    CHECK(good.same(call, 1 - b));
  };
  Call packed;
  for (const int64_t bad : {int64_t{-1}, int64_t{8}, INT64_MAX, INT64_MIN}) {
    packed.offsets[2] = bad;
    packed.run();
    refused(packed, 1, polyspec::kStatusBadIndex);
  }
  for (const int64_t bad : {int64_t{3}, int64_t{0}}) {  // no row, fewer than none
    packed.offsets[2] = bad;
    packed.run();
    refused(packed, 1, polyspec::kStatusBadLength);
  }
  packed.offsets[2] = 7;
  packed.p.nodes = packed.p.depth = 2;  // request 1 has three nodes
  packed.run();
  CHECK_EQ(0, packed.status[0]);
  CHECK_EQ(int32_t{polyspec::kStatusBadLength}, packed.status[1]);

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
    CHECK_EQ(0, ended[0]);
  }
  slots[0] = 0;
  slotted.run();
  refused(slotted, 0, polyspec::kStatusBadParameter);
}

void test_arguments() {
  const auto invalid = [](auto change) {
    Call call;
    change(call.p);
    const polyspec::Result result = polyspec::verify_tree(call.p);
    CHECK(result.code == polyspec::Result::Code::kInvalidArgument);
  };
  const int64_t counts[2] = {1, 1}, slots[2] = {0, 1};
  invalid([](VerifyTreeParams& p) { p.num_rows = -1; });
  invalid([&](VerifyTreeParams& p) { p.counts = counts; });
  invalid([&](VerifyTreeParams& p) { p.slots = slots, p.num_slots = -1; });
}

}  // namespace

int main() {
  test_arrangements();
  test_out_of_range();
  test_arguments();
  return 0;
}
