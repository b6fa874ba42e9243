// The C interface of the operators: struct sizes, codes and texts; nothing is computed here.
#include <cstddef>

#include "api/c_errors.hpp"
#include "cuda/launch.hpp"
#include "polyspec/dense.hpp"
#include "polyspec/int4.hpp"
#include "polyspec/polyspec.h"
#include "polyspec/verify_tree.hpp"

namespace {

using polyspec::c_api::fail;
using polyspec::c_api::guarded;
using polyspec::c_api::read_optional;
using polyspec::c_api::read_struct;

polyspec_code from_result(const char* function, const polyspec::Result& result) {
  static_assert(
      static_cast<int>(polyspec::Result::Code::kInvalidArgument) == POLYSPEC_INVALID_ARGUMENT, "");
  static_assert(static_cast<int>(polyspec::Result::Code::kUnsupported) == POLYSPEC_UNSUPPORTED, "");
  static_assert(static_cast<int>(polyspec::Result::Code::kCudaError) == POLYSPEC_CUDA_ERROR, "");
  if (result.ok()) return POLYSPEC_OK;
  return fail(static_cast<polyspec_code>(result.code), function, result.message);
}

// What sample and verify share: the optional structs behind their pointers, in C++ terms.
struct Common {
  polyspec::SamplingParams sampling;
  polyspec::DrawParams draw;
  polyspec::Stream stream;
};

polyspec_code read_common(const char* function, const polyspec_sampling* sampling,
                          const polyspec_draw* draw, const polyspec_stream* stream, Common* out) {
  polyspec_sampling s = polyspec_sampling_default();
  polyspec_draw d = polyspec_draw_default();
  polyspec_stream w = polyspec_stream_default();
  polyspec_code code = read_optional(function, sampling, &s);
  if (code == POLYSPEC_OK) code = read_optional(function, draw, &d);
  if (code == POLYSPEC_OK) code = read_optional(function, stream, &w, {POLYSPEC_STREAM_MIN_SIZE});
  if (code != POLYSPEC_OK) return code;

  out->sampling.temperature = {s.temperature.data, s.temperature.value};
  out->sampling.top_k = {s.top_k.data, s.top_k.value};
  out->sampling.top_p = {s.top_p.data, s.top_p.value};
  out->sampling.min_p = {s.min_p.data, s.min_p.value};

  out->draw.seed = {d.seed.data, d.seed.value};
  out->draw.position = {d.position.data, d.position.value};
  out->draw.round = {d.round.data, d.round.value};
  out->draw.level = d.level;
  out->draw.bits = d.bits;

  if (w.device == POLYSPEC_CPU) {
    out->stream = polyspec::Stream::cpu({w.executor.run, w.executor.pool});
  } else if (w.device == POLYSPEC_CUDA) {
    out->stream = polyspec::Stream::on(static_cast<CUstream_st*>(w.cuda_stream));
    out->stream.overlap = w.overlap != 0;
  } else {
    return fail(POLYSPEC_INVALID_ARGUMENT, function,
                "the device of a stream is neither CPU nor CUDA");
  }
  return POLYSPEC_OK;
}

polyspec::DenseShape shape_of(const polyspec_dense_params& in) {
  return {in.outputs, in.inputs, static_cast<polyspec::DType>(in.dtype)};
}

polyspec::Int4Shape shape_of(const polyspec_int4_params& in) {
  polyspec::Int4Shape shape;
  shape.outputs = in.outputs;
  shape.inputs = in.inputs;
  shape.group = in.group;
  shape.scale_dtype = static_cast<polyspec::DType>(in.scale_dtype);
  return shape;
}

// pack and unpack.
polyspec_code repack(const char* function, const polyspec_int4_params* params,
                     polyspec::Result (*how)(const polyspec::Int4PackParams&)) {
  polyspec_int4_params in = polyspec_int4_params_default();
  const polyspec_code code = read_struct(function, params, {}, &in);
  if (code != POLYSPEC_OK) return code;
  return from_result(function, how({shape_of(in), in.values, in.scales, in.zeros, in.packed}));
}

// The same 16 bytes under two names.
static_assert(sizeof(polyspec_row_statistics) == sizeof(polyspec::RowStatistics),
              "row distribution");
static_assert(offsetof(polyspec_row_statistics, threshold) ==
                  offsetof(polyspec::RowStatistics, threshold),
              "row distribution");
static_assert(offsetof(polyspec_row_statistics, mass) == offsetof(polyspec::RowStatistics, mass),
              "row distribution");

polyspec::RowStatistics* as_statistics(polyspec_row_statistics* statistics) {
  return reinterpret_cast<polyspec::RowStatistics*>(statistics);
}
const polyspec::RowStatistics* as_statistics(const polyspec_row_statistics* statistics) {
  return reinterpret_cast<const polyspec::RowStatistics*>(statistics);
}

// Where a text ends, of the parameters of verify and verify_tree.
template <class Params>
polyspec::CutParams cut_of(const Params& in) {
  polyspec::CutParams cut;
  cut.eos = in.eos;
  cut.eos_count = in.eos_count;
  cut.eos_stride = in.eos_stride;
  cut.room.data = in.room;
  cut.num_emitted = in.num_emitted;
  cut.ended = in.ended;
  cut.cache_lengths = in.cache_lengths;
  cut.next_ids = in.next_ids;
  cut.next_positions = in.next_positions;
  return cut;
}

static_assert(POLYSPEC_FLOAT16 == static_cast<int>(polyspec::DType::kFloat16), "dtype");
static_assert(POLYSPEC_BFLOAT16 == static_cast<int>(polyspec::DType::kBFloat16), "dtype");
static_assert(POLYSPEC_RULE_BLOCK == static_cast<int>(polyspec::Rule::kBlock), "rule");
static_assert(POLYSPEC_STATUS_DRAFT_STATISTICS_MISMATCH ==
                  int{polyspec::kStatusDraftStatisticsMismatch},
              "status");
static_assert(POLYSPEC_STATUS_BAD_TREE == int{polyspec::kStatusBadTree}, "status");
static_assert(POLYSPEC_STATUS_BAD_INDEX == int{polyspec::kStatusBadIndex}, "status");
static_assert(POLYSPEC_STATUS_ZERO_RESIDUAL == int{polyspec::kStatusZeroResidual}, "status");
static_assert(POLYSPEC_VERIFY_WORKSPACE_BYTES == polyspec::kVerifyWorkspaceBytes, "workspace");
static_assert(POLYSPEC_ENDED_EOS == int{polyspec::kEndedEos}, "ended");
static_assert(POLYSPEC_ENDED_ROOM == int{polyspec::kEndedRoom}, "ended");
static_assert(POLYSPEC_STATUS_NOTES == int{polyspec::kStatusNotes}, "status");

}  // namespace

