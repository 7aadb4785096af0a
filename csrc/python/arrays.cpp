#include "arrays.h"

#include <algorithm>

#include "core/device_memory.h"

namespace py = pybind11;

namespace llamac {
namespace {

// Whether the array is the current device's; Error where it is on another one.
bool is_on_device(const dlpack::Device& d, const std::string& what) {
    if (dlpack::is_host(d.type)) return false;
    if (d.type != dlpack::ours && d.type != dlpack::ours_managed)
        fail(what, ": is on a device of DLPack's type ", d.type, ", expected host memory",
             dlpack::ours ? ", or this build's device of type " + std::to_string(dlpack::ours) : "");
    if (const int current = current_device(); d.id != current)
        fail(what, ": is on device ", d.id, ", expected the current one, ", current);
    return true;
}

py::object capsule_of(py::handle object, const dlpack::Device& device, std::optional<int64_t> stream) {
    py::dict arguments;
    if (!dlpack::is_host(device.type))
        arguments["stream"] = stream.value_or(0) ? *stream : dlpack::default_stream;
    py::dict versioned = arguments.attr("copy")();
    versioned["max_version"] = py::make_tuple(1, 0);
    const py::object method = object.attr("__dlpack__");
    try {
        return method(**versioned);
    } catch (py::error_already_set& error) {  // written before version 1.0
        if (!error.matches(PyExc_TypeError)) throw;
    }
    return method(**arguments);
}

// numpy's letters of types, by DLPack's codes.
struct Kind {
    char letter;
    uint8_t code;
};
constexpr Kind kinds[] = {
    {'i', dlpack::integer}, {'u', dlpack::unsigned_integer}, {'f', dlpack::floating}, {'b', dlpack::boolean}};

Array from_dlpack(py::handle object, const std::string& what, std::optional<int64_t> stream) {
    const auto numbers = object.attr("__dlpack_device__")().cast<std::pair<int32_t, int32_t>>();
    const dlpack::Device device{numbers.first, numbers.second};
    Array a;
    a.on_device = is_on_device(device, what);
    // Not renamed to used_...: while we borrow the memory the capsule keeps it, and then frees it.
    a.owner = capsule_of(object, device, stream);
    const dlpack::Tensor* t = nullptr;
    if (auto* v = PyCapsule_IsValid(a.owner.ptr(), "dltensor_versioned")
                      ? static_cast<dlpack::ManagedTensorVersioned*>(
                            PyCapsule_GetPointer(a.owner.ptr(), "dltensor_versioned"))
                      : nullptr) {
        if (v->major != 1) fail(what, ": expected DLPack version 1, found ", v->major, ".", v->minor);
        t = &v->tensor;
        a.read_only = v->flags & dlpack::read_only;
    } else if (PyCapsule_IsValid(a.owner.ptr(), "dltensor")) {
        t = &static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(a.owner.ptr(), "dltensor"))->tensor;
    } else {
        fail(what, ": expected __dlpack__ to give a DLPack capsule, found ",
             std::string(py::str(py::type::of(a.owner))));
    }
    a.data = static_cast<char*>(t->data) + t->byte_offset;
    a.type = t->dtype;
    a.itemsize = t->dtype.bits * t->dtype.lanes / 8;
    a.shape.assign(t->shape, t->shape + t->ndim);
    a.strides.resize(a.shape.size());
    int64_t elements = 1;
    for (size_t d = a.shape.size(); d-- > 0; elements *= a.shape[d])
        a.strides[d] = t->strides ? t->strides[d] : elements;
    return a;
}

Array from_numpy(const py::array& array, const std::string& what) {
    Array a;
    a.owner = array;
    a.data = const_cast<void*>(array.data());
    a.read_only = !array.writeable();
    const py::dtype dtype = array.dtype();
    a.itemsize = array.itemsize();
    if (const auto known = find_dtype(dtype.attr("name").cast<std::string>(), &DTypeInfo::python))
        a.type = info(*known).dlpack;
    else
        for (const Kind& k : kinds)
            if (dtype.kind() == k.letter) a.type = {k.code, static_cast<uint8_t>(8 * a.itemsize), 1};
    if (a.itemsize == 0) fail(what, ": expected numbers, found elements of no bytes");
    if (!dtype.attr("isnative").cast<bool>()) fail(what, ": expected this machine's byte order");
    for (py::ssize_t d = 0; d < array.ndim(); d++) {
        a.shape.push_back(array.shape(d));
        if (array.strides(d) % a.itemsize)
            fail(what, ": expected strides that are whole elements, found ", array.strides(d), " bytes");
        a.strides.push_back(array.strides(d) / a.itemsize);
    }
    return a;
}

std::string type_text(const Array& a) {
    if (const auto known = find_dtype(a.type)) return name(*known);
    for (const Kind& k : kinds)
        if (a.type.code == k.code && a.type.lanes == 1) return k.letter + std::to_string(a.type.bits);
    return "another type";
}

}  // namespace

