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

void expect_packed(const Tensor& packed, const Place& place, const polyspec::BlockShape& shape) {
  expect(packed, "packed", place, {polyspec::block_packed_bytes(shape)});
  expect_uint8(packed, "packed");
}

// blocks [rows, bytes of a row]: outputs `first` and so on of packed's.
void block_pack(const Tensor& packed, const Tensor& blocks, int64_t first, int64_t outputs,
                int64_t inputs, int64_t type) {
  STD_TORCH_CHECK(blocks.dim() == 2, "blocks: expected 2 dimensions, got ", blocks.dim());
  const Place place(blocks);
  expect_uint8(blocks, "blocks");
  polyspec::BlockPackParams params;
  params.shape = shape_of(outputs, inputs, type);
  params.first = first;
  params.rows = blocks.size(0);
  expect(blocks, "blocks", place, {params.rows, polyspec::block_row_bytes(params.shape)});
  params.blocks = static_cast<const uint8_t*>(blocks.const_data_ptr());
  expect_packed(packed, place, params.shape);
  params.packed = static_cast<uint8_t*>(packed.mutable_data_ptr());
  run_on_cpu<1>(&polyspec::block_pack, params);
}

// rows [count].
Tensor block_rows(const Tensor& packed, const Tensor& rows, int64_t outputs, int64_t inputs,
                  int64_t type) {
  const Place place(packed);
  polyspec::BlockRowsParams params;
  params.shape = shape_of(outputs, inputs, type);
  STD_TORCH_CHECK(rows.dim() == 1, "rows: expected 1 dimension, got ", rows.dim());
  params.count = rows.size(0);
  params.rows = integers<int64_t>(rows, "rows", place, {params.count});
  expect_packed(packed, place, params.shape);
  params.packed = static_cast<const uint8_t*>(packed.const_data_ptr());
  const Tensor y = empty(place, {params.count, inputs}, aoti_torch_dtype_float32());
  params.y = static_cast<float*>(y.mutable_data_ptr());
  run_on_cpu<1>(&polyspec::block_rows, params);
  return y;
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
  expect_packed(packed, place, params.shape);
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
  m.def(
      "block_pack(Tensor(a!) packed, Tensor blocks, int first, int outputs, int inputs, int type) "
      "-> ()");
  m.def("block_rows(Tensor packed, Tensor rows, int outputs, int inputs, int type) -> Tensor");
  m.def("block_product(Tensor x, Tensor packed, int outputs, int type) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(polyspec, CPU, m) {
  m.impl("block_pack", TORCH_BOX(&block_pack));
  m.impl("block_rows", TORCH_BOX(&block_rows));
  m.impl("block_product", TORCH_BOX(&block_product));
}
