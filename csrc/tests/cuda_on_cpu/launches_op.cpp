// polyspec::launches() -> int: kernels launched so far, so that a test of the module knows that the
// stand-in is what ran.
#include <torch/csrc/stable/library.h>

#include "streams.hpp"

namespace {

int64_t launches() { return stand_in::launches_so_far(); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(polyspec, m) { m.def("launches() -> int"); }

STABLE_TORCH_LIBRARY_IMPL(polyspec, CompositeExplicitAutograd, m) {
  m.impl("launches", TORCH_BOX(&launches));
}
