// The operators of polyspec/int4.hpp for torch's dispatcher, on the LibTorch stable ABI (target
// 2.11).
#include <tuple>

#include "angles.hpp"
#include "polyspec/int4.hpp"

namespace {

using namespace bindings;

polyspec::Int4Shape shape_of(int64_t outputs, int64_t inputs, int64_t group, bool float_scales) {
  polyspec::Int4Shape shape;
  shape.outputs = outputs;
  shape.inputs = inputs;
  STD_TORCH_CHECK(group == 32 || group == 64 || group == 128 || group == 256,
                  "group: expected 32, 64, 128 or 256, got ", group);
  shape.group = static_cast<int32_t>(group);
  STD_TORCH_CHECK(inputs >= group && inputs % group == 0, "inputs: expected a multiple of group, ",
                  group, ", got ", inputs);
  STD_TORCH_CHECK(outputs >= 1, "outputs: expected >= 1, got ", outputs);
  shape.scale_dtype = float_scales ? polyspec::DType::kFloat32 : polyspec::DType::kBFloat16;
  return shape;
}

// Values, scales and zeros to be written.
std::tuple<Tensor, Tensor, Tensor> unpacked(const Place& place, const polyspec::Int4Shape& shape) {
  const int64_t groups = shape.inputs / shape.group;
  return {empty(place, {shape.outputs, shape.inputs}, aoti_torch_dtype_uint8()),
          empty(place, {shape.outputs, groups}, aoti_torch_dtype_float32()),
          empty(place, {shape.outputs, groups}, aoti_torch_dtype_float32())};
}

const float* floats(const Tensor& tensor, const char* name, const Place& place, int64_t rows,
                    int64_t columns) {
  expect(tensor, name, place, {rows, columns});
  STD_TORCH_CHECK(dtype_of(tensor) == aoti_torch_dtype_float32() && tensor.is_contiguous(), name,
                  ": expected a contiguous tensor of float32");
  return static_cast<const float*>(tensor.const_data_ptr());
}

// weights [n, k], importance [k].
std::tuple<Tensor, Tensor, Tensor> int4_round(const Tensor& matrix, const OptTensor& importance,
                                              int64_t group, bool float_scales) {
  STD_TORCH_CHECK(matrix.dim() == 2, "weights: expected 2 dimensions, got ", matrix.dim());
  const Tensor weights = unexpanded(matrix);
  expect_unit_stride(weights, "weights");
  const Place place(weights);
  polyspec::Int4RoundParams params;
  params.shape = shape_of(weights.size(0), weights.size(1), group, float_scales);
  params.dtype = float_type(weights, "weights");
  params.weights = weights.const_data_ptr();
  params.stride = weights.stride(0);
  if (importance.has_value()) {
    expect(*importance, "importance", place, {params.shape.inputs});
    STD_TORCH_CHECK(
        dtype_of(*importance) == aoti_torch_dtype_float32() && importance->is_contiguous(),
        "importance: expected a contiguous tensor of float32");
    params.importance = static_cast<const float*>(importance->const_data_ptr());
  }
  std::tuple<Tensor, Tensor, Tensor> made = unpacked(place, params.shape);
  params.values = static_cast<uint8_t*>(std::get<0>(made).mutable_data_ptr());
  params.scales = static_cast<float*>(std::get<1>(made).mutable_data_ptr());
  params.zeros = static_cast<float*>(std::get<2>(made).mutable_data_ptr());
  run_on_cpu<1>(&polyspec::int4_round, params);
  return made;
}

polyspec::Stream::Device device_of(const Place& place) {
  return place.cuda() ? polyspec::Stream::Device::kCuda : polyspec::Stream::Device::kCpu;
}

// values [n, k], scales and zeros [n, k / group].
Tensor int4_pack(const Tensor& values, const Tensor& scales, const Tensor& zeros, int64_t group,
                 bool float_scales) {
  STD_TORCH_CHECK(values.dim() == 2, "values: expected 2 dimensions, got ", values.dim());
  const Place place(values);
  expect_uint8(values, "values");
  polyspec::Int4PackParams params;
  params.shape = shape_of(values.size(0), values.size(1), group, float_scales);
  const int64_t groups = params.shape.inputs / group;
  params.values = static_cast<const uint8_t*>(values.const_data_ptr());
  params.scales = floats(scales, "scales", place, params.shape.outputs, groups);
  params.zeros = floats(zeros, "zeros", place, params.shape.outputs, groups);
  const int64_t bytes = polyspec::int4_packed_bytes(params.shape, device_of(place));
  // (Less than none where the call will be refused.)
  const Tensor packed = empty(place, {bytes < 0 ? 0 : bytes}, aoti_torch_dtype_uint8());
  params.packed = static_cast<uint8_t*>(packed.mutable_data_ptr());
  polyspec::Result (*const pack)(const polyspec::Int4PackParams&, polyspec::Stream) =
      &polyspec::int4_pack;
  run<1>(pack, params, place);
  return packed;
}

const uint8_t* packed_of(const Tensor& packed, const Place& place,
                         const polyspec::Int4Shape& shape) {
  const int64_t bytes = polyspec::int4_packed_bytes(shape, device_of(place));
  STD_TORCH_CHECK(bytes >= 0, "float_scales: expected false on CUDA, got true");
  expect(packed, "packed", place, {bytes});
  expect_uint8(packed, "packed");
  return static_cast<const uint8_t*>(packed.const_data_ptr());
}

std::tuple<Tensor, Tensor, Tensor> int4_unpack(const Tensor& packed, int64_t outputs,
                                               int64_t inputs, int64_t group, bool float_scales) {
  const Place place(packed);
  polyspec::Int4UnpackParams params;
  params.shape = shape_of(outputs, inputs, group, float_scales);
  params.packed = packed_of(packed, place, params.shape);
  std::tuple<Tensor, Tensor, Tensor> made = unpacked(place, params.shape);
  params.values = static_cast<uint8_t*>(std::get<0>(made).mutable_data_ptr());
  params.scales = static_cast<float*>(std::get<1>(made).mutable_data_ptr());
  params.zeros = static_cast<float*>(std::get<2>(made).mutable_data_ptr());
  require(polyspec::int4_unpack(params));
  return made;
}

// Rows as CUDA reads them, 16 bytes at a time: a copy where they are not so.
Tensor aligned_rows(const Tensor& x) {
  const Tensor rows = rows_apart(x);
  const auto at = reinterpret_cast<uintptr_t>(rows.const_data_ptr());
  const bool aligned = at % 16 == 0 && (rows.size(0) < 2 || rows.stride(0) % 8 == 0);
  return aligned ? rows : torch::stable::clone(rows);
}

const void* aligned_data(const Tensor& x, Tensor* kept) {
  const bool aligned = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  *kept = aligned ? x : torch::stable::clone(x);
  return kept->const_data_ptr();
}

// Parameters, and the tensors that they point to.
struct Product {
  polyspec::Int4ProductParams params;
  Tensor x, y, normed, norm;
};

// x [m, inputs], norm [inputs].
Product product_params(const Tensor& x, const Tensor& packed, int64_t outputs, int64_t group,
                       bool float_scales, bool gated, const OptTensor& norm, double epsilon) {
  STD_TORCH_CHECK(x.dim() == 2, "x: expected 2 dimensions, got ", x.dim());
  expect_unit_stride(x, "x");
  const Place place(x);
  polyspec::Int4ProductParams params;
  params.shape = shape_of(outputs, x.size(1), group, float_scales);
  params.tokens = x.size(0);
  params.dtype = float_type(x, "x");
  const Tensor rows = place.cuda() ? aligned_rows(x) : rows_apart(x);
  params.x = rows.const_data_ptr();
  params.x_stride = rows.stride(0);
  params.packed = packed_of(packed, place, params.shape);
  params.y_stride = gated ? outputs / 2 : outputs;
  const Tensor y = empty(place, {params.tokens, params.y_stride}, dtype_of(x));
  params.y = y.mutable_data_ptr();
  const Tensor normed =
      empty(place, {norm.has_value() ? params.tokens : 0, x.size(1)}, dtype_of(x));
  Tensor weight = x;
  if (norm.has_value()) {
    contiguous_data(x, "x", place, {params.tokens, x.size(1)}, dtype_of(x));
    contiguous_data(*norm, "norm", place, {x.size(1)}, dtype_of(x));
    params.norm = aligned_data(*norm, &weight);
    params.epsilon = static_cast<float>(epsilon);
    params.normed = normed.mutable_data_ptr();
  }
  return {params, rows, y, normed, weight};
}

// residual [m, outputs].
Tensor product_of(const Tensor& x, const Tensor& packed, int64_t outputs, int64_t group,
                  bool float_scales, bool gated = false, const OptTensor& norm = {},
                  double epsilon = 0.0, const OptTensor& residual = {}) {
  Product made = product_params(x, packed, outputs, group, float_scales, gated, norm, epsilon);
  polyspec::Int4ProductParams& params = made.params;
  const Place place(x);
  if (residual.has_value()) {
    params.residual = contiguous_data(*residual, "residual", place,
                                      {params.tokens, params.y_stride}, dtype_of(x));
  }
  if (place.cuda()) {
    run_on_cuda(gated ? &polyspec::int4_gated_product : &polyspec::int4_product, params, place);
    return made.y;
  }
  STD_TORCH_CHECK(!gated && !norm.has_value() && !residual.has_value(),
                  "x: expected a CUDA tensor, got one on the CPU");
  const Tensor workspace =
      empty(place, {polyspec::int4_workspace_bytes(params.shape, params.tokens)},
            aoti_torch_dtype_uint8());
  params.workspace = workspace.mutable_data_ptr();
  run_on_cpu<1>(&polyspec::int4_product, params);
  return made.y;
}

Tensor int4_product(const Tensor& x, const Tensor& packed, int64_t outputs, int64_t group,
                    bool float_scales) {
  return product_of(x, packed, outputs, group, float_scales);
}

Tensor int4_layer_product(const Tensor& x, const Tensor& packed, int64_t outputs, int64_t group,
                          bool gated, const OptTensor& norm, double epsilon,
                          const OptTensor& residual) {
  return product_of(x, packed, outputs, group, false, gated, norm, epsilon, residual);
}

Tensor int4_rotary_product(const Tensor& x, const Tensor& packed, int64_t outputs, int64_t group,
                           const OptTensor& norm, double norm_epsilon, const OptTensor& bias,
                           const Tensor& cosine, const Tensor& sine, const OptTensor& positions,
                           const Tensor& cache_keys, const Tensor& cache_values,
                           const Tensor& status, const Tensor& lengths, const OptTensor& counts,
                           int64_t heads, const OptTensor& query_norm, const OptTensor& key_norm,
                           double epsilon) {
  const Place place(x);
  STD_TORCH_CHECK(place.cuda(), "x: expected a CUDA tensor, got one on the CPU");
  const Product made = product_params(x, packed, outputs, group, false, false, norm, norm_epsilon);
  Tensor query = x;
  polyspec::Int4RotaryParams params;
  params.product = made.params;
  params.append =
      rotary_append_params(made.y, bias, cosine, sine, positions, cache_keys, cache_values, status,
                           lengths, counts, heads, query_norm, key_norm, epsilon, &query);
  run_on_cuda(&polyspec::int4_rotary_product, params, place);
  return query;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(polyspec, m) {
  m.def(
      "int4_round(Tensor weights, Tensor? importance, int group, bool float_scales) -> "
      "(Tensor values, Tensor scales, Tensor zeros)");
  m.def(
      "int4_pack(Tensor values, Tensor scales, Tensor zeros, int group, bool float_scales) -> "
      "Tensor");
  m.def(
      "int4_unpack(Tensor packed, int outputs, int inputs, int group, bool float_scales) -> "
      "(Tensor values, Tensor scales, Tensor zeros)");
  m.def(
      "int4_product(Tensor x, Tensor packed, int outputs, int group, bool float_scales) -> "
      "Tensor");
  m.def(
      "int4_layer_product(Tensor x, Tensor packed, int outputs, int group, bool gated, "
      "Tensor? norm, float epsilon, Tensor? residual) -> Tensor");
  m.def(
      "int4_rotary_product(Tensor x, Tensor packed, int outputs, int group, Tensor? norm, "
      "float norm_epsilon, Tensor? bias, Tensor cosine, Tensor sine, Tensor? positions, "
      "Tensor(a!) cache_keys, Tensor(b!) cache_values, Tensor(c!) status, Tensor lengths, "
      "Tensor? counts, int heads, Tensor? query_norm, Tensor? key_norm, float epsilon) -> "
      "Tensor query");
}

STABLE_TORCH_LIBRARY_IMPL(polyspec, CPU, m) {
  m.impl("int4_round", TORCH_BOX(&int4_round));
  m.impl("int4_pack", TORCH_BOX(&int4_pack));
  m.impl("int4_unpack", TORCH_BOX(&int4_unpack));
  m.impl("int4_product", TORCH_BOX(&int4_product));
  m.impl("int4_layer_product", TORCH_BOX(&int4_layer_product));
  m.impl("int4_rotary_product", TORCH_BOX(&int4_rotary_product));
}

STABLE_TORCH_LIBRARY_IMPL(polyspec, CUDA, m) {
  m.impl("int4_pack", TORCH_BOX(&int4_pack));
  m.impl("int4_product", TORCH_BOX(&int4_product));
  m.impl("int4_layer_product", TORCH_BOX(&int4_layer_product));
  m.impl("int4_rotary_product", TORCH_BOX(&int4_rotary_product));
}
