// tolerance DTYPE FACTOR < three lines of numbers: results, a baseline's, the truth. Prints what core/tolerance.h makes
// of them, for tests/ops/test_tolerance.py: two numbers each for error, floor and allowed, ulp of each result, 1 if within.
#include "core/tolerance.h"

#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>

using namespace llamac;

namespace {

std::vector<double> read_line() {
    std::string line, word;
    std::getline(std::cin, line);
    std::istringstream words(line);
    std::vector<double> values;
    while (words >> word) values.push_back(std::strtod(word.c_str(), nullptr));  // NaN and infinity, too
    return values;
}

void print(const Deviation& d) {
    std::printf("%.17g %.17g\n", d.relative_l2, d.largest);
}

}  // namespace

int main(int argc, char** argv) {
    CHECK(argc == 3);
    const DType dtype = float_dtype(argv[1]);
    const std::vector<double> found = read_line(), baseline = read_line(), truth = read_line();
    const Deviation error = error_of(found, truth);
    const Deviation allowed = allowed_of(error_of(baseline, truth), truth, dtype, std::stod(argv[2]));
    print(error);
    print(floor_of(truth, dtype));
    print(allowed);
    for (const double x : found) std::printf("%.17g ", ulp(x, dtype));
    std::printf("\n%d\n", within(error, allowed));
}
