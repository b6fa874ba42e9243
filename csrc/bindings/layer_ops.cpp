// The operators of polyspec/layer.hpp for torch's dispatcher, on the LibTorch stable ABI (target
// 2.11).
#include <tuple>

#include "polyspec/layer.hpp"
#include "stable.hpp"

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
  run_on_cpu<1>(&polyspec::rms_norm, params);
  return {sum, y};
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon) {
  return std::get<1>(norm(x, nullptr, weight, epsilon));
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                        const Tensor& weight, double epsilon) {
  return norm(x, &residual, weight, epsilon);
}

// x [b t, (heads + 2 groups) d], bias [(heads + 2 groups) d], cosine and sine [b or 1, t, d], norms
// [d].
std::tuple<Tensor, Tensor, Tensor> rotary(const Tensor& x, const OptTensor& bias,
                                          const Tensor& cosine, const Tensor& sine, int64_t batch,
                                          int64_t heads, int64_t groups,
                                          const OptTensor& query_norm, const OptTensor& key_norm,
                                          double epsilon) {
  expect_matrix(x);
  STD_TORCH_CHECK(cosine.dim() == 3, "cosine: expected 3 dimensions, got ", cosine.dim());
  STD_TORCH_CHECK(batch >= 0 && heads >= 1 && groups >= 1,
                  "batch, heads, groups: expected >= 0, >= 1 and >= 1, got ", batch, ", ", heads,
                  ", ", groups);
  const Place place(x);
  const int32_t dtype = dtype_of(x);
  polyspec::RotaryParams params;
  params.batch = batch;
  params.tokens = cosine.size(1);
  params.heads = heads;
  params.groups = groups;
  params.width = cosine.size(2);
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
  params.same_positions = cosine.size(0) == 1;
  const int64_t rows = params.same_positions ? 1 : batch;
  params.cosine =
      contiguous_data(cosine, "cosine", place, {rows, params.tokens, params.width}, dtype);
  params.sine = contiguous_data(sine, "sine", place, {rows, params.tokens, params.width}, dtype);
  const Tensor query = empty(place, {batch, heads, params.tokens, params.width}, dtype);
  const Tensor key = empty(place, {batch, groups, params.tokens, params.width}, dtype);
  const Tensor value = empty(place, {batch, groups, params.tokens, params.width}, dtype);
  params.query = query.mutable_data_ptr();
  params.key = key.mutable_data_ptr();
  params.value = value.mutable_data_ptr();
  run_on_cpu<1>(&polyspec::rotary, params);
  return {query, key, value};
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
  run_on_cpu<1>(&polyspec::gated, params);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(polyspec, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor");
  m.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float epsilon) -> "
      "(Tensor sum, Tensor y)");
  m.def(
      "rotary(Tensor x, Tensor? bias, Tensor cosine, Tensor sine, int batch, int heads, "
      "int groups, Tensor? query_norm, Tensor? key_norm, float epsilon) -> (Tensor query, Tensor "
      "key, Tensor value)");
  m.def("gated(Tensor x) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(polyspec, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  m.impl("rotary", TORCH_BOX(&rotary));
  m.impl("gated", TORCH_BOX(&gated));
}
