// The C interface of packed weights and attention: struct sizes and codes; nothing is computed
// here.
#include "api/c_calls.hpp"
#include "api/c_fields.hpp"
#include "api/checks.hpp"
#include "polyspec/attention.hpp"
#include "polyspec/dense.hpp"
#include "polyspec/int4.hpp"

namespace {

using polyspec::c_api::call;
using polyspec::c_api::from_result;
using polyspec::c_api::read_struct;

#define DENSE_SHAPE(F) F(outputs) F(inputs) F(dtype)
POLYSPEC_COPY(polyspec_dense_shape, DenseShape, 1, DENSE_SHAPE)
#define DENSE_PACK(F) F(weights) F(weights_stride) F(packed)
POLYSPEC_COPY(polyspec_dense_pack_params, DensePackParams, 2, DENSE_PACK)
#define DENSE_PRODUCT(F) F(tokens) F(x) F(x_stride) F(packed) F(bias) F(y) F(y_stride) F(workspace)
POLYSPEC_COPY(polyspec_dense_product_params, DenseProductParams, 2, DENSE_PRODUCT)

#define INT4_SHAPE(F) F(outputs) F(inputs) F(group) F(scale_dtype)
POLYSPEC_COPY(polyspec_int4_shape, Int4Shape, 1, INT4_SHAPE)
#define INT4_ROUND(F) F(dtype) F(weights) F(stride) F(importance) F(values) F(scales) F(zeros)
POLYSPEC_COPY(polyspec_int4_round_params, Int4RoundParams, 2, INT4_ROUND)
#define INT4_PACK(F) F(values) F(scales) F(zeros) F(packed)
POLYSPEC_COPY(polyspec_int4_pack_params, Int4PackParams, 2, INT4_PACK)
POLYSPEC_COPY(polyspec_int4_unpack_params, Int4UnpackParams, 2, INT4_PACK)
#define INT4_PRODUCT(F) F(tokens) F(dtype) F(x) F(x_stride) F(packed) F(y) F(y_stride) F(workspace)
POLYSPEC_COPY(polyspec_int4_product_params, Int4ProductParams, 2, INT4_PRODUCT)

// clang-format off
#define ATTENTION(F)                                                                \
  F(batch) F(heads) F(groups) F(tokens) F(length) F(width) F(value_width) F(dtype)  \
  F(causal) F(scale) F(query) F(key) F(value) F(mask) F(query_stride) F(key_stride) \
  F(value_stride) F(mask_stride) F(out) F(workspace) F(lengths)
// clang-format on
POLYSPEC_COPY(polyspec_attention_params, AttentionParams, 1, ATTENTION)

static_assert(POLYSPEC_LAYOUT_DENSE == static_cast<int>(polyspec::PackedLayout::kDense), "layout");
static_assert(POLYSPEC_LAYOUT_INT4 == static_cast<int>(polyspec::PackedLayout::kInt4), "layout");

polyspec_code read_shape(const char* function, const polyspec_dense_shape* given,
                         polyspec::DenseShape* out) {
  polyspec_dense_shape in = polyspec_dense_shape_default();
  const polyspec_code code = read_struct(function, given, {}, &in);
  if (code == POLYSPEC_OK) copy(in, out);
  return code;
}
polyspec_code read_shape(const char* function, const polyspec_int4_shape* given,
                         polyspec::Int4Shape* out) {
  polyspec_int4_shape in = polyspec_int4_shape_default();
  const polyspec_code code = read_struct(function, given, {}, &in);
  if (code == POLYSPEC_OK) copy(in, out);
  return code;
}

constexpr auto read = [](const char* function, const auto& in, auto* to) {
  copy(in, to);
  return read_shape(function, in.shape, &to->shape);
};

// A matrix that is packed where a stream runs.
polyspec::Result int4_pack_on(const polyspec::Int4PackParams& params, polyspec::Stream stream) {
  return polyspec::int4_pack(params, stream);
}

// pack and unpack, which take no stream.
template <class Params, class Struct>
polyspec_code repack(const char* function, polyspec::Result (*operation)(const Params&),
                     const Struct* given, Struct in) {
  Params params;
  polyspec_code code = read_struct(function, given, {}, &in);
  if (code == POLYSPEC_OK) code = read(function, in, &params);
  return code == POLYSPEC_OK ? from_result(function, operation(params)) : code;
}

// Bytes for a matrix and so many tokens; -1, with an explanation, where they are none.
template <class Shape, class CShape, class Count>
int64_t bytes(const char* function, const CShape* given, int64_t tokens, const Count& count) {
  Shape shape;
  if (read_shape(function, given, &shape) != POLYSPEC_OK) return -1;
  polyspec::Result result = polyspec::check_shape(shape);
  if (result.ok() && tokens < 0) result = polyspec::expected("tokens", ">= 0", tokens);
  return from_result(function, result) == POLYSPEC_OK ? count(shape, tokens) : -1;
}

template <class Shape, class CShape>
polyspec_code packed_check(const char* function, const CShape* given,
                           polyspec::Result (*check)(const Shape&, const void*, int64_t),
                           const void* packed, int64_t bytes) {
  Shape shape;
  const polyspec_code code = read_shape(function, given, &shape);
  return code == POLYSPEC_OK ? from_result(function, check(shape, packed, bytes)) : code;
}

}  // namespace