int32_t polyspec_has_cuda(void) { return polyspec::cuda::available() ? 1 : 0; }

// ---- Operators ----

polyspec_code polyspec_sample(const polyspec_sample_params* params, const polyspec_stream* stream) {
  return guarded(__func__, [&, function = __func__]() -> polyspec_code {
    polyspec_sample_params in = polyspec_sample_params_default();
    Common common;
    polyspec_code code =
        read_struct(function, params,
                    {POLYSPEC_SAMPLE_PARAMS_MIN_SIZE, POLYSPEC_SAMPLE_PARAMS_NODELESS_SIZE}, &in);
    if (code == POLYSPEC_OK) code = read_common(function, in.sampling, in.draw, stream, &common);
    if (code != POLYSPEC_OK) return code;

    polyspec::SampleParams p;
    p.batch = in.batch;
    p.vocab = in.vocab;
    p.dtype = static_cast<polyspec::DType>(in.dtype);
    p.logits = in.logits;
    p.logits_stride = in.logits_stride;
    p.sampling = common.sampling;
    p.draw = common.draw;
    p.node = {in.node.data, in.node.value};
    p.tokens = in.tokens;
    p.logprobs = in.logprobs;
    p.status = in.status;
    p.statistics = as_statistics(in.statistics);
    return from_result(function, polyspec::sample(p, common.stream));
  });
}

