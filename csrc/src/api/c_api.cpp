// The C interface of sampling and verification: struct sizes and codes; nothing is computed here.
#include "api/c_calls.hpp"
#include "api/c_fields.hpp"
#include "cuda/launch.hpp"
#include "polyspec/support.hpp"
#include "polyspec/verify_tree.hpp"

namespace {

using polyspec::c_api::call;
using polyspec::c_api::count_fields;
using polyspec::c_api::read_optional;

#define SAMPLING_FIELDS(F) F(temperature) F(top_k) F(top_p) F(min_p)
POLYSPEC_COPY(polyspec_sampling, SamplingParams, 1, SAMPLING_FIELDS)

#define DRAW_FIELDS(F) F(seed) F(position) F(round) F(level) F(bits)
POLYSPEC_COPY(polyspec_draw, DrawParams, 1, DRAW_FIELDS)

// The optional structs of sample and verify.
template <class Struct, class Params>
polyspec_code copy_draws(const char* function, const Struct& in, Params* to) {
  polyspec_sampling sampling = polyspec_sampling_default();
  polyspec_draw draw = polyspec_draw_default();
  polyspec_code code = read_optional(function, in.sampling, &sampling);
  if (code == POLYSPEC_OK) code = read_optional(function, in.draw, &draw);
  if (code != POLYSPEC_OK) return code;
  copy(sampling, &to->sampling);
  copy(draw, &to->draw);
  return POLYSPEC_OK;
}

// clang-format off
#define SAMPLE_FIELDS(F)                                                      \
  F(batch) F(vocab) F(dtype) F(logits) F(logits_stride) F(tokens) F(logprobs) \
  F(status) F(statistics) F(node) F(allowed) F(allowed_stride)
// clang-format on
POLYSPEC_COPY(polyspec_sample_params, SampleParams, 3, SAMPLE_FIELDS)

// Fields common to verify and verify_tree, cuts included.
// clang-format off
#define VERIFICATION_FIELDS(F)                                                       \
  F(batch) F(vocab) F(draft_vocab) F(target_dtype) F(target_logits) F(target_stride) \
  F(draft_dtype) F(draft_logits) F(draft_stride) F(draft_statistics)                 \
  F(target_to_draft) F(draft_tokens) F(tokens) F(num_accepted) F(logprobs) F(status) \
  F(statistics) F(draft_rows) F(num_draft_rows) F(offsets) F(num_rows) F(slots)      \
  F(num_slots) F(workspace) F(allowed) F(allowed_stride)
#define CUT_FIELDS(F)                                                                \
  F(eos) F(eos_count) F(eos_stride) F(room) F(num_emitted) F(ended) F(cache_lengths) \
  F(next_ids) F(next_positions)

template <class Struct>
void copy_cut(const Struct& in, polyspec::CutParams* to) {
  CUT_FIELDS(POLYSPEC_FIELD)
}

#define VERIFY_FIELDS(F)                                                      \
  VERIFICATION_FIELDS(F) F(draft_len) F(draft_tokens_stride) F(draft_lengths) \
  F(draft_rows_stride) F(rule)
// clang-format on
void copy(const polyspec_verify_params& in, polyspec::VerifyParams* to) {
  static_assert(count_fields<polyspec_verify_params>() == 3 VERIFY_FIELDS(POLYSPEC_COUNT)
                                                              CUT_FIELDS(POLYSPEC_COUNT),
                "a field of polyspec_verify_params is not copied");
  VERIFY_FIELDS(POLYSPEC_FIELD)
  copy_cut(in, &to->cut);
}

// clang-format off
#define VERIFY_TREE_FIELDS(F)                                                   \
  VERIFICATION_FIELDS(F) F(nodes) F(depth) F(parents) F(counts) F(path) F(rows) \
  F(rule)
// clang-format on
void copy(const polyspec_verify_tree_params& in, polyspec::VerifyTreeParams* to) {
  static_assert(count_fields<polyspec_verify_tree_params>() == 3 VERIFY_TREE_FIELDS(POLYSPEC_COUNT)
                                                                   CUT_FIELDS(POLYSPEC_COUNT),
                "a field of polyspec_verify_tree_params is not copied");
  VERIFY_TREE_FIELDS(POLYSPEC_FIELD)
  copy_cut(in, &to->cut);
}

// Reads any of the three.
constexpr auto read = [](const char* function, const auto& in, auto* to) {
  copy(in, to);
  return copy_draws(function, in, to);
};

static_assert(POLYSPEC_FLOAT16 == static_cast<int>(polyspec::DType::kFloat16), "dtype");
static_assert(POLYSPEC_BFLOAT16 == static_cast<int>(polyspec::DType::kBFloat16), "dtype");
static_assert(POLYSPEC_RULE_BLOCK == static_cast<int>(polyspec::Rule::kBlock), "rule");
static_assert(POLYSPEC_STATUS_DRAFT_STATISTICS_MISMATCH ==
                  int{polyspec::kStatusDraftStatisticsMismatch},
              "status");
static_assert(POLYSPEC_STATUS_BAD_TREE == int{polyspec::kStatusBadTree}, "status");
static_assert(POLYSPEC_STATUS_BAD_INDEX == int{polyspec::kStatusBadIndex}, "status");
static_assert(POLYSPEC_STATUS_ZERO_RESIDUAL == int{polyspec::kStatusZeroResidual}, "status");
static_assert(POLYSPEC_STATUS_NOTES == int{polyspec::kStatusNotes}, "status");
static_assert(POLYSPEC_VERIFY_WORKSPACE_BYTES == polyspec::kVerifyWorkspaceBytes, "workspace");
static_assert(POLYSPEC_ENDED_EOS == int{polyspec::kEndedEos}, "ended");
static_assert(POLYSPEC_ENDED_ROOM == int{polyspec::kEndedRoom}, "ended");
static_assert(POLYSPEC_OP_SCHEDULE == static_cast<int>(polyspec::Op::kSchedule), "op");
static_assert(POLYSPEC_OP_ATTENTION == static_cast<int>(polyspec::Op::kAttention), "op");
static_assert(POLYSPEC_CUDA == static_cast<int>(polyspec::Stream::Device::kCuda), "device");

}  // namespace

