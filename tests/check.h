// What the check programs share: a check prints a line where it fails; the last line is "N passed, N failed".
#pragma once
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "core/error.h"

namespace llamac {

inline int passed = 0, failed = 0;
inline std::string folder;  // scratch, removed at the end

inline void check(bool good, const std::string& what) {
    good ? passed++ : failed++;
    if (!good) std::cout << "FAILED " << what << "\n";
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

inline std::string get(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

template <class T>
std::string bytes_of(const std::vector<T>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// Runs the checks in a scratch folder; returns main's exit status.
inline int run_checks(const std::vector<void (*)()>& checks) {
    std::string pattern = (std::filesystem::temp_directory_path() / "llamac_check_XXXXXX").string();
    if (!mkdtemp(pattern.data())) {
        std::perror(pattern.c_str());
        return 1;
    }
    folder = pattern;
    for (const auto run : checks) {
        try {
            run();
        } catch (const std::exception& e) {
            check(false, std::string("unexpected: ") + e.what());
        }
    }
    std::filesystem::remove_all(folder);
    std::cout << passed << " passed, " << failed << " failed\n";
    return failed > 0;
}

}  // namespace llamac
