// DLPack's C structures of specification 1.x (the layout is the protocol), and its names of our devices.
// https://dmlc.github.io/dlpack/latest/c_api.html
#pragma once
#include <cstdint>

namespace llamac::dlpack {

struct Device {
    int32_t type, id;
};
struct DataType {
    uint8_t code, bits;
    uint16_t lanes;

    bool operator==(const DataType&) const = default;
};
constexpr uint8_t integer = 0, unsigned_integer = 1, floating = 2, opaque = 3, bfloat = 4, boolean = 6,
                  e4m3fn = 10, e4m3fnuz = 11, e5m2 = 12, e5m2fnuz = 13;  // codes
struct Tensor {
    void* data;
    Device device;
    int32_t ndim;
    DataType dtype;
    int64_t* shape;
    int64_t* strides;  // in elements; null: row-major
    uint64_t byte_offset;
};
struct ManagedTensor {  // in a capsule called dltensor
    Tensor tensor;
    void* context;
    void (*deleter)(ManagedTensor*);
};
struct ManagedTensorVersioned {  // in a capsule called dltensor_versioned
    uint32_t major, minor;
    void* context;
    void (*deleter)(ManagedTensorVersioned*);
    uint64_t flags;
    Tensor tensor;
};
constexpr uint64_t read_only = 1;  // a flag

// Types of devices.
constexpr int32_t cpu = 1, cuda = 2, cuda_host = 3, rocm = 10, rocm_host = 11, cuda_managed = 13;
inline bool is_host(int32_t device) {
    return device == cpu || device == cuda_host || device == rocm_host;
}
// Those whose memory this build's kernels address, 0 for none; and the default stream's number.
#if defined(LLAMAC_AMD)
constexpr int32_t ours = rocm, ours_managed = rocm;
constexpr int64_t default_stream = 0;
#elif defined(LLAMAC_NVIDIA)
constexpr int32_t ours = cuda, ours_managed = cuda_managed;
constexpr int64_t default_stream = 1;
#else
constexpr int32_t ours = 0, ours_managed = 0;
constexpr int64_t default_stream = 0;
#endif

}  // namespace llamac::dlpack
