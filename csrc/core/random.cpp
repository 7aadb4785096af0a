#include "core/random.h"

#include <algorithm>

namespace llamac {

void fill_normal(void* out, DType dtype, int64_t count, float deviation, uint64_t seed, uint32_t stream,
                 int64_t first) {
    visit_dtype<is_float>(dtype, [&]<class T>() {
        T* const values = static_cast<T*>(out);
        const int64_t end = first + count;
#pragma omp parallel for
        for (int64_t block = first / 4; block < (end + 3) / 4; block++) {
            const Normals normals = random_normals(seed, 0, stream, block);
            for (int64_t i = std::max(first, 4 * block); i < std::min(end, 4 * block + 4); i++)
                values[i - first] = T(deviation * normals.values[i % 4]);
        }
    });
}

}  // namespace llamac
