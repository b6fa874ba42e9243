// Errors of a kernel, which hardware may or may not show.
#pragma once

#include <string>

namespace stand_in {

[[noreturn]] void fault(const std::string& what);

}  // namespace stand_in