polyspec_code polyspec_verify(const polyspec_verify_params* params, const polyspec_stream* stream) {
  return guarded(__func__, [&, function = __func__]() -> polyspec_code {
    polyspec_verify_params in = polyspec_verify_params_default();
    Common common;
    polyspec_code code =
        read_struct(function, params,
                    {POLYSPEC_VERIFY_PARAMS_MIN_SIZE, POLYSPEC_VERIFY_PARAMS_UNCUT_SIZE,
                     POLYSPEC_VERIFY_PARAMS_RECTANGULAR_SIZE},
                    &in);
    if (code == POLYSPEC_OK) code = read_common(function, in.sampling, in.draw, stream, &common);
    if (code != POLYSPEC_OK) return code;

    polyspec::VerifyParams p;
    p.batch = in.batch;
    p.draft_len = in.draft_len;
    p.vocab = in.vocab;
    p.draft_vocab = in.draft_vocab;
    p.target_dtype = static_cast<polyspec::DType>(in.target_dtype);
    p.target_logits = in.target_logits;
    p.draft_dtype = static_cast<polyspec::DType>(in.draft_dtype);
    p.draft_logits = in.draft_logits;
    for (int i = 0; i < 2; ++i) {
      p.target_stride[i] = in.target_stride[i];
      p.draft_stride[i] = in.draft_stride[i];
    }
    p.draft_statistics = as_statistics(in.draft_statistics);
    p.target_to_draft = in.target_to_draft;
    p.draft_tokens = in.draft_tokens;
    p.draft_tokens_stride = in.draft_tokens_stride;
    p.draft_lengths = in.draft_lengths;
    p.draft_rows = in.draft_rows;
    p.draft_rows_stride = in.draft_rows_stride;
    p.num_draft_rows = in.num_draft_rows;
    p.offsets = in.offsets;
    p.num_rows = in.num_rows;
    p.slots = in.slots;
    p.num_slots = in.num_slots;
    p.sampling = common.sampling;
    p.draw = common.draw;
    p.rule = static_cast<polyspec::Rule>(in.rule);
    p.tokens = in.tokens;
    p.num_accepted = in.num_accepted;
    p.logprobs = in.logprobs;
    p.status = in.status;
    p.statistics = as_statistics(in.statistics);
    p.cut = cut_of(in);
    p.workspace = in.workspace;
    return from_result(function, polyspec::verify(p, common.stream));
  });
}

polyspec_code polyspec_verify_tree(const polyspec_verify_tree_params* params,
                                   const polyspec_stream* stream) {
  return guarded(__func__, [&, function = __func__]() -> polyspec_code {
    polyspec_verify_tree_params in = polyspec_verify_tree_params_default();
    Common common;
    polyspec_code code =
        read_struct(function, params, {POLYSPEC_VERIFY_TREE_PARAMS_RECTANGULAR_SIZE}, &in);
    if (code == POLYSPEC_OK) code = read_common(function, in.sampling, in.draw, stream, &common);
    if (code != POLYSPEC_OK) return code;

    polyspec::VerifyTreeParams p;
    p.batch = in.batch;
    p.nodes = in.nodes;
    p.depth = in.depth;
    p.vocab = in.vocab;
    p.draft_vocab = in.draft_vocab;
    p.target_dtype = static_cast<polyspec::DType>(in.target_dtype);
    p.target_logits = in.target_logits;
    for (int i = 0; i < 2; ++i) p.target_stride[i] = in.target_stride[i];
    p.draft_tokens = in.draft_tokens;
    p.parents = in.parents;
    p.counts = in.counts;
    p.draft_dtype = static_cast<polyspec::DType>(in.draft_dtype);
    p.draft_logits = in.draft_logits;
    p.draft_stride = in.draft_stride;
    p.num_draft_rows = in.num_draft_rows;
    p.draft_rows = in.draft_rows;
    p.draft_statistics = as_statistics(in.draft_statistics);
    p.target_to_draft = in.target_to_draft;
    p.offsets = in.offsets;
    p.num_rows = in.num_rows;
    p.slots = in.slots;
    p.num_slots = in.num_slots;
    p.sampling = common.sampling;
    p.draw = common.draw;
    p.tokens = in.tokens;
    p.num_accepted = in.num_accepted;
    p.path = in.path;
    p.rows = in.rows;
    p.logprobs = in.logprobs;
    p.status = in.status;
    p.statistics = as_statistics(in.statistics);
    p.cut = cut_of(in);
    return from_result(function, polyspec::verify_tree(p, common.stream));
  });
}

