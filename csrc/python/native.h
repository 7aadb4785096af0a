// What the files of llamac._native share.
#pragma once
#include <pybind11/pybind11.h>

#include <mutex>

namespace llamac {

// For as long as a call computes: Python's other threads run on, but one call at a time, as the registry's choices and
// work space are the process's.
struct NativeCall {
    NativeCall() : lock(mutex()) {}

  private:
    static std::mutex& mutex() {
        static std::mutex m;
        return m;
    }
    pybind11::gil_scoped_release release;  // before the lock: whoever holds it may want the GIL
    std::lock_guard<std::mutex> lock;
};

void define_trainer(pybind11::module_& m);

}  // namespace llamac
