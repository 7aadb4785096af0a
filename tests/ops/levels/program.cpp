// Prints the level, how many operations there are, what the first computes, and what the program itself computes.
#include <cstdio>

#include "operation.h"
#include "platform/cpu_level.h"
#include "platform/error.h"

std::vector<Operation*> Operation::registered;

int main() {
    try {
        std::vector<float> x(10, 1.0f), y(10, 3.0f);
        add_to_all(x, 1.0f);
        const char* level = llamac::cpu_level();
        llamac::start_cpu_level();
        std::printf("%s %zu %g %g\n", level, Operation::registered.size(),
                    Operation::registered.at(0)->compute(), sum_of_products(x, y));
    } catch (const llamac::Error& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 2;
    }
}
