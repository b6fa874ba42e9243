// The operators of polyspec/bfloat16.hpp for torch's dispatcher, on the LibTorch stable ABI (target
// 2.11).
#include "polyspec/bfloat16.hpp"
#include "stable.hpp"

namespace {

using namespace bindings;

void expect_bfloat16(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(dtype_of(tensor) == aoti_torch_dtype_bfloat16(), name, ": expected bfloat16");
}

void expect_rows(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.dim() == 2, name, ": expected 2 dimensions, got ", tensor.dim());
  expect_unit_stride(tensor, name);
  expect_bfloat16(tensor, name);
}

polyspec::BFloat16Shape shape_of(int64_t outputs, int64_t inputs) {
  STD_TORCH_CHECK(outputs >= 1, "outputs: expected >= 1, got ", outputs);
  STD_TORCH_CHECK(inputs >= 1, "inputs: expected >= 1, got ", inputs);
  return {outputs, inputs};
}

// weights [outputs, inputs].
Tensor bfloat16_pack(const Tensor& weights) {
  expect_rows(weights, "weights");
  const Place place(weights);
  polyspec::BFloat16PackParams params;
  params.shape = shape_of(weights.size(0), weights.size(1));
  params.weights = weights.const_data_ptr();
  params.weights_stride = weights.stride(0);
  const Tensor packed =
      empty(place, {polyspec::bfloat16_packed_bytes(params.shape)}, aoti_torch_dtype_uint8());
  params.packed = packed.mutable_data_ptr();
  const polyspec::Result result = polyspec::bfloat16_pack(params);
  STD_TORCH_CHECK(result.ok(), "polyspec: ", result.message);
  return packed;
}

// x [m, inputs], bias [outputs].
Tensor bfloat16_product(const Tensor& x, const Tensor& packed, int64_t outputs,
                        const OptTensor& bias) {
  expect_rows(x, "x");
  const Place place(x);
  polyspec::BFloat16ProductParams params;
  params.shape = shape_of(outputs, x.size(1));
  params.tokens = x.size(0);
  params.x = x.const_data_ptr();
  params.x_stride = x.stride(0);
  expect(packed, "packed", place, {polyspec::bfloat16_packed_bytes(params.shape)});
  STD_TORCH_CHECK(dtype_of(packed) == aoti_torch_dtype_uint8() && packed.is_contiguous(),
                  "packed: expected a contiguous tensor of uint8");
  params.packed = packed.const_data_ptr();
  if (bias.has_value()) {
    expect(*bias, "bias", place, {outputs});
    expect_unit_stride(*bias, "bias");
    expect_bfloat16(*bias, "bias");
    params.bias = bias->const_data_ptr();
  }
  const Tensor y = empty(place, {params.tokens, outputs}, dtype_of(x));
  const Tensor workspace =
      empty(place, {polyspec::bfloat16_workspace_bytes(params.shape, params.tokens)},
            aoti_torch_dtype_uint8());
  params.y = y.mutable_data_ptr();
  params.y_stride = outputs;
  params.workspace = workspace.mutable_data_ptr();
  run<1>(&polyspec::bfloat16_product, params, place);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(polyspec, m) {
  m.def("bfloat16_pack(Tensor weights) -> Tensor");
  m.def(
      "bfloat16_product(Tensor x, Tensor packed, int outputs, Tensor? bias) -> "
      "Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(polyspec, CPU, m) {
  m.impl("bfloat16_pack", TORCH_BOX(&bfloat16_pack));
  m.impl("bfloat16_product", TORCH_BOX(&bfloat16_product));
}