// ---- Dense product ----

int64_t polyspec_dense_packed_bytes(const polyspec_dense_shape* shape) {
  return bytes<polyspec::DenseShape>(__func__, shape, 0, [](const auto& read, int64_t) {
    return polyspec::dense_packed_bytes(read);
  });
}

int64_t polyspec_dense_workspace_bytes(const polyspec_dense_shape* shape, int64_t tokens) {
  return bytes<polyspec::DenseShape>(__func__, shape, tokens, &polyspec::dense_workspace_bytes);
}

polyspec_code polyspec_dense_pack(const polyspec_dense_pack_params* params) {
  return repack(__func__, &polyspec::dense_pack, params, polyspec_dense_pack_params_default());
}

polyspec_code polyspec_dense_packed_check(const polyspec_dense_shape* shape, const void* packed,
                                          int64_t bytes) {
  return packed_check(__func__, shape, &polyspec::dense_packed_check, packed, bytes);
}

polyspec_code polyspec_dense_product(const polyspec_dense_product_params* params,
                                     const polyspec_stream* stream) {
  return call(__func__, &polyspec::dense_product, params, polyspec_dense_product_params_default(),
              {}, stream, read);
}

// ---- 4-bit product ----

int64_t polyspec_int4_packed_bytes(const polyspec_int4_shape* shape) {
  return bytes<polyspec::Int4Shape>(__func__, shape, 0, [](const auto& read, int64_t) {
    return polyspec::int4_packed_bytes(read);
  });
}

int64_t polyspec_int4_workspace_bytes(const polyspec_int4_shape* shape, int64_t tokens) {
  return bytes<polyspec::Int4Shape>(__func__, shape, tokens, &polyspec::int4_workspace_bytes);
}

polyspec_code polyspec_int4_round(const polyspec_int4_round_params* params,
                                  const polyspec_stream* stream) {
  return call(__func__, &polyspec::int4_round, params, polyspec_int4_round_params_default(), {},
              stream, read);
}

polyspec_code polyspec_int4_pack(const polyspec_int4_pack_params* params) {
  return repack<polyspec::Int4PackParams>(__func__, &polyspec::int4_pack, params,
                                          polyspec_int4_pack_params_default());
}

int64_t polyspec_int4_packed_bytes_on(const polyspec_int4_shape* shape, int32_t device) {
  polyspec::Int4Shape read;
  if (read_shape(__func__, shape, &read) != POLYSPEC_OK) return -1;
  polyspec::Result result = polyspec::check_shape(read);
  const auto on = static_cast<polyspec::Stream::Device>(device);
  if (result.ok() && device != POLYSPEC_CPU && device != POLYSPEC_CUDA)
    result = polyspec::expected("device", "POLYSPEC_CPU (0) or POLYSPEC_CUDA (1)", device);
  if (from_result(__func__, result) != POLYSPEC_OK) return -1;
  return polyspec::int4_packed_bytes(read, on);
}

polyspec_code polyspec_int4_pack_on(const polyspec_int4_pack_params* params,
                                    const polyspec_stream* stream) {
  return call(__func__, &int4_pack_on, params, polyspec_int4_pack_params_default(), {}, stream,
              read);
}

polyspec_code polyspec_int4_unpack(const polyspec_int4_unpack_params* params) {
  return repack(__func__, &polyspec::int4_unpack, params, polyspec_int4_unpack_params_default());
}

polyspec_code polyspec_int4_packed_check(const polyspec_int4_shape* shape, const void* packed,
                                         int64_t bytes) {
  return packed_check(__func__, shape, &polyspec::int4_packed_check, packed, bytes);
}

polyspec_code polyspec_int4_product(const polyspec_int4_product_params* params,
                                    const polyspec_stream* stream) {
  return call(__func__, &polyspec::int4_product, params, polyspec_int4_product_params_default(), {},
              stream, read);
}

// ---- Attention ----

int64_t polyspec_attention_workspace_bytes(const polyspec_attention_params* params) {
  polyspec_attention_params in = polyspec_attention_params_default();
  if (read_struct(__func__, params, {}, &in) != POLYSPEC_OK) return -1;
  polyspec::AttentionParams read;
  copy(in, &read);
  if (from_result(__func__, polyspec::check_shape(read)) != POLYSPEC_OK) return -1;
  return polyspec::attention_workspace_bytes(read);
}

polyspec_code polyspec_attention(const polyspec_attention_params* params,
                                 const polyspec_stream* stream) {
  return call(__func__, &polyspec::attention, params, polyspec_attention_params_default(), {},
              stream, [](const char*, const auto& in, auto* to) {
                copy(in, to);
                return polyspec_code{POLYSPEC_OK};
              });
}