int64_t Array::elements() const {
    int64_t n = 1;
    for (const int64_t size : shape) n *= size;
    return n;
}

int64_t Array::span_bytes() const {
    int64_t last = 0;
    for (size_t d = 0; d < shape.size(); d++) last += (shape[d] - 1) * strides[d];
    return elements() ? (last + 1) * itemsize : 0;
}

Array array_of(py::handle object, const std::string& what, std::optional<int64_t> stream) {
    if (py::isinstance<py::array>(object)) return from_numpy(py::reinterpret_borrow<py::array>(object), what);
    if (!py::hasattr(object, "__dlpack__") || !py::hasattr(object, "__dlpack_device__"))
        fail(what, ": expected an array (numpy's, or one with __dlpack__), found ",
             py::type::of(object).attr("__name__").cast<std::string>());
    try {
        return from_dlpack(object, what, stream);
    } catch (py::error_already_set& error) {  // a tensor that wants gradients, for one
        if (!error.matches(PyExc_BufferError)) throw;
        fail(what, ": ", std::string(py::str(error.value())));
    }
}

Tensor tensor_of(const Array& a, const std::string& what) {
    Tensor t;
    if (a.shape.size() > Tensor::max_rank)
        fail(what, ": expected at most ", Tensor::max_rank, " dimensions, found ", a.shape.size());
    const std::optional<DType> type = find_dtype(a.type);
    if (!type) fail(what, ": is ", type_text(a), ", expected ", dtype_names(is_any));
    t.dtype = *type;
    t.data = a.data;
    int64_t bytes = a.itemsize, span = a.itemsize, reach = 0;  // of all elements; from the first to the last
    bool fits = true;
    for (size_t d = 0; d < a.shape.size(); d++, t.rank++) {
        const int64_t size = t.shape[d] = a.shape[d], stride = t.stride[d] = a.strides[d];
        if (size < 0) fail(what, ": expected sizes of at least 0, found ", size);
        if (stride < 0) fail(what, ": expected strides of at least 0, found ", stride);
        fits = fits && !__builtin_mul_overflow(bytes, size, &bytes) &&
               !__builtin_mul_overflow(stride, a.itemsize, &reach) &&
               !__builtin_mul_overflow(reach, size, &reach) && !__builtin_add_overflow(span, reach, &span);
    }
    if (!fits) fail(what, ": expected fewer than 2^63 bytes, found more");
    return t;
}

py::array host_array(const Array& a, const std::string& what) {
    const Kind* kind = std::find_if(std::begin(kinds), std::end(kinds), [&](const Kind& k) {
        return a.type.code == k.code && a.type.lanes == 1;
    });
    if (kind == std::end(kinds))
        fail(what, ": is ", type_text(a), ", expected integers or floats that numpy has");
    const py::dtype dtype(kind->letter + std::to_string(a.itemsize));
    std::vector<int64_t> strides;
    for (const int64_t s : a.strides) strides.push_back(s * a.itemsize);
    if (!a.on_device) return py::array(dtype, a.shape, strides, a.data, a.owner);
    const py::array_t<char> copy(a.span_bytes());
    {
        const py::gil_scoped_release release;
        copy_bytes(const_cast<char*>(copy.data()), a.data, a.span_bytes());
    }
    return py::array(dtype, a.shape, strides, copy.data(), copy);
}

}  // namespace llamac
