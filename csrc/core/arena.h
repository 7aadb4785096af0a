// One allocation of device memory for everything a run needs: tensors are planned first, then get their
// memory at once.
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
    };
    std::vector<Row> rows;

    // tensor becomes `planned` (type and shape); it must stay where it is until allocate(), which sets its
    // data.
    void plan(const char* group, Tensor* tensor, const Tensor& planned);
    // Throws Error with the bytes wanted where the device has no room. The memory reads as NaN until
    // written: a value that nobody computed shows at once.
    void allocate();
    int64_t bytes() const;

  private:
    DeviceMemory memory;
};

}  // namespace llamac
