// Check programs that test_communicator.py starts once per rank; without a launcher they check what one process can.
#pragma once
#include <csignal>

#include "check.h"
#include "platform/ranks/transport.h"

namespace llamac {

// Among several ranks: the check of this name alone; in one process: all others.
inline int run_checks_of_ranks(int argc, char** argv, const std::string& of_ranks) {
    std::signal(SIGPIPE, SIG_IGN);  // as the program: a message to a rank that has ended is an error
    const bool several = find_launch().size > 1;
    std::erase_if(all_checks(), [&](const Check& c) { return (c.name == of_ranks) != several; });
    return run_checks(argc, argv);
}

}  // namespace llamac
