#include "api/c_calls.hpp"

namespace polyspec {
namespace c_api {

polyspec_code from_result(const char* function, const Result& result) {
  static_assert(static_cast<int>(Result::Code::kInvalidArgument) == POLYSPEC_INVALID_ARGUMENT, "");
  static_assert(static_cast<int>(Result::Code::kUnsupported) == POLYSPEC_UNSUPPORTED, "");
  static_assert(static_cast<int>(Result::Code::kCudaError) == POLYSPEC_CUDA_ERROR, "");
  if (result.ok()) return POLYSPEC_OK;
  return fail(static_cast<polyspec_code>(result.code), function, result.message);
}

polyspec_code read_stream(const char* function, const polyspec_stream* given, Stream* out) {
  polyspec_stream in = polyspec_stream_default();
  const polyspec_code code = read_optional(function, given, &in);
  if (code != POLYSPEC_OK) return code;
  if (in.device == POLYSPEC_CPU) {
    *out = Stream::cpu({in.executor.run, in.executor.pool});
  } else if (in.device == POLYSPEC_CUDA) {
    *out = Stream::on(static_cast<CUstream_st*>(in.cuda_stream));
  } else {
    char text[80];
    std::snprintf(text, sizeof text, "device: expected POLYSPEC_CPU or POLYSPEC_CUDA, given %d",
                  static_cast<int>(in.device));
    return fail(POLYSPEC_INVALID_ARGUMENT, function, text);
  }
  return POLYSPEC_OK;
}

}  // namespace c_api
}  // namespace polyspec
