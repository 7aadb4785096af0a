// The check programs of everything but kernels: one program, which has a link per source; its name chooses the checks.
#include "check.h"

int main(int argc, char** argv) {
    return llamac::run_checks(argc, argv);
}
