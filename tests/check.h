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

#include "platform/error.h"

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
    std::string name;  // "": runs always
    void (*run)();
};

// The compiler's spelling of an instantiation, which ends with the function's name: "... = {anonymous}::check_log]".
template <void (*run)()>
const char* spelling() {
    return __PRETTY_FUNCTION__;
}
inline std::string last_name(const std::string& text) {
    const char* const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_";
    const size_t last = text.find_last_of(letters), before = text.find_last_not_of(letters, last);
    return text.substr(before + 1, last - before);
}
// checks<check_log, check_truncate_log>(): with their names.
template <void (*... run)()>
std::vector<Check> checks() {
    return {{last_name(spelling<run>()), run}...};
}

// The checks whose names contain one of the words; none: all. A word that no name contains ends the program.
inline std::vector<Check> chosen_checks(const std::vector<Check>& all,
                                        const std::vector<std::string>& words) {
    const auto contains = [](const Check& c, const std::string& word) {
        return c.name.find(word) != c.name.npos;
    };
    for (const std::string& word : words)
        if (std::none_of(all.begin(), all.end(), [&](const Check& c) { return contains(c, word); })) {
            std::cerr << "expected a part of a check's name, found " << word << "; --list shows the names\n";
            std::exit(2);
        }
    std::vector<Check> chosen;
    for (const Check& c : all)
        if (c.name.empty() || words.empty() ||
            std::any_of(words.begin(), words.end(),
                        [&](const std::string& word) { return contains(c, word); }))
            chosen.push_back(c);
    return chosen;
}

// Runs the checks in a scratch folder; returns main's exit status. Arguments: --list prints the names; else parts of the
// names of those to run.
inline int run_checks(int argc, char** argv, const std::vector<Check>& all) {
    const std::vector<std::string> words(argv + 1, argv + argc);
    if (words == std::vector<std::string>{"--list"}) {
        std::vector<std::string> listed;
        for (const Check& c : all)
            if (!c.name.empty() && std::find(listed.begin(), listed.end(), c.name) == listed.end()) {
                std::cout << c.name << "\n";
                listed.push_back(c.name);
            }
        return 0;
    }
    const std::vector<Check> chosen = chosen_checks(all, words);
    std::string pattern = (std::filesystem::temp_directory_path() / "llamac_check_XXXXXX").string();
    if (!mkdtemp(pattern.data())) {
        std::perror(pattern.c_str());
        return 1;
    }
    folder = pattern;
    for (const Check& c : chosen) {
        try {
            c.run();
        } catch (const std::exception& e) {
            check(false, c.name + ": unexpected: " + e.what());
        }
    }
    std::filesystem::remove_all(folder);
    std::cout << passed << " passed, " << failed << " failed\n";
    return failed > 0;
}

}  // namespace llamac
