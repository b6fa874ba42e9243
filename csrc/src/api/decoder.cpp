// polyspec::decoder_layers: the public operators, one after the other.
#include "polyspec/decoder.hpp"

#include <algorithm>
#include <cstring>

#include "api/checks.hpp"
#include "polyspec/kv_cache.hpp"
#include "polyspec/layer.hpp"

namespace polyspec {
namespace {

// An append of so few vectors is done before another thread has begun.
constexpr int64_t kFewVectors = 256;

int64_t bytes_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

Int4Shape int4_shape(const PackedMatrix& matrix) {
  return {matrix.outputs, matrix.inputs, matrix.group, matrix.scale_dtype};
}
DenseShape dense_shape(const PackedMatrix& matrix, DType dtype) {
  return {matrix.outputs, matrix.inputs, dtype};
}
BlockShape block_shape(const PackedMatrix& matrix) {
  return {matrix.outputs, matrix.inputs, matrix.type};
}

int64_t product_workspace(const PackedMatrix& matrix, DType dtype, int64_t tokens) {
  switch (matrix.layout) {
    case PackedLayout::kDense:
      return dense_workspace_bytes(dense_shape(matrix, dtype), tokens);
    case PackedLayout::kInt4:
      return int4_workspace_bytes(int4_shape(matrix), tokens);
    case PackedLayout::kBlocks:
      return block_workspace_bytes(block_shape(matrix), tokens);
  }
  return -1;
}

// Params of the three products alike.
template <class Params, class Packed>
Params product_params(const PackedMatrix& matrix, int64_t tokens, const void* x, void* y,
                      int64_t y_stride, void* workspace) {
  Params p;
  p.tokens = tokens;
  p.x = x;
  p.x_stride = matrix.inputs;
  p.packed = static_cast<const Packed*>(matrix.packed);
  p.y = y;
  p.y_stride = y_stride;
  p.workspace = workspace;
  return p;
}

Result multiply(const PackedMatrix& matrix, DType dtype, int64_t tokens, const void* x, void* y,
                int64_t y_stride, void* workspace, Stream stream) {
  switch (matrix.layout) {
    case PackedLayout::kDense: {
      auto p = product_params<DenseProductParams, void>(matrix, tokens, x, y, y_stride, workspace);
      p.shape = dense_shape(matrix, dtype);
      p.bias = matrix.bias;
      return dense_product(p, stream);
    }
    case PackedLayout::kInt4: {
      auto p =
          product_params<Int4ProductParams, uint8_t>(matrix, tokens, x, y, y_stride, workspace);
      p.shape = int4_shape(matrix);
      p.dtype = dtype;
      return int4_product(p, stream);
    }
    case PackedLayout::kBlocks: {
      auto p =
          product_params<BlockProductParams, uint8_t>(matrix, tokens, x, y, y_stride, workspace);
      p.shape = block_shape(matrix);
      p.dtype = dtype;
      return block_product(p, stream);
    }
  }
  return expected("layout", "that of a packed matrix", static_cast<int>(matrix.layout));
}

AttentionParams attention_params(const DecoderParams& p) {
  AttentionParams a;
  a.batch = p.batch;
  a.heads = p.heads;
  a.groups = p.groups;
  a.tokens = p.tokens;
  a.length = p.span;
  a.width = a.value_width = p.head_width;
  a.dtype = p.dtype;
  a.causal = p.causal;
  a.scale = p.scale;
  a.mask = p.mask;
  a.query_stride[2] = p.head_width;
  a.query_stride[1] = p.tokens * a.query_stride[2];
  a.query_stride[0] = p.heads * a.query_stride[1];
  std::copy(p.key_stride, p.key_stride + 3, a.key_stride);
  std::copy(p.value_stride, p.value_stride + 3, a.value_stride);
  std::copy(p.mask_stride, p.mask_stride + 2, a.mask_stride);
  return a;
}

Result check(const char* name, const PackedMatrices& matrices, int64_t outputs, int64_t inputs) {
  if (matrices.parts == nullptr || matrices.count < 1)
    return invalid("%s: expected at least one matrix", name);
  int64_t found = 0;
  for (int64_t i = 0; i < matrices.count; ++i) {
    const PackedMatrix& matrix = matrices.parts[i];
    if (matrix.layout < PackedLayout::kDense || matrix.layout > PackedLayout::kBlocks)
      return expected("layout", "that of a packed matrix", static_cast<int>(matrix.layout));
    if (const Result sizes = check_matrix(matrix.outputs, matrix.inputs); !sizes.ok()) return sizes;
    if (matrix.inputs != inputs)
      return expected(name, "inputs of the layer's width", matrix.inputs);
    if (matrix.bias != nullptr && matrix.layout != PackedLayout::kDense)
      return invalid("%s: expected no bias of a quantised matrix", name);
    found += matrix.outputs;
  }
  if (found != outputs) return expected(name, "outputs of the layer's shape", found);
  return {};
}

Result check(const DecoderParams& p) {
  if (p.count < 1) return expected("count", ">= 1", p.count);
  if (p.batch < 0) return expected("batch", ">= 0", p.batch);
  if (p.tokens < 0) return expected("tokens", ">= 0", p.tokens);
  if (p.width < 1) return expected("width", ">= 1", p.width);
  if (p.gated_width < 1) return expected("gated_width", ">= 1", p.gated_width);
  if (p.heads < 1 || p.groups < 1 || p.head_width < 1)
    return invalid("heads, groups, head_width: expected >= 1");
  if (p.num_taken < 0) return expected("num_taken", ">= 0", p.num_taken);
  if (p.capacity < 1) return expected("capacity", ">= 1", p.capacity);
  if (p.span < 1 || p.span > p.capacity) return expected("span", "[1, capacity]", p.span);
  for (const Result& sizes :
       {check_sizes("batch, tokens, width", {p.batch, p.tokens, p.width}),
        check_sizes("batch, tokens, heads, groups, head_width",
                    {p.batch, p.tokens, 3, std::max(p.heads, p.groups), p.head_width}),
        check_sizes("batch, tokens, gated_width", {p.batch, p.tokens, 2, p.gated_width})}) {
    if (!sizes.ok()) return sizes;
  }
  if (const Result shape = check_shape(attention_params(p)); !shape.ok()) return shape;
  const Result given = check_given({{"layers", p.layers}, {"taken", p.taken, p.num_taken > 0}});
  if (!given.ok()) return given;
  for (int64_t i = 0; i < p.num_taken; ++i) {
    if (p.taken[i] < 0 || p.taken[i] >= p.count || (i > 0 && p.taken[i] <= p.taken[i - 1]))
      return expected("taken", "ascending numbers of layers", p.taken[i]);
  }
  const int64_t features = (p.heads + 2 * p.groups) * p.head_width;
  for (int64_t i = 0; i < p.count; ++i) {
    const DecoderLayer& layer = p.layers[i];
    for (const Result& result :
         {check("attention_in", layer.attention_in, features, p.width),
          check("attention_out", layer.attention_out, p.width, p.heads * p.head_width),
          check("gated_in", layer.gated_in, 2 * p.gated_width, p.width),
          check("gated_out", layer.gated_out, p.width, p.gated_width)}) {
      if (!result.ok()) return result;
    }
  }
  return {};
}

// Where everything lies in the workspace; with no memory, how much there is of it.
struct Workspace {
  char *normed, *sums[2], *product, *query, *key, *value, *attended, *added, *gates, *gated,
      *multiply, *attend;
  int64_t bytes = 0;