int32_t polyspec_has_cuda(void) { return polyspec::cuda::available() ? 1 : 0; }

int32_t polyspec_supports(int32_t op, int32_t device, int32_t dtype) {
  return polyspec::supports(static_cast<polyspec::Op>(op),
                            static_cast<polyspec::Stream::Device>(device),
                            static_cast<polyspec::DType>(dtype))
             ? 1
             : 0;
}

const char* polyspec_isa(int32_t op) { return polyspec::isa(static_cast<polyspec::Op>(op)); }

polyspec_code polyspec_sample(const polyspec_sample_params* params, const polyspec_stream* stream) {
  return call(__func__, &polyspec::sample, params, polyspec_sample_params_default(),
              {POLYSPEC_SAMPLE_PARAMS_MIN_SIZE, POLYSPEC_SAMPLE_PARAMS_NODELESS_SIZE,
               POLYSPEC_SAMPLE_PARAMS_MASKLESS_SIZE},
              stream, read);
}

polyspec_code polyspec_verify(const polyspec_verify_params* params, const polyspec_stream* stream) {
  return call(__func__, &polyspec::verify, params, polyspec_verify_params_default(),
              {POLYSPEC_VERIFY_PARAMS_MIN_SIZE, POLYSPEC_VERIFY_PARAMS_UNCUT_SIZE,
               POLYSPEC_VERIFY_PARAMS_RECTANGULAR_SIZE, POLYSPEC_VERIFY_PARAMS_MASKLESS_SIZE},
              stream, read);
}

polyspec_code polyspec_verify_tree(const polyspec_verify_tree_params* params,
                                   const polyspec_stream* stream) {
  return call(
      __func__, &polyspec::verify_tree, params, polyspec_verify_tree_params_default(),
      {POLYSPEC_VERIFY_TREE_PARAMS_RECTANGULAR_SIZE, POLYSPEC_VERIFY_TREE_PARAMS_WALKED_SIZE,
       POLYSPEC_VERIFY_TREE_PARAMS_MASKLESS_SIZE, POLYSPEC_VERIFY_TREE_PARAMS_RULELESS_SIZE},
      stream, read);
}
