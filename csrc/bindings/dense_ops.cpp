// The operators of polyspec/dense.hpp for torch's dispatcher, on the LibTorch stable ABI (target
// 2.11).
#include <array>

#include "polyspec/dense.hpp"
#include "stable.hpp"

namespace {

using namespace bindings;

// The shape of a matrix for rows [.., inputs].
polyspec::DenseShape shape_of(const Tensor& rows, const char* name, int64_t outputs) {
  STD_TORCH_CHECK(rows.dim() == 2, name, ": expected 2 dimensions, got ", rows.dim());
  expect_unit_stride(rows, name);
  const int64_t inputs = rows.size(1);
  STD_TORCH_CHECK(outputs >= 1, "outputs: expected >= 1, got ", outputs);
  STD_TORCH_CHECK(inputs >= 1, "inputs: expected >= 1, got ", inputs);
  return {outputs, inputs, wide_float_type(rows, name)};
}

// weights [outputs, inputs].
Tensor dense_pack(const Tensor& weights) {
  STD_TORCH_CHECK(weights.dim() == 2, "weights: expected 2 dimensions, got ", weights.dim());
  const Place place(weights);
  polyspec::DensePackParams params;
  params.shape = shape_of(weights, "weights", weights.size(0));
  const Tensor rows = rows_apart(weights);
  params.weights = rows.const_data_ptr();
  params.weights_stride = rows.stride(0);
  const Tensor packed =
      empty(place, {polyspec::dense_packed_bytes(params.shape)}, aoti_torch_dtype_uint8());
  params.packed = packed.mutable_data_ptr();
  require(polyspec::dense_pack(params));
  return packed;
}

Tensor linear_of_torch(const Tensor& x, const Tensor& weights, const OptTensor& bias) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(x),
                                    torch::stable::detail::from(weights),
                                    torch::stable::detail::from(bias)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

struct WherePossible : polyspec::DenseProductParams {
  mutable bool supported = true;  // after the call
};
polyspec::Result where_possible(const WherePossible& params, polyspec::Stream stream) {
  const polyspec::Result result = polyspec::dense_product(params, stream);
  params.supported = result.code != polyspec::Result::Code::kUnsupported;
  return params.supported ? result : polyspec::Result();
}

// x [m, inputs], bias [outputs], packed: on CUDA the weights [outputs, inputs].
Tensor dense_product(const Tensor& x, const Tensor& packed, int64_t outputs,
                     const OptTensor& bias) {
  const Place place(x);
  WherePossible params;
  params.shape = shape_of(x, "x", outputs);
  params.tokens = x.size(0);
  const Tensor rows = rows_apart(x);
  params.x = rows.const_data_ptr();
  params.x_stride = rows.stride(0);
  const bool plain = place.cuda() && packed.dim() == 2;
  if (plain) {
    contiguous_data(packed, "packed", place, {outputs, x.size(1)}, dtype_of(x));
  } else {
    expect(packed, "packed", place, {polyspec::dense_packed_bytes(params.shape)});
    expect_uint8(packed, "packed");
  }
  params.packed = packed.const_data_ptr();
  if (bias.has_value()) {
    expect(*bias, "bias", place, {outputs});
    expect_unit_stride(*bias, "bias");
    STD_TORCH_CHECK(dtype_of(*bias) == dtype_of(x), "bias: expected the dtype of x");
    params.bias = bias->const_data_ptr();
  }
  if (plain && params.tokens > polyspec::kDenseTokens) return linear_of_torch(x, packed, bias);
  const Tensor y = empty(place, {params.tokens, outputs}, dtype_of(x));
  params.y = y.mutable_data_ptr();
  params.y_stride = outputs;
  if (plain) {
    run_on_cuda(&where_possible, params, place);
    return params.supported ? y : linear_of_torch(x, packed, bias);
  }
  const Tensor workspace =
      empty(place, {polyspec::dense_workspace_bytes(params.shape, params.tokens)},
            aoti_torch_dtype_uint8());
  params.workspace = workspace.mutable_data_ptr();
  run_on_cpu<1, polyspec::DenseProductParams>(&polyspec::dense_product, params);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(polyspec, m) {
  m.def("dense_pack(Tensor weights) -> Tensor");
  m.def(
      "dense_product(Tensor x, Tensor packed, int outputs, Tensor? bias) -> "
      "Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(polyspec, CPU, m) {
  m.impl("dense_pack", TORCH_BOX(&dense_pack));
  m.impl("dense_product", TORCH_BOX(&dense_product));
}

STABLE_TORCH_LIBRARY_IMPL(polyspec, CUDA, m) { m.impl("dense_product", TORCH_BOX(&dense_product)); }