  Workspace(const DecoderParams& p, void* memory) : base_(static_cast<char*>(memory)) {
    const int64_t rows = p.batch * p.tokens, element = bytes_of(p.dtype);
    const auto values = [&](int64_t width) { return take(rows * width * element); };
    const int64_t queries = p.heads * p.head_width, keys = p.groups * p.head_width;
    normed = values(p.width);
    sums[0] = values(p.width);
    sums[1] = values(p.width);
    product = values(queries + 2 * keys);
    query = values(queries);
    key = values(keys);
    value = values(keys);
    attended = values(queries);
    added = values(p.width);
    gates = values(2 * p.gated_width);
    gated = values(p.gated_width);
    int64_t most = 0;
    for (int64_t i = 0; i < p.count; ++i) {
      const DecoderLayer& layer = p.layers[i];
      for (const PackedMatrices* all :
           {&layer.attention_in, &layer.attention_out, &layer.gated_in, &layer.gated_out}) {
        for (int64_t j = 0; j < all->count; ++j) {
          const int64_t own = product_workspace(all->parts[j], p.dtype, rows);
          if (own < 0) refused = true;
          most = std::max(most, own);
        }
      }
    }
    multiply = take(most);
    attend = p.spread_keys ? take(attention_workspace_bytes(attention_params(p))) : nullptr;
  }

