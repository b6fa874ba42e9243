// polyspec/layer.hpp: checks arguments on the host, then calls the backend.
#include "polyspec/layer.hpp"

#include <algorithm>

#include "api/checks.hpp"
#include "cpu/isa.hpp"
#include "cpu/layer_dispatch.hpp"
#include "cuda/layer.hpp"

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

// `appends`: keys and values go elsewhere.
Result check_turn(const RotaryParams& p, bool appends) {
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
  if (p.angles < 1) return expected("angles", ">= 1", p.angles);
  if (const Result table = check_sizes("angles, width", {p.angles, p.width}); !table.ok())
    return table;
  if (p.position_step < 0 || p.position_step > 1)
    return expected("position_step", "0 or 1", p.position_step);
  const bool norms = p.query_norm != nullptr || p.key_norm != nullptr;
  if (norms && !(p.epsilon > 0.0f))
    return invalid("epsilon: expected > 0, given %g", double(p.epsilon));
  if (p.batch * p.tokens == 0) return {};
  return check_given({{"x", p.x},
                      {"query_norm", p.query_norm, norms},
                      {"key_norm", p.key_norm, norms},
                      {"cosine", p.cosine},
                      {"sine", p.sine},
                      {"positions", p.positions},
                      {"query", p.query},
                      {"key", p.key, !appends},
                      {"value", p.value, !appends}});
}

Result check(const RotaryParams& p) { return check_turn(p, false); }

}  // namespace

Result check(const RotaryAppendParams& p) {
  if (p.capacity < 1) return expected("capacity", ">= 1", p.capacity);
  if (const Result turn = check_turn(p.turn, true); !turn.ok()) return turn;
  if (p.turn.tokens < 1) return expected("tokens", ">= 1", p.turn.tokens);
  if (p.turn.batch == 0) return {};
  return check_given({{"lengths", p.lengths},
                      {"status", p.status},
                      {"keys", p.keys.data},
                      {"values", p.values.data}});
}

namespace {

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
Result call(void (*on_cpu)(const Params&, const Executor&),
            Result (*on_cuda)(const Params&, CUstream_st*), const Params& params, Stream stream) {
  if (const Result result = check(params); !result.ok()) return result;
  if (stream.device == Stream::Device::kCuda) return on_cuda(params, stream.cuda);
  if (const Result isa = cpu::check_isa(); !isa.ok()) return isa;
  on_cpu(params, stream.executor);
  return {};
}

}  // namespace

Result rms_norm(const RmsNormParams& params, Stream stream) {
  return call(&cpu::rms_norm, &cuda::rms_norm, params, stream);
}

Result rotary(const RotaryParams& params, Stream stream) {
  return call(&cpu::rotary, &cuda::rotary, params, stream);
}

Result rotary_append(const RotaryAppendParams& params, Stream stream) {
  return call(&cpu::rotary_append, &cuda::rotary_append, params, stream);
}

Result gated(const GatedParams& params, Stream stream) {
  return call(&cpu::gated, &cuda::gated, params, stream);
}

}  // namespace polyspec
