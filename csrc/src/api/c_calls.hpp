// Helpers of the operators' entry points: streams, results, and the call itself.
#pragma once

#include "api/c_errors.hpp"
#include "polyspec/status.hpp"
#include "polyspec/types.hpp"

namespace polyspec {
namespace c_api {

polyspec_code from_result(const char* function, const Result& result);

// NULL is the CPU, serially.
polyspec_code read_stream(const char* function, const polyspec_stream* given, Stream* out);

// Reads `given` over `in`, which holds the defaults, converts `in` to the operator's parameters by
// read(function, in, &params), and runs the operator.
template <class Params, class Struct, class Read>
polyspec_code call(const char* function, Result (*operation)(const Params&, Stream),
                   const Struct* given, Struct in, Sizes earlier, const polyspec_stream* stream,
                   const Read& read) {
  return guarded(function, [&]() -> polyspec_code {
    Params params;
    Stream where;
    polyspec_code code = read_struct(function, given, earlier, &in);
    if (code == POLYSPEC_OK) code = read_stream(function, stream, &where);
    if (code == POLYSPEC_OK) code = read(function, in, &params);
    if (code != POLYSPEC_OK) return code;
    return from_result(function, operation(params, where));
  });
}

}  // namespace c_api
}  // namespace polyspec
