// The registry for device.py: its device variants, and a call of one variant on device operands.
#include <cstdio>
#include <string>
#include <vector>

#include "core/dispatch.h"
#include "core/registry.h"

using namespace llamac;

// A line for each device variant: operation, name, 1 if it is deterministic else 0, threads per block.
extern "C" void describe_operations(char* out, size_t size) {
    std::string text;
    for (const Operation* op : operations())
        for (const Variant& v : op->variants) {
            if (v.backend != Backend::device) continue;
            text += op->name + " " + v.name + (v.deterministic ? " 1" : " 0");
            for (const int threads : v.threads) text += " " + std::to_string(threads);
            text += "\n";
        }
    CHECK(text.size() < size);
    std::snprintf(out, size, "%s", text.c_str());
}

// shape, stride: four numbers for each operand. Returns 0, or 1 with the message in error[1000].
extern "C" int call_operation(const char* name, const char* variant, int operands, void** data,
                              const int* dtype, const int* rank, const int64_t* shape, const int64_t* stride,
                              int scalars, const double* real, const int64_t* integer, int threads,
                              char* error) {
    try {
        std::vector<Tensor> tensors(static_cast<size_t>(operands));
        for (int i = 0; i < operands; i++) {
            Tensor& t = tensors[static_cast<size_t>(i)];
            t.data = data[i], t.dtype = static_cast<DType>(dtype[i]), t.rank = rank[i];
            for (int d = 0; d < 4; d++) t.shape[d] = shape[4 * i + d], t.stride[d] = stride[4 * i + d];
        }
        std::vector<Scalar> values;
        for (int i = 0; i < scalars; i++) {
            Scalar value(real[i]);
            value.integer = integer[i];
            values.push_back(value);
        }
        Context context;
        context.backend = Backend::device;
        run(find_operation(name), tensors, values, context, variant, threads);
        return 0;
    } catch (const std::exception& e) {
        std::snprintf(error, 1000, "%s", e.what());
        return 1;
    }
}
