// How an operation is called from torch, by its description (torch_ops.cpp shows one).
#pragma once
#include <c10/util/Logging.h>
#undef CHECK  // torch's logging has one, too

#include <string>
#include <vector>

#include "core/dispatch.h"
#include "core/registry.h"

namespace llamac {

// One of an operation's two forms. Indices are the description's.
struct Form {
    const Operation* op;
    bool out;                     // its results are arguments
    std::vector<size_t> leading;  // operands that come first among the arguments
    std::vector<size_t> sizes;    // then the dimensions that no tensor tells,
    std::vector<size_t> scalars;  // then these,
    std::vector<size_t> last;     // then the results to be written
    std::vector<size_t> results;  // operands that are returned
    size_t arguments;             // their number
    uint32_t fresh = 0;           // a bit for each operand that is returned

    Form(const Operation& op, bool out);
    std::string schema() const;
    std::string name() const { return op->name + (out ? ".out" : ""); }

  private:
    void find_sizes();
};

}  // namespace llamac
