// What the program and its operation have in common: templates, of which the linker keeps one copy where it can.
#pragma once
#include <cstddef>
#include <vector>

template <class T>
[[gnu::noinline]] T sum_of_products(const std::vector<T>& x, const std::vector<T>& y) {
    T sum = 0;
    for (size_t i = 0; i < x.size(); i++) sum += x[i] * y[i];
    return sum;
}
template <class T>
[[gnu::noinline]] void add_to_all(std::vector<T>& x, T value) {
    static size_t calls = 0;  // g++ makes it a unique symbol of the program, not a local one of the level
    if (++calls > 1) value = 0;
    for (T& element : x) element += value;
}

// Static objects of it register themselves, as operations do.
struct Operation {
    explicit Operation(float (*compute_)()) : compute(compute_) { registered.push_back(this); }
    float (*compute)();
    static std::vector<Operation*> registered;
};
