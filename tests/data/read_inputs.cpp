// read_inputs READER FILE...: the reader's verdict of each file, a line each: "accepted", or the message of the Error.
#include <cstdio>
#include <cstring>

#include "core/file.h"
#include "readers.h"

int main(int argc, char** argv) {
    for (const llamac::Reader& reader : llamac::readers()) {
        if (argc < 2 || std::strcmp(argv[1], reader.name) != 0) continue;
        for (int i = 2; i < argc; i++) {
            const std::string why = llamac::refusal(reader, llamac::read_file(argv[i]));
            std::puts(why.empty() ? "accepted" : why.c_str());
            std::fflush(stdout);
        }
        return 0;
    }
    std::fprintf(stderr, "usage: read_inputs READER FILE...\n");
    return 2;
}
