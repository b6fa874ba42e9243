// The operator of polyspec/decoder.hpp for torch's dispatcher, on the LibTorch stable ABI (target
// 2.11).
//
// A model's layers are described by two tables of numbers (polyspec_ext/ops/decoder.py makes them),
// which hold addresses: some hundred tensors would take longer to hand over than a short pass
// takes.
#include <tuple>
#include <vector>

#include "angles.hpp"
#include "key_spans.hpp"
#include "polyspec/decoder.hpp"

namespace {

using namespace bindings;

// Columns of the tables.
enum LayerColumn {
  kAttentionNorm,
  kGatedNorm,
  kAttentionBias,
  kQueryNorm,
  kKeyNorm,
  kAttentionIn,  // how many matrices each product has
  kAttentionOut,
  kGatedIn,
  kGatedOut,
  kLayerColumns
};
enum MatrixColumn {
  kLayout,
  kOutputs,
  kInputs,
  kGroup,
  kScaleDtype,
  kBlockType,
  kPacked,
  kBias,
  kMatrixColumns
};

const void* address(int64_t number) { return reinterpret_cast<const void*>(number); }

polyspec::PackedMatrix matrix_of(const int64_t* row) {
  polyspec::PackedMatrix matrix;
  matrix.layout = static_cast<polyspec::PackedLayout>(row[kLayout]);
  matrix.outputs = row[kOutputs];
  matrix.inputs = row[kInputs];
  matrix.group = static_cast<int32_t>(row[kGroup]);
  matrix.scale_dtype = static_cast<polyspec::DType>(row[kScaleDtype]);
  matrix.type = static_cast<polyspec::BlockType>(row[kBlockType]);
  matrix.packed = address(row[kPacked]);
  matrix.bias = address(row[kBias]);
  return matrix;
}

// A cache's tensors [b, g, capacity, d], all of the same strides.
void expect_states(const std::vector<Tensor>& states, const char* name, const Place& place,
                   const polyspec::DecoderParams& p, int32_t dtype) {
  const Tensor& first = states.front();
  for (const Tensor& one : states) {
    expect(one, name, place, {p.batch, p.groups, p.capacity, p.head_width});
    expect_unit_stride(one, name);
    expect_unexpanded(one, name);
    STD_TORCH_CHECK(dtype_of(one) == dtype, name, ": expected the dtype of x");
    for (int axis = 0; axis < 3; ++axis)
      STD_TORCH_CHECK(one.stride(axis) == first.stride(axis), name,
                      ": expected the same strides in every layer");
  }
}

// x [b, t, n], layers [l, kLayerColumns], matrices [.., kMatrixColumns], cosine, sine and positions
// as of set_angles, mask [b or 1, 1, t, span], keys and values l times [b, g, capacity, d].
std::tuple<Tensor, Tensor, Tensor> decoder_layers(
    const Tensor& layers, const Tensor& matrices, int64_t heads, int64_t groups,
    int64_t gated_width, double epsilon, double scale, const Tensor& x, const Tensor& cosine,
    const Tensor& sine, const OptTensor& positions, const OptTensor& mask, std::vector<Tensor> keys,
    std::vector<Tensor> values, const Tensor& lengths, const OptTensor& counts, int64_t span,
    bool causal, std::vector<int64_t> taken) {
  STD_TORCH_CHECK(x.dim() == 3, "x: expected 3 dimensions, got ", x.dim());
  const Place place(x);
  const int32_t dtype = dtype_of(x);
  polyspec::DecoderParams p;
  p.dtype = wide_float_type(x, "x");
  p.batch = x.size(0);
  p.tokens = x.size(1);
  p.width = x.size(2);
  p.heads = heads;
  p.groups = groups;
  p.gated_width = gated_width;
  p.epsilon = static_cast<float>(epsilon);
  p.scale = static_cast<float>(scale);
  p.causal = causal;
  p.x = contiguous_data(x, "x", place, {p.batch, p.tokens, p.width}, dtype);
  p.lengths = integers<int64_t>(lengths, "lengths", place, {p.batch});
  set_angles(cosine, sine, positions, p.lengths, place, dtype, &p);
  p.head_width = cosine.size(1);

  p.count = layers.size(0);
  const int64_t* layer_row = integers<int64_t>(layers, "layers", place, {p.count, kLayerColumns});
  const int64_t products = matrices.size(0);
  const int64_t* matrix_row =
      integers<int64_t>(matrices, "matrices", place, {products, kMatrixColumns});
  STD_TORCH_CHECK(p.count >= 1 && static_cast<int64_t>(keys.size()) == p.count &&
                      static_cast<int64_t>(values.size()) == p.count,
                  "keys, values: expected one of each layer, ", p.count, ", got ", keys.size(),
                  " and ", values.size());
  std::vector<polyspec::PackedMatrix> parts(static_cast<size_t>(products));
  for (size_t i = 0; i < parts.size(); ++i) parts[i] = matrix_of(matrix_row + i * kMatrixColumns);
  p.capacity = keys.front().dim() == 4 ? keys.front().size(2) : -1;
  expect_states(keys, "keys", place, p, dtype);
  expect_states(values, "values", place, p, dtype);
  STD_TORCH_CHECK(span >= 1 && span <= p.capacity, "span: expected 1 to the slots of the cache, ",
                  p.capacity, ", got ", span);
  p.span = span;
  std::vector<polyspec::DecoderLayer> described(static_cast<size_t>(p.count));
  int64_t next = 0;
  for (size_t i = 0; i < described.size(); ++i, layer_row += kLayerColumns) {
    polyspec::DecoderLayer& layer = described[i];
    layer.attention_norm = address(layer_row[kAttentionNorm]);
    layer.gated_norm = address(layer_row[kGatedNorm]);
    layer.attention_bias = address(layer_row[kAttentionBias]);
    layer.query_norm = address(layer_row[kQueryNorm]);
    layer.key_norm = address(layer_row[kKeyNorm]);
    polyspec::PackedMatrices* const all[] = {&layer.attention_in, &layer.attention_out,
                                             &layer.gated_in, &layer.gated_out};
    for (int j = 0; j < 4; ++j) {
      const int64_t count = layer_row[kAttentionIn + j];
      STD_TORCH_CHECK(count >= 1 && count <= products - next,
                      "layers: expected as many matrices as there are, ", products);
      *all[j] = {parts.data() + next, count};
      next += count;
    }
    layer.keys = keys[i].mutable_data_ptr();
    layer.values = values[i].mutable_data_ptr();
  }
  for (int axis = 0; axis < 3; ++axis) {
    p.key_stride[axis] = keys.front().stride(axis);
    p.value_stride[axis] = values.front().stride(axis);
  }
  p.layers = described.data();
  p.counts = integers(counts, "counts", place, {p.batch});
  if (mask.has_value()) {
    STD_TORCH_CHECK(mask->dim() == 4, "mask: expected 4 dimensions, got ", mask->dim());
    const int64_t masks = mask->size(0) == 1 ? 1 : p.batch;
    expect(*mask, "mask", place, {masks, 1, p.tokens, p.span});
    expect_unit_stride(*mask, "mask");
    STD_TORCH_CHECK(dtype_of(*mask) == dtype, "mask: expected the dtype of x");
    p.mask = mask->const_data_ptr();
    p.mask_stride[0] = masks == 1 ? 0 : mask->stride(0);
    p.mask_stride[1] = mask->stride(2);
  }
  p.spread_keys = spreads_keys(p.span, p.tokens, p.batch * p.groups);
  p.taken = taken.data();
  p.num_taken = static_cast<int64_t>(taken.size());
  const Tensor y = empty(place, {p.batch, p.tokens, p.width}, dtype);
  const Tensor states = empty(place, {p.num_taken, p.batch, p.tokens, p.width}, dtype);
  const Tensor status = empty(place, {p.batch}, aoti_torch_dtype_int32());
  p.y = y.mutable_data_ptr();
  p.states = states.mutable_data_ptr();
  p.status = static_cast<int32_t*>(status.mutable_data_ptr());
  const int64_t bytes = polyspec::decoder_workspace_bytes(p);
  const Tensor workspace = empty(place, {bytes < 0 ? 0 : bytes}, aoti_torch_dtype_uint8());
  p.workspace = workspace.mutable_data_ptr();
  run_on_cpu<1>(&polyspec::decoder_layers, p);
  return {y, states, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(polyspec, m) {
  m.def(
      "decoder_layers(Tensor layers, Tensor matrices, int heads, int groups, int gated_width, "
      "float epsilon, float scale, Tensor x, Tensor cosine, Tensor sine, Tensor? positions, "
      "Tensor? mask, Tensor(a!)[] keys, Tensor(b!)[] values, Tensor lengths, Tensor? counts, "
      "int span, bool causal, int[] taken) -> (Tensor y, Tensor states, Tensor status)");
}

STABLE_TORCH_LIBRARY_IMPL(polyspec, CPU, m) {
  m.impl("decoder_layers", TORCH_BOX(&decoder_layers));
}
