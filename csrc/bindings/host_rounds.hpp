// The part of polyspec_ext._C that drives state rows in the host's memory.
#pragma once

#include <pybind11/pybind11.h>

void bind_host_rounds(pybind11::module_& m);
