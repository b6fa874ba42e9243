// The operators of polyspec/layer.hpp for torch's dispatcher, on the LibTorch stable ABI (target
// 2.11).
#include <tuple>

#include "angles.hpp"
#include "polyspec/layer.hpp"

namespace {

using namespace bindings;

void expect_matrix(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 2, "x: expected 2 dimensions, got ", x.dim());
}

// x [m, n], residual [m, n], weight [n]; gives h and y.
std::tuple<Tensor, Tensor> norm(const Tensor& x, const Tensor* residual, const Tensor& weight,
                                double epsilon) {
  expect_matrix(x);
  const Place place(x);
  const int32_t dtype = dtype_of(x);
  polyspec::RmsNormParams params;
  params.tokens = x.size(0);
  params.width = x.size(1);
  params.dtype = wide_float_type(x, "x");
  params.epsilon = static_cast<float>(epsilon);
  params.x = contiguous_data(x, "x", place, {params.tokens, params.width}, dtype);
  params.weight = contiguous_data(weight, "weight", place, {params.width}, dtype);
  const Tensor y = empty(place, {params.tokens, params.width}, dtype);
  Tensor sum = y;
  if (residual != nullptr) {
    params.residual =
        contiguous_data(*residual, "residual", place, {params.tokens, params.width}, dtype);
    sum = empty(place, {params.tokens, params.width}, dtype);
    params.sum = sum.mutable_data_ptr();
  }
  params.y = y.mutable_data_ptr();
  run<1>(&polyspec::rms_norm, params, place);
  return {sum, y};
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon) {
  return std::get<1>(norm(x, nullptr, weight, epsilon));
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                        const Tensor& weight, double epsilon) {
  return norm(x, &residual, weight, epsilon);
}

// Fills all of RotaryParams but the outputs. x [b t, (heads + 2 groups) d],
// bias [(heads + 2 groups) d], cosine, sine and positions as of set_angles, norms [d].
polyspec::RotaryParams rotary_params(const Tensor& x, const OptTensor& bias, const Tensor& cosine,
                                     const Tensor& sine, const OptTensor& positions,
                                     const int64_t* lengths, int64_t batch, int64_t heads,
                                     int64_t groups, const OptTensor& query_norm,
                                     const OptTensor& key_norm, double epsilon) {
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

std::tuple<Tensor, Tensor, Tensor> rotary(const Tensor& x, const OptTensor& bias,
                                          const Tensor& cosine, const Tensor& sine,
                                          const Tensor& positions, int64_t batch, int64_t heads,
                                          int64_t groups, const OptTensor& query_norm,
                                          const OptTensor& key_norm, double epsilon) {
  polyspec::RotaryParams params = rotary_params(x, bias, cosine, sine, positions, nullptr, batch,
                                                heads, groups, query_norm, key_norm, epsilon);
  const Place place(x);
  const int32_t dtype = dtype_of(x);
  const Tensor query = empty(place, {batch, heads, params.tokens, params.width}, dtype);
  const Tensor key = empty(place, {batch, groups, params.tokens, params.width}, dtype);
  const Tensor value = empty(place, {batch, groups, params.tokens, params.width}, dtype);
  params.query = query.mutable_data_ptr();
  params.key = key.mutable_data_ptr();
  params.value = value.mutable_data_ptr();
  run<1>(&polyspec::rotary, params, place);
  return {query, key, value};
}

// A cache of keys or values [b, groups, c, d], of the size of `like`.
polyspec::KvCache cache_of(const Tensor& tensor, const char* name, const Tensor& x,
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
// values; lengths and counts [b].
Tensor rotary_append(const Tensor& x, const OptTensor& bias, const Tensor& cosine,
                     const Tensor& sine, const OptTensor& positions, const Tensor& cache_keys,
                     const Tensor& cache_values, const Tensor& status, const Tensor& lengths,
                     const OptTensor& counts, int64_t heads, const OptTensor& query_norm,
                     const OptTensor& key_norm, double epsilon) {
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
  const Tensor query =
      empty(place, {batch, heads, params.turn.tokens, params.turn.width}, dtype_of(x));
  params.turn.query = query.mutable_data_ptr();
  params.status = integers<int32_t>(status, "status", place, {batch});
  run<1>(&polyspec::rotary_append, params, place);
  return query;
}

// x [m, 2 n].
Tensor gated(const Tensor& x) {
  expect_matrix(x);
  STD_TORCH_CHECK(x.size(1) % 2 == 0, "x: expected an even size in dimension 1, got ", x.size(1));
  const Place place(x);
  const int32_t dtype = dtype_of(x);
  polyspec::GatedParams params;
  params.tokens = x.size(0);
  params.width = x.size(1) / 2;
  params.dtype = wide_float_type(x, "x");
  params.x = contiguous_data(x, "x", place, {params.tokens, x.size(1)}, dtype);
  const Tensor y = empty(place, {params.tokens, params.width}, dtype);
  params.y = y.mutable_data_ptr();
  run<1>(&polyspec::gated, params, place);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(polyspec, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor");
  m.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float epsilon) -> "
      "(Tensor sum, Tensor y)");
  m.def(
      "rotary(Tensor x, Tensor? bias, Tensor cosine, Tensor sine, Tensor positions, int batch, "
      "int heads, int groups, Tensor? query_norm, Tensor? key_norm, float epsilon) -> "
      "(Tensor query, Tensor key, Tensor value)");
  m.def(
      "rotary_append(Tensor x, Tensor? bias, Tensor cosine, Tensor sine, Tensor? positions, "
      "Tensor(a!) cache_keys, Tensor(b!) cache_values, Tensor(c!) status, Tensor lengths, "
      "Tensor? counts, int heads, Tensor? query_norm, Tensor? key_norm, float epsilon) -> "
      "Tensor query");
  m.def("gated(Tensor x) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(polyspec, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  m.impl("rotary", TORCH_BOX(&rotary));
  m.impl("rotary_append", TORCH_BOX(&rotary_append));
  m.impl("gated", TORCH_BOX(&gated));
}

STABLE_TORCH_LIBRARY_IMPL(polyspec, CUDA, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  m.impl("rotary", TORCH_BOX(&rotary));
  m.impl("rotary_append", TORCH_BOX(&rotary_append));
  m.impl("gated", TORCH_BOX(&gated));
}
