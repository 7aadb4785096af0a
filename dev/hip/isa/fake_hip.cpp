// A HIP runtime without a GPU: memory is the host's, launches go to a callback (device.py) and run at once, in order.
// Built as libamdhip64.so, so that the AMD build's host code, launchers and registry, runs unchanged.
#include <hip/hip_runtime_api.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace {

struct CodeObject {
    const char* data;
    size_t size;
};
struct Function {
    int code;  // index into code_objects()
    std::string name;
};
struct Allocation {
    char* base;
    size_t bytes;
};
struct LaunchConfiguration {
    dim3 grid, block;
    size_t shared;
    hipStream_t stream;
};

// These outlive the program's own static objects, which free memory when they are destroyed.
std::vector<CodeObject>& code_objects() {
    static auto& all = *new std::vector<CodeObject>;
    return all;
}
std::map<const void*, Function>& functions() {
    static auto& all = *new std::map<const void*, Function>;
    return all;
}
std::map<void*, Allocation>& allocations() {
    static auto& all = *new std::map<void*, Allocation>;
    return all;
}

using LaunchCallback = int (*)(int code, const char* name, const unsigned* grid, const unsigned* block,
                               void** arguments, size_t shared);
using OccupancyCallback = int (*)(int code, const char* name, int threads, size_t shared);
LaunchCallback launch_callback;
OccupancyCallback occupancy_callback;
int compute_units = 304;
thread_local LaunchConfiguration configuration;

// The index of the bundle's gfx942 code object; -1: it has none.
int add_bundle(const char* bundle) {
    if (std::memcmp(bundle, "__CLANG_OFFLOAD_BUNDLE__", 24) != 0) return -1;
    uint64_t entries;
    std::memcpy(&entries, bundle + 24, 8);
    const char* entry = bundle + 32;
    for (uint64_t i = 0; i < entries; i++) {
        uint64_t offset, size, length;
        std::memcpy(&offset, entry, 8), std::memcpy(&size, entry + 8, 8), std::memcpy(&length, entry + 16, 8);
        const std::string target(entry + 24, length);
        entry += 24 + length;
        if (target.find("gfx942") == std::string::npos) continue;
        code_objects().push_back({bundle + offset, size});
        return static_cast<int>(code_objects().size()) - 1;
    }
    return -1;
}

}  // namespace

extern "C" {

// ---- for device.py ----

void fake_set(LaunchCallback launch, OccupancyCallback occupancy, int units) {
    launch_callback = launch, occupancy_callback = occupancy, compute_units = units;
}
int fake_codes() {
    return static_cast<int>(code_objects().size());
}
const char* fake_code(int i, size_t* size) {
    const CodeObject& code = code_objects()[static_cast<size_t>(i)];
    *size = code.size;
    return code.data;
}

// ---- what clang's launch stubs call ----

void** __hipRegisterFatBinary(const void* data) {
    struct Wrapper {
        unsigned magic, version;
        const char* bundle;
        void* unused;
    };
    return reinterpret_cast<void**>(new int(add_bundle(static_cast<const Wrapper*>(data)->bundle)));
}
void __hipUnregisterFatBinary(void** module) {
    delete reinterpret_cast<int*>(module);
}
void __hipRegisterFunction(void** module, const void* host, char*, const char* name, unsigned, void*, void*,
                           void*, void*, int*) {
    functions()[host] = {*reinterpret_cast<int*>(module), name};
}
void __hipRegisterVar(void**, void*, char*, char* name, int, size_t, int, int) {
    std::fprintf(stderr, "fake_hip: device variable %s: expected none\n", name);
    std::abort();
}
hipError_t __hipPushCallConfiguration(dim3 grid, dim3 block, size_t shared, hipStream_t stream) {
    configuration = {grid, block, shared, stream};
    return hipSuccess;
}
hipError_t __hipPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, hipStream_t* stream) {
    *grid = configuration.grid, *block = configuration.block;
    *shared = configuration.shared, *stream = configuration.stream;
    return hipSuccess;
}

hipError_t hipLaunchKernel(const void* function, dim3 g, dim3 b, void** arguments, size_t shared,
                           hipStream_t) {
    const auto found = functions().find(function);
    if (found == functions().end()) return hipErrorInvalidDeviceFunction;
    const auto& [code, name] = found->second;
    const unsigned grid[3] = {g.x, g.y, g.z}, block[3] = {b.x, b.y, b.z};
    return launch_callback(code, name.c_str(), grid, block, arguments, shared) ? hipErrorLaunchFailure
                                                                               : hipSuccess;
}
hipError_t hipOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads,
                                                        size_t shared) {
    const auto found = functions().find(function);
    if (found == functions().end()) return hipErrorInvalidDeviceFunction;
    *blocks = occupancy_callback(found->second.code, found->second.name.c_str(), threads, shared);
    return hipSuccess;
}
hipError_t hipFuncSetAttribute(const void*, hipFuncAttribute, int) {
    return hipSuccess;
}

// ---- memory ----

