// One allocation of device memory for all tensors of a run. Tensors are planned first, then all get their memory at
// once.
#pragma once
#include <string>
#include <vector>

#include "core/device_memory.h"
#include "core/tensor.h"

namespace llamac {

struct Arena {
    struct Row {  // one planned tensor; its group is what the memory table adds up
        std::string group;
        Tensor* tensor;
        int64_t bytes;  // as planned; the tensor may take a smaller shape later
    };
    std::vector<Row> rows;

    // tensor becomes `planned` (type and shape); it must stay where it is until allocate(), which sets its
    // data. Throws Error where all of them together are more than any device has.
    void plan(const char* group, Tensor* tensor, const Tensor& planned);
    // tensor becomes `planned` in memory that others, planned one after another from `first` on, use at other
    // times.
    void share(Tensor* tensor, const Tensor& planned, const Tensor* first);
    // Gives all tensors their addresses, the first one `base`: allocate does, and whoever only wants to know what a
    // run would need, with a base that nobody reads.
    void place(void* base);
    // Throws Error with the bytes wanted where the device has no room. The memory reads as NaN until
    // written: a value that nobody computed shows at once.
    void allocate();
    int64_t bytes() const { return total; }

  private:
    int64_t total = 0;
    struct Shared {
        Tensor* tensor;
        const Tensor* first;
    };
    std::vector<Shared> shared;
    DeviceMemory memory;
};

}  // namespace llamac
