// Shared by the check programs. TEST(name) { ... } defines a check, TEST_OF_RANKS(name) one of several ranks; a failed one prints a
// line, and the last line is "N passed, N failed".
#pragma once
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "platform/error.h"
#include "platform/ranks/launch.h"
#include "platform/threads.h"

namespace llamac {

inline int passed = 0, failed = 0;
inline std::string folder;  // scratch, removed at the end

inline void check(bool good, const std::string& what = "", const char* file = __builtin_FILE(),
                  int line = __builtin_LINE()) {
    good ? passed++ : failed++;
    if (!good)
        std::cout << "FAILED " << std::filesystem::path(file).filename().string() << ":" << line << ": "
                  << what << "\n";
}

// The one-line message of the Error that f throws; empty where it throws none.
inline std::string error_of(const std::function<void()>& f) {
    try {
        f();
    } catch (const Error& e) {
        return e.what();
    }
    return "";
}

// Runs f in a child process; returns its exit status: 0, or 2 for an Error; -1 if a signal ended it.
inline int exit_code_of(const std::function<void()>& f) {
    std::cout.flush();
    const pid_t child = fork();
    if (child == 0) _exit(error_of(f).empty() ? 0 : 2);
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// The message of the Error that f throws where files may have so many bytes, as on a disk that is full.
inline std::string error_with_file_limit(uint64_t bytes, const std::function<void()>& f) {
    std::signal(SIGXFSZ, SIG_IGN);
    rlimit before;
    getrlimit(RLIMIT_FSIZE, &before);
    const rlimit small{bytes, before.rlim_max};
    setrlimit(RLIMIT_FSIZE, &small);
    const std::string message = error_of(f);
    setrlimit(RLIMIT_FSIZE, &before);
    return message;
}

// f must throw an Error of one line, in ASCII, that has each of the words.
inline void refused(const std::string& what, const std::vector<std::string>& words,
                    const std::function<void()>& f) {
    const std::string message = error_of(f);
    bool good = !message.empty() && message.size() < 600;
    for (unsigned char c : message) good &= c >= 32 && c < 127;
    for (const std::string& word : words) good &= message.find(word) != std::string::npos;
    check(good, what + ": " + (message.empty() ? "accepted" : message));
}

inline std::string in_folder(const std::string& name) {
    return folder + "/" + name;
}

// Without the syncs of write_file, and as a new file: ext4 flushes one that is truncated and written again.
inline std::string put(const std::string& name, const std::string& bytes) {
    const std::string path = in_folder(name);
    std::filesystem::remove(path);
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
    return path;
}

// As put(), at a path.
inline void overwrite(const std::string& path, const std::string& bytes) {
    put(std::filesystem::relative(path, folder), bytes);
}

inline std::string fresh_folder(const std::string& name) {
    const std::string path = in_folder(name);
    std::filesystem::create_directories(path);
    return path;
}

inline std::string get(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

template <class T>
std::string bytes_of(const std::vector<T>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

struct Check {
    std::string program;  // that has it: the source's name
    std::string name;
    void (*run)();
    bool of_ranks;
};
inline std::vector<Check>& all_checks() {
    static std::vector<Check> all;
    return all;
}
struct Registration {
    Registration(const char* file, const char* name, void (*run)(), bool of_ranks) {
        all_checks().push_back({std::filesystem::path(file).stem(), name, run, of_ranks});
    }
};
#define LLAMAC_CHECK(name, of_ranks)                                                          \
    static void name();                                                                       \
    static const ::llamac::Registration registration_##name(__FILE__, #name, name, of_ranks); \
    static void name()
#define TEST(name) LLAMAC_CHECK(name, false)
#define TEST_OF_RANKS(name) LLAMAC_CHECK(name, true)

// Those of the program that was called, by its name. One that has checks of ranks checks these alone among several ranks, and
// all others in one process.
inline std::vector<Check> checks_of(const std::string& program) {
    std::vector<Check> checks = all_checks();
    std::erase_if(checks, [&](const Check& c) { return c.program != program; });
    if (std::any_of(checks.begin(), checks.end(), [](const Check& c) { return c.of_ranks; })) {
        std::signal(SIGPIPE, SIG_IGN);  // as the program: a message to a rank that has ended is an error
        const bool several = find_launch().size > 1;
        std::erase_if(checks, [&](const Check& c) { return c.of_ranks != several; });
    }
    return checks;
}

// Runs the checks in the order of the source, in a scratch folder, once per round; returns main's exit status. Arguments:
// --list prints the names; else parts of the names of those to run. A part that no name contains ends the program.
inline int run_checks(int argc, char** argv, const std::vector<std::function<void()>>& rounds = {[] {}}) {
    limit_spinning(argv);
    const std::string program = std::filesystem::path(*argv).filename();
    const std::vector<Check> checks = checks_of(program);
    if (checks.empty()) {
        std::cerr << program << ": no source of this name has checks; those of `checks` run by their links\n";
        return 2;
    }
    const std::vector<std::string> words(argv + 1, argv + argc);
    const auto is_chosen = [&](const Check& c, const std::string& word) {
        return c.name.find(word) != c.name.npos;
    };
    std::vector<Check> chosen;
    for (const Check& c : checks) {
        if (words == std::vector<std::string>{"--list"}) std::cout << c.name << "\n";
        if (words.empty() ||
            std::any_of(words.begin(), words.end(), [&](const auto& word) { return is_chosen(c, word); }))
            chosen.push_back(c);
    }
    if (words == std::vector<std::string>{"--list"}) return 0;
    for (const std::string& word : words)
        if (std::none_of(chosen.begin(), chosen.end(), [&](const Check& c) { return is_chosen(c, word); })) {
            std::cerr << "expected a part of a check's name, found " << word << "; --list shows the names\n";
            return 2;
        }
    std::string pattern = (std::filesystem::temp_directory_path() / "llamac_check_XXXXXX").string();
    if (!mkdtemp(pattern.data())) {
        std::perror(pattern.c_str());
        return 1;
    }
    folder = pattern;
    for (const auto& begin_round : rounds) {
        begin_round();
        for (const Check& c : chosen) {
            try {
                c.run();
            } catch (const std::exception& e) {
                check(false, c.name + ": unexpected: " + e.what());
            }
        }
    }
    std::filesystem::remove_all(folder);
    std::cout << passed << " passed, " << failed << " failed\n";
    return failed > 0;
}

}  // namespace llamac