  bool refused = false;

 private:
  char* take(int64_t wanted) {
    char* const at = base_ == nullptr ? nullptr : base_ + bytes;
    bytes += (wanted + 63) / 64 * 64;
    return at;
  }
  char* base_;
};

// One pass. Every step ends it where it is refused.
class Pass {
 public:
  Pass(const DecoderParams& params, Stream stream)
      : p_(params),
        stream_(stream),
        rows_(params.batch * params.tokens),
        at_(params, params.workspace) {}

  Result run() {
    const void* x = p_.x;        // states that enter the layer, ...
    const void* more = nullptr;  // ... and the addend that is still to be added to them
    int64_t taken = 0;
    for (int64_t i = 0; i < p_.count; ++i) {
      const DecoderLayer& layer = p_.layers[i];
      if (const Result r = norm(x, more, layer.attention_norm, at_.sums[0]); !r.ok()) return r;
      if (more != nullptr) x = at_.sums[0];
      if (taken < p_.num_taken && p_.taken[taken] == i) {
        const size_t bytes = static_cast<size_t>(rows_ * p_.width * bytes_of(p_.dtype));
        std::memcpy(static_cast<char*>(p_.states) + static_cast<size_t>(taken++) * bytes, x, bytes);
      }
      if (const Result r = attend(layer); !r.ok()) return r;
      if (const Result r = norm(x, at_.added, layer.gated_norm, at_.sums[1]); !r.ok()) return r;
      if (const Result r = gate(layer); !r.ok()) return r;
      x = at_.sums[1];
      more = at_.added;
    }
    // Only the sum is used; the norm is not.
    return norm(x, more, p_.layers[p_.count - 1].gated_norm, p_.y);
  }

 private:
  Result norm(const void* x, const void* more, const void* weight, void* sum) {
    RmsNormParams n;
    n.tokens = rows_;
    n.width = p_.width;
    n.dtype = p_.dtype;
    n.epsilon = p_.epsilon;
    n.x = x;
    n.residual = more;
    n.weight = weight;
    n.sum = sum;
    n.y = at_.normed;
    return rms_norm(n, stream_);
  }

  Result multiply_all(const PackedMatrices& matrices, const void* x, void* y) {
    int64_t outputs = 0;
    for (int64_t i = 0; i < matrices.count; ++i) outputs += matrices.parts[i].outputs;
    char* to = static_cast<char*>(y);
    for (int64_t i = 0; i < matrices.count; ++i) {
      const PackedMatrix& part = matrices.parts[i];
      const Result result = multiply(part, p_.dtype, rows_, x, to, outputs, at_.multiply, stream_);
      if (!result.ok()) return result;
      to += part.outputs * bytes_of(p_.dtype);
    }
    return {};
  }

