#pragma once

#include <pybind11/pybind11.h>

namespace nvfp4 {

// `_C.numerics`: the element rules by themselves, on CPU tensors, for exhaustive tests.
void bind_numerics(pybind11::module_& m);

}  // namespace nvfp4
