#include "polyspec/support.hpp"

#include "api/checks.hpp"
#include "cpu/attention_dispatch.hpp"
#include "cpu/dense_dispatch.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/int4_dispatch.hpp"
#include "cuda/launch.hpp"

namespace polyspec {

bool supports(Op op, Stream::Device device, DType dtype) {
  const bool on_cpu = device == Stream::Device::kCpu;
  if (!on_cpu && (device != Stream::Device::kCuda || !cuda::available())) return false;
  switch (op) {
    case Op::kSample:
    case Op::kVerify:
    case Op::kVerifyTree:
    case Op::kCache:
      return check_dtype("dtype", dtype).ok();
    case Op::kInt4:
      return check_dtype("dtype", dtype).ok() && (on_cpu || dtype != DType::kFloat32);
    case Op::kDense:
    case Op::kAttention:
      return (on_cpu || op == Op::kAttention) &&
             (dtype == DType::kFloat32 || dtype == DType::kBFloat16);
    case Op::kSchedule:
      return true;
  }
  return false;
}

const char* isa(Op op) {
  switch (op) {
    case Op::kSample:
    case Op::kVerify:
    case Op::kVerifyTree:
      return cpu::isa();
    case Op::kDense:
      return cpu::dense().isa;
    case Op::kInt4:
      return cpu::int4().isa;
    case Op::kAttention:
      return cpu::attention().isa;
    case Op::kCache:
    case Op::kSchedule:
      return "baseline";
  }
  return nullptr;
}

}  // namespace polyspec
