// Declarations shared by the files of llamac._native.
#pragma once
#include <pybind11/pybind11.h>

#include <mutex>

namespace llamac {

// An object that several of Python's threads may call: they take turns.
template <class T>
struct Locked : T {
    using T::T;
    mutable std::mutex lock;
};
// One of the turns. Python's other threads run meanwhile.
template <class T>
struct Turn {
    explicit Turn(const Locked<T>& of) : held(of.lock) {}

  private:
    pybind11::gil_scoped_release release;  // before the lock, whose holder may need the GIL
    std::lock_guard<std::mutex> held;
};

// What `call` returns, computed in a turn.
template <class T, class Call>
auto in_turn(const Locked<T>& of, const Call& call) {
    const Turn turn(of);
    return call();
}

void define_trainer(pybind11::module_& m);
void define_inference(pybind11::module_& m);

}  // namespace llamac
