// Declarations shared by the files of llamac._native.
#pragma once
#include <pybind11/pybind11.h>

namespace llamac {

void define_trainer(pybind11::module_& m);
void define_inference(pybind11::module_& m);

}  // namespace llamac
