#include "api/c_errors.hpp"

namespace polyspec {
namespace c_api {
namespace {

thread_local char last_error[256] = "";

}  // namespace

polyspec_code fail(polyspec_code code, const char* function, const char* text) {
  std::snprintf(last_error, sizeof last_error, "%s: %s", function, text);
  return code;
}

}  // namespace c_api
}  // namespace polyspec

const char* polyspec_last_error(void) { return polyspec::c_api::last_error; }
