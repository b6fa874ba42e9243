// Definitions of policy.cpp that module.cpp adds to the module.
#pragma once

#include <pybind11/pybind11.h>

void bind_policies(pybind11::module_& m);
