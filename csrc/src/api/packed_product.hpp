// Argument checks of products x [tokens, inputs] times packed weights, y [tokens, outputs].
#pragma once

#include "api/packed_label.hpp"

namespace polyspec {

// The shape is right already. `element_bytes`: of x and y.
template <class Params>
Result check_product_memory(const Params& p, int64_t element_bytes, int64_t packed_bytes,
                            int64_t workspace_bytes, uintptr_t alignment = 64) {
  if (p.tokens < 0) return expected("tokens", ">= 0", p.tokens);
  if (p.tokens == 0) return {};
  const Result given = check_given({{"x", p.x},
                                    {"packed", p.packed},
                                    {"y", p.y},
                                    {"workspace", p.workspace, workspace_bytes > 0}});
  if (!given.ok()) return given;
  if (const Result at = check_aligned("packed", p.packed, alignment); !at.ok()) return at;
  if (const Result at = check_aligned("workspace", p.workspace); !at.ok()) return at;
  const Rows x{p.x, p.tokens, p.shape.inputs, p.x_stride, element_bytes};
  const Rows y{p.y, p.tokens, p.shape.outputs, p.y_stride, element_bytes};
  const NamedRows packed{"packed", memory(p.packed, packed_bytes)};
  const NamedRows workspace{"workspace", memory(p.workspace, workspace_bytes)};
  if (!x.apart()) return expected("x_stride", "at least inputs, and x below 2^62 bytes", x.stride);
  if (!y.apart()) return expected("y_stride", "at least outputs, and y below 2^62 bytes", y.stride);
  if (const Result apart = check_apart("y", y, {{"x", x}, packed, workspace}); !apart.ok())
    return apart;
  return check_apart("workspace", workspace.rows, {{"x", x}, packed});
}

// The same of packed weights with a label.
template <class Params>
Result check_product(const Params& p, int64_t element_bytes, const PackedLabel& label,
                     int64_t packed_bytes, int64_t workspace_bytes) {
  const Result memory = check_product_memory(p, element_bytes, packed_bytes, workspace_bytes);
  return memory.ok() && p.tokens > 0 ? check_label(label, p.packed) : memory;
}

}  // namespace polyspec
