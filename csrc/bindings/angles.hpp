// Rotary positions of operators: tables of angles, where a token's angles lie in them, and heads
// that are turned by them.
#pragma once

#include "polyspec/layer.hpp"
#include "stable.hpp"

namespace bindings {

// Of parameters with batch and tokens. cosine and sine [p, d]; positions [b or 1, t or 1]; without:
// the positions after `lengths`, [b].
template <class Params>
void set_angles(const Tensor& cosine, const Tensor& sine, const OptTensor& positions,
                const int64_t* lengths, const Place& place, int32_t dtype, Params* p) {
  STD_TORCH_CHECK(cosine.dim() == 2, "cosine: expected 2 dimensions, got ", cosine.dim());
  p->angles = cosine.size(0);
  const int64_t width = cosine.size(1);
  p->cosine = contiguous_data(cosine, "cosine", place, {p->angles, width}, dtype);
  p->sine = contiguous_data(sine, "sine", place, {p->angles, width}, dtype);
  if (!positions.has_value()) {
    p->positions = lengths;
    p->position_stride[0] = p->position_step = 1;
    return;
  }
  STD_TORCH_CHECK(positions->dim() == 2, "positions: expected 2 dimensions, got ",
                  positions->dim());
  const int64_t sizes[] = {p->batch, p->tokens};
  int64_t shape[2];
  for (int axis = 0; axis < 2; ++axis) {
    shape[axis] = positions->size(axis) == 1 ? 1 : sizes[axis];
    p->position_stride[axis] = shape[axis] == 1 ? 0 : positions->stride(axis);
  }
  expect(*positions, "positions", place, {shape[0], shape[1]});
  expect_dtype(*positions, "positions", aoti_torch_dtype_int64());
  p->positions = static_cast<const int64_t*>(positions->const_data_ptr());
}

inline void expect_matrix(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 2, "x: expected 2 dimensions, got ", x.dim());
}

// Fills all of RotaryParams but the outputs. x [b t, (heads + 2 groups) d],
// bias [(heads + 2 groups) d], cosine, sine and positions as of set_angles, norms [d].
inline polyspec::RotaryParams rotary_params(const Tensor& x, const OptTensor& bias,
                                            const Tensor& cosine, const Tensor& sine,
                                            const OptTensor& positions, const int64_t* lengths,
                                            int64_t batch, int64_t heads, int64_t groups,
                                            const OptTensor& query_norm, const OptTensor& key_norm,
                                            double epsilon) {
  expect_matrix(x);
  STD_TORCH_CHECK(batch >= 0 && heads >= 1 && groups >= 1,
                  "batch, heads, groups: expected >= 0, >= 1 and >= 1, got ", batch, ", ", heads,
                  ", ", groups);
  STD_TORCH_CHECK(batch > 0 ? x.size(0) % batch == 0 : x.size(0) == 0,
                  "x: expected as many rows for each of ", batch, ", got ", x.size(0));
  const Place place(x);
  const int32_t dtype = dtype_of(x);
  polyspec::RotaryParams params;
  params.batch = batch;
  params.tokens = batch > 0 ? x.size(0) / batch : 0;
  params.heads = heads;
  params.groups = groups;
  set_angles(cosine, sine, positions, lengths, place, dtype, &params);
  params.width = cosine.size(1);
  params.dtype = wide_float_type(x, "x");
  const int64_t features = (heads + 2 * groups) * params.width;
  params.x = contiguous_data(x, "x", place, {batch * params.tokens, features}, dtype);
  if (bias.has_value()) params.bias = contiguous_data(*bias, "bias", place, {features}, dtype);
  const auto norm = [&](const OptTensor& weight, const char* name) -> const void* {
    return weight.has_value() ? contiguous_data(*weight, name, place, {params.width}, dtype)
                              : nullptr;
  };
  params.query_norm = norm(query_norm, "query_norm");
  params.key_norm = norm(key_norm, "key_norm");
  params.epsilon = static_cast<float>(epsilon);
  return params;
}

// A cache of keys or values [b, groups, c, d], of the size of `like`.
inline polyspec::KvCache cache_of(const Tensor& tensor, const char* name, const Tensor& x,
                                  const Tensor& like) {
  STD_TORCH_CHECK(tensor.dim() == 4, name, ": expected 4 dimensions, got ", tensor.dim());
  expect(tensor, name, Place(x), {like.size(0), like.size(1), like.size(2), like.size(3)});
  STD_TORCH_CHECK(dtype_of(tensor) == dtype_of(x), name, ": expected the dtype of x");
  expect_unit_stride(tensor, name);
  polyspec::KvCache cache;
  cache.data = tensor.mutable_data_ptr();
  for (int axis = 0; axis < 3; ++axis) cache.stride[axis] = tensor.stride(axis);
  return cache;
}

// The same with caches [b, groups, c, d] instead of batch, groups and the outputs of keys and
// values; lengths and counts [b]. `query` is for the result.
inline polyspec::RotaryAppendParams rotary_append_params(
    const Tensor& x, const OptTensor& bias, const Tensor& cosine, const Tensor& sine,
    const OptTensor& positions, const Tensor& cache_keys, const Tensor& cache_values,
    const Tensor& status, const Tensor& lengths, const OptTensor& counts, int64_t heads,
    const OptTensor& query_norm, const OptTensor& key_norm, double epsilon, Tensor* query) {
  const Place place(x);
  polyspec::RotaryAppendParams params;
  params.keys = cache_of(cache_keys, "cache_keys", x, cache_keys);
  params.values = cache_of(cache_values, "cache_values", x, cache_keys);
  const int64_t batch = cache_keys.size(0);
  params.lengths = integers<int64_t>(lengths, "lengths", place, {batch});
  params.turn = rotary_params(x, bias, cosine, sine, positions, params.lengths, batch, heads,
                              cache_keys.size(1), query_norm, key_norm, epsilon);
  STD_TORCH_CHECK(cache_keys.size(3) == params.turn.width, "cache_keys: expected size ",
                  params.turn.width, " in dimension 3, got ", cache_keys.size(3));
  params.capacity = cache_keys.size(2);
  params.counts = integers(counts, "counts", place, {batch});
  *query = empty(place, {batch, heads, params.turn.tokens, params.turn.width}, dtype_of(x));
  params.turn.query = query->mutable_data_ptr();
  params.status = integers<int32_t>(status, "status", place, {batch});
  return params;
}

}  // namespace bindings
