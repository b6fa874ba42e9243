// polyspec::rms_norm, rotary and gated: check what the host can see, and hand over to the backend.
#include "polyspec/layer.hpp"

#include <algorithm>

#include "api/checks.hpp"
#include "cpu/isa.hpp"
#include "cpu/layer_dispatch.hpp"

namespace polyspec {
namespace {

Result check_wide(DType dtype) {
  if (dtype == DType::kFloat32 || dtype == DType::kBFloat16) return {};
  return expected("dtype", "float32 (0) or bfloat16 (1)", static_cast<int>(dtype));
}

Result check(const RmsNormParams& p) {
  if (p.tokens < 0) return expected("tokens", ">= 0", p.tokens);
  if (p.width < 1) return expected("width", ">= 1", p.width);
  if (!(p.epsilon > 0.0f)) return invalid("epsilon: expected > 0, given %g", double(p.epsilon));
  if (const Result dtype = check_wide(p.dtype); !dtype.ok()) return dtype;
  if (const Result sizes = check_sizes("tokens, width", {p.tokens, p.width}); !sizes.ok())
    return sizes;
  if (p.tokens == 0) return {};
  return check_given(
      {{"x", p.x}, {"weight", p.weight}, {"y", p.y}, {"sum", p.sum, p.residual != nullptr}});
}

Result check(const RotaryParams& p) {
  if (p.batch < 0) return expected("batch", ">= 0", p.batch);
  if (p.tokens < 0) return expected("tokens", ">= 0", p.tokens);
  if (p.heads < 1) return expected("heads", ">= 1", p.heads);
  if (p.groups < 1) return expected("groups", ">= 1", p.groups);
  if (p.width < 2 || p.width > kRotaryWidth || p.width % 2 != 0)
    return expected("width", "an even number in [2, 512]", p.width);
  if (const Result dtype = check_wide(p.dtype); !dtype.ok()) return dtype;
  const Result sizes = check_sizes("batch, tokens, heads, groups, width",
                                   {p.batch, p.tokens, std::max(p.heads, p.groups), 3, p.width});
  if (!sizes.ok()) return sizes;
  const bool norms = p.query_norm != nullptr || p.key_norm != nullptr;
  if (norms && !(p.epsilon > 0.0f))
    return invalid("epsilon: expected > 0, given %g", double(p.epsilon));
  if (p.batch * p.tokens == 0) return {};
  return check_given({{"x", p.x},
                      {"query_norm", p.query_norm, norms},
                      {"key_norm", p.key_norm, norms},
                      {"cosine", p.cosine},
                      {"sine", p.sine},
                      {"query", p.query},
                      {"key", p.key},
                      {"value", p.value}});
}

Result check(const GatedParams& p) {
  if (p.tokens < 0) return expected("tokens", ">= 0", p.tokens);
  if (p.width < 0) return expected("width", ">= 0", p.width);
  if (const Result dtype = check_wide(p.dtype); !dtype.ok()) return dtype;
  if (const Result sizes = check_sizes("tokens, width", {p.tokens, 2, p.width}); !sizes.ok())
    return sizes;
  if (p.tokens * p.width == 0) return {};
  return check_given({{"x", p.x}, {"y", p.y}});
}

template <class Params>
Result call(const char* name, void (*run)(const Params&, const Executor&), const Params& params,
            Stream stream) {
  if (const Result result = check(params); !result.ok()) return result;
  if (stream.device != Stream::Device::kCpu) return on_cpu_only(name);
  if (const Result isa = cpu::check_isa(); !isa.ok()) return isa;
  run(params, stream.executor);
  return {};
}

}  // namespace

Result rms_norm(const RmsNormParams& params, Stream stream) {
  return call("rms_norm", &cpu::rms_norm, params, stream);
}

Result rotary(const RotaryParams& params, Stream stream) {
  return call("rotary", &cpu::rotary, params, stream);
}

Result gated(const GatedParams& params, Stream stream) {
  return call("gated", &cpu::gated, params, stream);
}

}  // namespace polyspec
