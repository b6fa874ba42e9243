// polyspec::block_*: check arguments on the host, then call the backend.
#include "polyspec/blocks.hpp"

#include "api/checks.hpp"
#include "api/packed_product.hpp"
#include "cpu/block_dispatch.hpp"
#include "cpu/block_layout.hpp"
#include "cpu/isa.hpp"

namespace polyspec {
namespace {

using core::BlockLayout;

Result check_shape(const BlockShape& shape) {
  const core::BlockForm form = core::form_of(shape.type);
  if (form.bits == 0) {
    return expected("type",
                    "Q4_0 (2), Q4_1 (3), Q5_0 (6), Q5_1 (7), Q8_0 (8), Q4_K (12), Q5_K "
                    "(13) or Q6_K (14)",
                    static_cast<int>(shape.type));
  }
  if (const Result result = check_matrix(shape.outputs, shape.inputs); !result.ok()) return result;
  if (shape.inputs % form.inputs == 0) return {};
  return invalid("inputs: expected whole blocks of %d, given %lld", form.inputs,
                 static_cast<long long>(shape.inputs));
}

int64_t tiles_bytes(const BlockShape& shape) {
  const BlockLayout layout(shape);
  return layout.tiles * layout.tile_bytes;
}

PackedLabel label_of(const BlockShape& shape) {
  PackedLabel label;
  label.layout = static_cast<int32_t>(PackedLayout::kBlocks);
  label.dtype = static_cast<int32_t>(shape.type);
  label.group = core::form_of(shape.type).group;
  label.outputs = shape.outputs;
  label.inputs = shape.inputs;
  return label;
}

Result check(const BlockProductParams& p) {
  if (const Result result = check_shape(p.shape); !result.ok()) return result;
  if (const Result dtype = check_dtype("dtype", p.dtype); !dtype.ok()) return dtype;
  return check_product(p, p.dtype == DType::kFloat32 ? 4 : 2, label_of(p.shape),
                       block_packed_bytes(p.shape), block_workspace_bytes(p.shape, p.tokens));
}

}  // namespace

int64_t block_row_bytes(const BlockShape& shape) {
  if (!check_shape(shape).ok()) return -1;
  const core::BlockForm form = core::form_of(shape.type);
  return shape.inputs / form.inputs * form.file_bytes;
}

int64_t block_packed_bytes(const BlockShape& shape) {
  return check_shape(shape).ok() ? tiles_bytes(shape) + kPackedLabelBytes : -1;
}

Result block_pack(const BlockPackParams& params, Stream stream) {
  if (const Result result = check_shape(params.shape); !result.ok()) return result;
  const Result given = check_given({{"blocks", params.blocks}, {"packed", params.packed}});
  if (!given.ok()) return given;
  if (const Result at = check_aligned("packed", params.packed); !at.ok()) return at;
  if (params.first < 0 || params.first >= params.shape.outputs ||
      params.first % core::kBlockOutputs != 0)
    return expected("first", "an output, a multiple of 16", params.first);
  BlockPackParams call = at_weights(params);
  const int64_t left = params.shape.outputs - params.first;
  if (call.rows == -1) call.rows = left;
  if (call.rows < 1 || call.rows > left ||
      (call.rows < left && call.rows % core::kBlockOutputs != 0))
    return expected("rows", "a multiple of 16, or all from `first` on", params.rows);
  if (stream.device != Stream::Device::kCpu) return on_cpu_only("block_pack");
  write_label(label_of(params.shape), params.packed);
  cpu::block_pack(call, stream.executor);
  return {};
}

Result block_rows(const BlockRowsParams& params, Stream stream) {
  if (const Result result = check_shape(params.shape); !result.ok()) return result;
  if (params.count < 0) return expected("count", ">= 0", params.count);
  if (params.count == 0) return {};
  const Result given =
      check_given({{"rows", params.rows}, {"packed", params.packed}, {"y", params.y}});
  if (!given.ok()) return given;
  if (const Result sizes = check_sizes("count, inputs", {params.count, params.shape.inputs});
      !sizes.ok())
    return sizes;
  if (const Result at = check_aligned("packed", params.packed); !at.ok()) return at;
  const Result apart = check_apart(
      "y",
      memory(params.y, params.count * params.shape.inputs * static_cast<int64_t>(sizeof(float))),
      {{"rows", memory(params.rows, params.count * static_cast<int64_t>(sizeof(int64_t)))},
       {"packed", memory(params.packed, block_packed_bytes(params.shape))}});
  if (!apart.ok()) return apart;
  if (stream.device != Stream::Device::kCpu) return on_cpu_only("block_rows");
  if (const Result label = check_label(label_of(params.shape), params.packed); !label.ok())
    return label;
  for (int64_t i = 0; i < params.count; ++i) {
    if (params.rows[i] < 0 || params.rows[i] >= params.shape.outputs)
      return invalid("rows: expected 0 to %lld, given %lld at %lld",
                     static_cast<long long>(params.shape.outputs - 1),
                     static_cast<long long>(params.rows[i]), static_cast<long long>(i));
  }
  cpu::block_rows(at_weights(params), stream.executor);
  return {};
}

int64_t block_workspace_bytes(const BlockShape& shape, int64_t tokens) {
  if (!check_shape(shape).ok() || tokens < 0) return -1;
  if (tokens == 0) return 0;
  const int64_t groups = shape.inputs / core::form_of(shape.type).group;
  return core::block_groups_at(shape) +
         core::kBlockTokens * groups * static_cast<int64_t>(sizeof(core::RoundedGroup));
}

Result block_product(const BlockProductParams& params, Stream stream) {
  if (const Result isa = cpu::check_isa(); !isa.ok()) return isa;
  if (const Result result = check(params); !result.ok()) return result;
  if (stream.device != Stream::Device::kCpu) return on_cpu_only("block_product");
  if (params.tokens > 0) cpu::block_product(at_weights(params), stream.executor);
  return {};
}

}  // namespace polyspec