// ---- Dense product ----

int64_t polyspec_dense_packed_bytes(const polyspec_dense_params* params) {
  polyspec_dense_params in = polyspec_dense_params_default();
  if (read_struct(__func__, params, {}, &in) != POLYSPEC_OK) return -1;
  return polyspec::dense_packed_bytes(shape_of(in));
}

int64_t polyspec_dense_workspace_bytes(const polyspec_dense_params* params) {
  polyspec_dense_params in = polyspec_dense_params_default();
  if (read_struct(__func__, params, {}, &in) != POLYSPEC_OK) return -1;
  return polyspec::dense_workspace_bytes(shape_of(in), in.tokens);
}

polyspec_code polyspec_dense_pack(const polyspec_dense_params* params) {
  polyspec_dense_params in = polyspec_dense_params_default();
  const polyspec_code code = read_struct(__func__, params, {}, &in);
  if (code != POLYSPEC_OK) return code;
  return from_result(
      __func__, polyspec::dense_pack({shape_of(in), in.weights, in.weights_stride, in.packed}));
}

polyspec_code polyspec_dense_product(const polyspec_dense_params* params,
                                     const polyspec_stream* stream) {
  return guarded(__func__, [&, function = __func__]() -> polyspec_code {
    polyspec_dense_params in = polyspec_dense_params_default();
    Common common;
    polyspec_code code = read_struct(function, params, {}, &in);
    if (code == POLYSPEC_OK) code = read_common(function, nullptr, nullptr, stream, &common);
    if (code != POLYSPEC_OK) return code;

    polyspec::DenseProductParams p;
    p.shape = shape_of(in);
    p.tokens = in.tokens;
    p.x = in.x;
    p.x_stride = in.x_stride;
    p.packed = in.packed;
    p.bias = in.bias;
    p.y = in.y;
    p.y_stride = in.y_stride;
    p.workspace = in.workspace;
    return from_result(function, polyspec::dense_product(p, common.stream));
  });
}

// ---- 4-bit product ----

int64_t polyspec_int4_packed_bytes(const polyspec_int4_params* params) {
  polyspec_int4_params in = polyspec_int4_params_default();
  if (read_struct(__func__, params, {}, &in) != POLYSPEC_OK) return -1;
  return polyspec::int4_packed_bytes(shape_of(in));
}

int64_t polyspec_int4_workspace_bytes(const polyspec_int4_params* params) {
  polyspec_int4_params in = polyspec_int4_params_default();
  if (read_struct(__func__, params, {}, &in) != POLYSPEC_OK) return -1;
  return polyspec::int4_workspace_bytes(shape_of(in), in.tokens);
}

polyspec_code polyspec_int4_pack(const polyspec_int4_params* params) {
  return repack(__func__, params, &polyspec::int4_pack);
}

polyspec_code polyspec_int4_unpack(const polyspec_int4_params* params) {
  return repack(__func__, params, &polyspec::int4_unpack);
}

polyspec_code polyspec_int4_product(const polyspec_int4_params* params,
                                    const polyspec_stream* stream) {
  return guarded(__func__, [&, function = __func__]() -> polyspec_code {
    polyspec_int4_params in = polyspec_int4_params_default();
    Common common;
    polyspec_code code = read_struct(function, params, {}, &in);
    if (code == POLYSPEC_OK) code = read_common(function, nullptr, nullptr, stream, &common);
    if (code != POLYSPEC_OK) return code;

    polyspec::Int4ProductParams p;
    p.shape = shape_of(in);
    p.tokens = in.tokens;
    p.dtype = static_cast<polyspec::DType>(in.dtype);
    p.x = in.x;
    p.x_stride = in.x_stride;
    p.packed = in.packed;
    p.y = in.y;
    p.y_stride = in.y_stride;
    p.workspace = in.workspace;
    return from_result(function, polyspec::int4_product(p, common.stream));
  });
}