  Result attend(const DecoderLayer& layer) {
    if (const Result r = multiply_all(layer.attention_in, at_.normed, at_.product); !r.ok())
      return r;
    RotaryParams turn;
    turn.batch = p_.batch;
    turn.tokens = p_.tokens;
    turn.heads = p_.heads;
    turn.groups = p_.groups;
    turn.width = p_.head_width;
    turn.dtype = p_.dtype;
    turn.x = at_.product;
    turn.bias = layer.attention_bias;
    turn.query_norm = layer.query_norm;
    turn.key_norm = layer.key_norm;
    turn.epsilon = p_.epsilon;
    turn.angles = p_.angles;
    turn.cosine = p_.cosine;
    turn.sine = p_.sine;
    turn.positions = p_.positions;
    std::copy(p_.position_stride, p_.position_stride + 2, turn.position_stride);
    turn.position_step = p_.position_step;
    turn.query = at_.query;
    turn.key = at_.key;
    turn.value = at_.value;
    if (const Result r = rotary(turn, stream_); !r.ok()) return r;
    if (const Result r = append_to(layer); !r.ok()) return r;
    AttentionParams a = attention_params(p_);
    a.query = at_.query;
    a.key = layer.keys;
    a.value = layer.values;
    a.out = at_.attended;
    a.workspace = at_.attend;
    if (const Result r = attention(a, stream_); !r.ok()) return r;
    return multiply_all(layer.attention_out, at_.attended, at_.added);
  }

  Result append_to(const DecoderLayer& layer) {
    AppendParams a;
    a.in.batch = p_.batch;
    a.in.heads = p_.groups;
    a.in.tokens = p_.tokens;
    a.in.key_dim = a.in.value_dim = p_.head_width;
    a.in.element_size = static_cast<int32_t>(bytes_of(p_.dtype));
    for (KvSource* source : {&a.in.keys, &a.in.values}) {
      source->stride[2] = p_.head_width;
      source->stride[1] = p_.tokens * p_.head_width;
      source->stride[0] = p_.groups * source->stride[1];
    }
    a.in.keys.data = at_.key;
    a.in.values.data = at_.value;
    a.in.lengths = p_.lengths;
    a.in.counts = p_.counts;
    a.in.status = p_.status;
    a.capacity = p_.capacity;
    a.keys.data = layer.keys;
    a.values.data = layer.values;
    std::copy(p_.key_stride, p_.key_stride + 3, a.keys.stride);
    std::copy(p_.value_stride, p_.value_stride + 3, a.values.stride);
    return append(a, rows_ * p_.groups <= kFewVectors ? Stream::cpu() : stream_);
  }

  Result gate(const DecoderLayer& layer) {
    if (const Result r = multiply_all(layer.gated_in, at_.normed, at_.gates); !r.ok()) return r;
    GatedParams g;
    g.tokens = rows_;
    g.width = p_.gated_width;
    g.dtype = p_.dtype;
    g.x = at_.gates;
    g.y = at_.gated;
    if (const Result r = gated(g, stream_); !r.ok()) return r;
    return multiply_all(layer.gated_out, at_.gated, at_.added);
  }

  const DecoderParams& p_;
  const Stream stream_;
  const int64_t rows_;
  const Workspace at_;
};

}  // namespace

int64_t decoder_workspace_bytes(const DecoderParams& params) {
  if (!check(params).ok()) return -1;
  if (params.batch * params.tokens == 0) return 0;
  const Workspace workspace(params, nullptr);
  return workspace.refused ? -1 : workspace.bytes;
}

Result decoder_layers(const DecoderParams& given_params, Stream stream) {
  if (const Result result = check(given_params); !result.ok()) return result;
  DecoderParams params = given_params;
  for (int64_t* const strides : {params.key_stride, params.value_stride})
    fill_strides({params.groups, params.capacity, params.head_width}, strides);
  if (stream.device != Stream::Device::kCpu) return on_cpu_only("decoder_layers");
  if (params.batch * params.tokens == 0) return {};
  const Result given = check_given({{"x", params.x},
                                    {"y", params.y},
                                    {"status", params.status},
                                    {"workspace", params.workspace},
                                    {"states", params.states, params.num_taken > 0}});
  if (!given.ok()) return given;
  if (const Result at = check_aligned("workspace", params.workspace); !at.ok()) return at;
  return Pass(params, stream).run();
}

}  // namespace polyspec
