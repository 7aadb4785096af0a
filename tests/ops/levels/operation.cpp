#include "operation.h"

namespace {

float compute() {
    std::vector<float> x(100, 0.5f), y(100, 2.0f);
    add_to_all(x, 0.5f);
    return sum_of_products(x, y);
}

const Operation operation(compute);

}  // namespace
