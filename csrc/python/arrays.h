// Arrays of Python's, in place: numpy's, and any library's through DLPack
// (https://data-apis.org/array-api/latest/design_topics/data_interchange.html), on the host or on the device.
#pragma once
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "platform/dlpack.h"

namespace llamac {

struct Array {
    void* data = nullptr;
    dlpack::DataType type = {dlpack::opaque, 0, 1};  // opaque: none that DLPack has
    int64_t itemsize = 0;
    std::vector<int64_t> shape, strides;  // strides in elements
    bool on_device = false;               // the one that this build computes on
    bool read_only = false;
    pybind11::object owner;  // keeps the memory

    int64_t elements() const;
    // Bytes from the first element to the last, gaps of the strides included.
    int64_t span_bytes() const;
};

// what: the array's name in messages. stream: the caller's, which the array's library makes wait for its own work; by default
// the device's default stream. Throws Error for other objects and for arrays on another device.
Array array_of(pybind11::handle object, const std::string& what, std::optional<int64_t> stream = {});
// Throws Error for more than Tensor::max_rank dimensions, or a type that operations do not have.
Tensor tensor_of(const Array& array, const std::string& what);
// As numpy's, copied if it is on the device. Throws Error for bfloat16, which numpy has not.
pybind11::array host_array(const Array& array, const std::string& what);

}  // namespace llamac
