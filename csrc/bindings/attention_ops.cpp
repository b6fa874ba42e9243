// The operator of polyspec/attention.hpp for torch's dispatcher, on the LibTorch stable ABI (target
// 2.11).
#include <algorithm>

#include "key_spans.hpp"
#include "polyspec/attention.hpp"
#include "stable.hpp"

namespace {

using namespace bindings;

// Data of a tensor of the call's dtype with unit stride in the last dimension.
const void* data_of(const Tensor& tensor, const char* name, int32_t dtype) {
  STD_TORCH_CHECK(dtype_of(tensor) == dtype, name, ": expected the dtype of query");
  expect_unit_stride(tensor, name);
  return tensor.const_data_ptr();
}

void expect_four(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.dim() == 4, name, ": expected 4 dimensions, got ", tensor.dim());
}

void expect_width(int64_t width, const char* name) {
  STD_TORCH_CHECK(
      width >= 1 && width <= polyspec::kAttentionWidth && width % polyspec::kAttentionStep == 0,
      name, ": expected a multiple of ", polyspec::kAttentionStep, " up to ",
      polyspec::kAttentionWidth, " in dimension 3, got ", width);
}

void set_strides(const Tensor& tensor, int64_t (&strides)[3]) {
  for (int64_t axis = 0; axis < 3; ++axis) strides[axis] = tensor.stride(axis);
}

// query [b, h, t, d], key [b, groups, n, d], value [b, groups, n, e], mask [b or 1, 1, t, n],
// lengths [b].
Tensor attention(const Tensor& queries, const Tensor& keys, const Tensor& values,
                 const OptTensor& mask, double scale, bool causal, const OptTensor& lengths) {
  expect_four(queries, "query");
  expect_four(keys, "key");
  expect_four(values, "value");
  const Tensor query = unexpanded(queries), key = unexpanded(keys), value = unexpanded(values);
  const Place place(query);
  polyspec::AttentionParams params;
  params.batch = query.size(0);
  params.heads = query.size(1);
  params.tokens = query.size(2);
  params.width = query.size(3);
  params.groups = key.size(1);
  params.length = key.size(2);
  params.value_width = value.size(3);
  expect(key, "key", place, {params.batch, params.groups, params.length, params.width});
  expect(value, "value", place, {params.batch, params.groups, params.length, params.value_width});
  expect_width(params.width, "query");
  expect_width(params.value_width, "value");
  STD_TORCH_CHECK(params.length >= 1, "key: expected size >= 1 in dimension 2, got ",
                  params.length);
  STD_TORCH_CHECK(params.groups >= 1 && params.heads >= 1 && params.heads % params.groups == 0,
                  "key: expected a size in dimension 1 that divides the heads of query, ",
                  params.heads, ", got ", params.groups);
  STD_TORCH_CHECK(!causal || params.length >= params.tokens,
                  "key: expected at least the tokens of query in dimension 2 where causal, ",
                  params.tokens, ", got ", params.length);
  params.causal = causal;
  params.lengths = integers(lengths, "lengths", place, {params.batch});
  const int32_t dtype = dtype_of(query);
  params.dtype = wide_float_type(query, "query");
  params.scale = static_cast<float>(scale);
  params.query = data_of(query, "query", dtype);
  params.key = data_of(key, "key", dtype);
  params.value = data_of(value, "value", dtype);
  set_strides(query, params.query_stride);
  set_strides(key, params.key_stride);
  set_strides(value, params.value_stride);
  if (mask.has_value()) {
    expect_four(*mask, "mask");
    const int64_t rows = mask->size(0) == 1 ? 1 : params.batch;
    expect(*mask, "mask", place, {rows, 1, params.tokens, params.length});
    params.mask = data_of(*mask, "mask", dtype);
    params.mask_stride[0] = rows == 1 ? 0 : mask->stride(0);
    params.mask_stride[1] = mask->stride(2);
  }
  const Tensor out =
      empty(place, {params.batch, params.tokens, params.heads, params.value_width}, dtype);
  params.out = out.mutable_data_ptr();
  std::optional<Tensor> workspace;
  const bool needed = place.cuda() && params.length > polyspec::kAttentionSpan;
  if (needed || spreads_keys(params.length, params.tokens, params.batch * params.groups)) {
    // (Less than none where the call will be refused.)
    const int64_t bytes = std::max<int64_t>(polyspec::attention_workspace_bytes(params), 0);
    workspace = empty(place, {bytes}, aoti_torch_dtype_uint8());
    params.workspace = workspace->mutable_data_ptr();
  }
  run<1>(&polyspec::attention, params, place);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(polyspec, m) {
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, "
      "bool causal=False, Tensor? lengths=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(polyspec, CPU, m) { m.impl("attention", TORCH_BOX(&attention)); }

STABLE_TORCH_LIBRARY_IMPL(polyspec, CUDA, m) { m.impl("attention", TORCH_BOX(&attention)); }