// Filled with 0xff (NaN) and ending at an inaccessible page: an access past it faults.
hipError_t hipMalloc(void** pointer, size_t bytes) {
    const size_t page = 4096, rounded = (bytes + 255) / 256 * 256;
    const size_t whole = (rounded + page - 1) / page * page + 2 * page;
    void* memory = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return hipErrorOutOfMemory;
    char* base = static_cast<char*>(memory);
    std::memset(base, 0xff, whole);
    mprotect(base, page, PROT_NONE), mprotect(base + whole - page, page, PROT_NONE);
    *pointer = base + whole - page - rounded;
    allocations()[*pointer] = {base, whole};
    return hipSuccess;
}
hipError_t hipFree(void* pointer) {
    const auto found = allocations().find(pointer);
    if (found == allocations().end()) return pointer ? hipErrorInvalidValue : hipSuccess;
    munmap(found->second.base, found->second.bytes);
    allocations().erase(found);
    return hipSuccess;
}
hipError_t hipHostMalloc(void** pointer, size_t bytes, unsigned) {
    *pointer = std::malloc(bytes ? bytes : 1);
    return hipSuccess;
}
hipError_t hipHostFree(void* pointer) {
    std::free(pointer);
    return hipSuccess;
}
hipError_t hipMemset(void* to, int value, size_t bytes) {
    std::memset(to, value, bytes);
    return hipSuccess;
}
hipError_t hipMemsetAsync(void* to, int value, size_t bytes, hipStream_t) {
    return hipMemset(to, value, bytes);
}
hipError_t hipMemcpy(void* to, const void* from, size_t bytes, hipMemcpyKind) {
    std::memcpy(to, from, bytes);
    return hipSuccess;
}
hipError_t hipMemcpyAsync(void* to, const void* from, size_t bytes, hipMemcpyKind kind, hipStream_t) {
    return hipMemcpy(to, from, bytes, kind);
}
hipError_t hipMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                            size_t height, hipMemcpyKind, hipStream_t) {
    for (size_t row = 0; row < height; row++)
        std::memcpy(static_cast<char*>(to) + row * to_pitch,
                    static_cast<const char*>(from) + row * from_pitch, width);
    return hipSuccess;
}
hipError_t hipMemGetInfo(size_t* free, size_t* total) {
    *free = size_t{8} << 30, *total = size_t{192} << 30;
    return hipSuccess;
}

// ---- device, streams, events ----

#define ALWAYS(error, name, ...)   \
    hipError_t name(__VA_ARGS__) { \
        return error;              \
    }
#define HANDLE(type)                                     \
    hipError_t type##Create(type##_t* handle) {          \
        *handle = static_cast<type##_t>(std::malloc(1)); \
        return hipSuccess;                               \
    }                                                    \
    hipError_t type##Destroy(type##_t handle) {          \
        std::free(handle);                               \
        return hipSuccess;                               \
    }

ALWAYS(hipSuccess, hipGetLastError)
const char* hipGetErrorString(hipError_t) {
    return "error of the emulated runtime";
}
hipError_t hipGetDeviceCount(int* count) {
    *count = 1;
    return hipSuccess;
}
ALWAYS(hipSuccess, hipSetDevice, int)
hipError_t hipGetDevice(int* device) {
    *device = 0;
    return hipSuccess;
}
hipError_t hipGetDeviceProperties(hipDeviceProp_t* p, int) {
    std::memset(p, 0, sizeof *p);
    std::strcpy(p->name, "gfx942 in an emulator");
    std::strcpy(p->gcnArchName, "gfx942:sramecc+:xnack-");
    p->warpSize = 64, p->multiProcessorCount = compute_units, p->sharedMemPerBlock = 65536;
    p->totalGlobalMem = size_t{192} << 30, p->l2CacheSize = 4 << 20, p->maxThreadsPerBlock = 1024;
    return hipSuccess;
}
hipError_t hipDeviceGetPCIBusId(char* text, int size, int) {
    std::snprintf(text, static_cast<size_t>(size), "0000:00:00.0");
    return hipSuccess;
}
ALWAYS(hipSuccess, hipDeviceSynchronize)
HANDLE(hipEvent)
ALWAYS(hipSuccess, hipEventRecord, hipEvent_t, hipStream_t)
ALWAYS(hipSuccess, hipEventSynchronize, hipEvent_t)
hipError_t hipEventElapsedTime(float* ms, hipEvent_t, hipEvent_t) {
    *ms = 1;
    return hipSuccess;
}
HANDLE(hipStream)
ALWAYS(hipSuccess, hipStreamSynchronize, hipStream_t)
ALWAYS(hipSuccess, hipStreamWaitEvent, hipStream_t, hipEvent_t, unsigned)

// ---- graphs: the program runs with --graphs off ----

ALWAYS(hipErrorNotSupported, hipStreamBeginCapture, hipStream_t, hipStreamCaptureMode)
ALWAYS(hipErrorNotSupported, hipStreamEndCapture, hipStream_t, hipGraph_t*)
ALWAYS(hipErrorNotSupported, hipStreamIsCapturing, hipStream_t, hipStreamCaptureStatus*)
ALWAYS(hipErrorNotSupported, hipGraphInstantiate, hipGraphExec_t*, hipGraph_t, hipGraphNode_t*, char*, size_t)
ALWAYS(hipErrorNotSupported, hipGraphLaunch, hipGraphExec_t, hipStream_t)
ALWAYS(hipSuccess, hipGraphExecDestroy, hipGraphExec_t)
ALWAYS(hipSuccess, hipGraphDestroy, hipGraph_t)

}  // extern "C"
