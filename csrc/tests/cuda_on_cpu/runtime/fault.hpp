// Mistakes that a kernel made, and that hardware may or may not have shown.
#pragma once

#include <string>

namespace stand_in {

[[noreturn]] void fault(const std::string& what);

}  // namespace stand_in
