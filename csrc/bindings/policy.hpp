// What module.cpp adds to the module from policy.cpp.
#pragma once

#include <pybind11/pybind11.h>

void bind_policies(pybind11::module_& m);
