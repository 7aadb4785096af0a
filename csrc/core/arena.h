// One allocation of device memory for all tensors of a run, which are planned before.
#pragma once
#include <string>
#include <vector>

#include "core/device_memory.h"
#include "core/tensor.h"

namespace llamac {

struct Arena {
    struct Row {  // a planned tensor; the memory table adds up groups
        std::string group;
        Tensor* tensor;
        int64_t bytes;  // as planned; the tensor may take a smaller shape later
    };
    std::vector<Row> rows;

    // Sets type and shape of the tensor, which must not move until allocate() sets its data. Throws Error if the sum of all
    // tensors is more than any device has.
    void plan(const char* group, Tensor* tensor, const Tensor& planned);
    // The same in the memory of tensors planned one after another from `first` on, which are used at other times.
    void share(Tensor* tensor, const Tensor& planned, const Tensor* first);
    // Sets the addresses of all tensors from `base` on. A dry run passes a dummy base.
    void place(void* base);
    // Throws Error with the number of bytes if the device has no room. The memory is filled with NaN, so that values that were
    // not computed become visible.
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
