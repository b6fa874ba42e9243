// The operators of polyspec/layer.hpp for torch's dispatcher, on the LibTorch stable ABI (target
// 2.11).
#include <tuple>

#include "angles.hpp"
#include "polyspec/layer.hpp"

namespace {

using namespace bindings;

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

Tensor rotary_append(const Tensor& x, const OptTensor& bias, const Tensor& cosine,
                     const Tensor& sine, const OptTensor& positions, const Tensor& cache_keys,
                     const Tensor& cache_values, const Tensor& status, const Tensor& lengths,
                     const OptTensor& counts, int64_t heads, const OptTensor& query_norm,
                     const OptTensor& key_norm, double epsilon) {
  Tensor query = x;
  const polyspec::RotaryAppendParams params =
      rotary_append_params(x, bias, cosine, sine, positions, cache_keys, cache_values, status,
                           lengths, counts, heads, query_norm, key_norm, epsilon, &query);
  run<1>(&polyspec::rotary_append, params, Place(x));
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
