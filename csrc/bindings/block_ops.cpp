// The operators of polyspec/blocks.hpp for torch's dispatcher, on the LibTorch stable ABI (target
// 2.11).
#include "polyspec/blocks.hpp"
#include "stable.hpp"

namespace {

using namespace bindings;

polyspec::BlockShape shape_of(int64_t outputs, int64_t inputs, int64_t type) {
  polyspec::BlockShape shape{outputs, inputs, static_cast<polyspec::BlockType>(type)};
  STD_TORCH_CHECK(polyspec::block_row_bytes(shape) >= 0,
                  "type: expected the number of a GGUF type that block_product multiplies, and "
                  "inputs in whole blocks of it, got type ",
                  type, " with ", outputs, " outputs and ", inputs, " inputs");
  return shape;
}

// blocks [n, bytes of a row].
Tensor block_pack(const Tensor& blocks, int64_t inputs, int64_t type) {
  STD_TORCH_CHECK(blocks.dim() == 2, "blocks: expected 2 dimensions, got ", blocks.dim());
  const Place place(blocks);
  expect_uint8(blocks, "blocks");
  polyspec::BlockPackParams params;
  params.shape = shape_of(blocks.size(0), inputs, type);
  expect(blocks, "blocks", place, {params.shape.outputs, polyspec::block_row_bytes(params.shape)});
  params.blocks = static_cast<const uint8_t*>(blocks.const_data_ptr());
  const Tensor packed =
      empty(place, {polyspec::block_packed_bytes(params.shape)}, aoti_torch_dtype_uint8());
  params.packed = static_cast<uint8_t*>(packed.mutable_data_ptr());
  run_on_cpu<1>(&polyspec::block_pack, params);
  return packed;
}

// x [m, inputs].
Tensor block_product(const Tensor& x, const Tensor& packed, int64_t outputs, int64_t type) {
  STD_TORCH_CHECK(x.dim() == 2, "x: expected 2 dimensions, got ", x.dim());
  expect_unit_stride(x, "x");
  const Place place(x);
  polyspec::BlockProductParams params;
  params.shape = shape_of(outputs, x.size(1), type);
  params.tokens = x.size(0);
  params.dtype = float_type(x, "x");
  const Tensor rows = rows_apart(x);
  params.x = rows.const_data_ptr();
  params.x_stride = rows.stride(0);
  expect(packed, "packed", place, {polyspec::block_packed_bytes(params.shape)});
  expect_uint8(packed, "packed");
  params.packed = static_cast<const uint8_t*>(packed.const_data_ptr());
  const Tensor y = empty(place, {params.tokens, outputs}, dtype_of(x));
  const Tensor workspace =
      empty(place, {polyspec::block_workspace_bytes(params.shape, params.tokens)},
            aoti_torch_dtype_uint8());
  params.y = y.mutable_data_ptr();
  params.y_stride = outputs;
  params.workspace = workspace.mutable_data_ptr();
  run_on_cpu<1>(&polyspec::block_product, params);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(polyspec, m) {
  m.def("block_pack(Tensor blocks, int inputs, int type) -> Tensor");
  m.def("block_product(Tensor x, Tensor packed, int outputs, int type) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(polyspec, CPU, m) {
  m.impl("block_pack", TORCH_BOX(&block_pack));
  m.impl("block_product", TORCH_BOX(&block_product));
}
