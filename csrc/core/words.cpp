#include "core/words.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <numeric>

namespace llamac {
namespace {

// Levenshtein's distance.
size_t distance(const std::string& a, const std::string& b) {
    std::vector<size_t> row(b.size() + 1);
    std::iota(row.begin(), row.end(), size_t{0});
    for (size_t i = 0; i < a.size(); i++) {
        size_t diagonal = row[0]++;
        for (size_t j = 0; j < b.size(); j++) {
            const size_t replaced = diagonal + (a[i] != b[j]);
            diagonal = row[j + 1];
            row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
        }
    }
    return row[b.size()];
}

}  // namespace

std::vector<std::string> split_list(const std::string& list) {
    std::vector<std::string> words;
    for (size_t begin = 0; begin < list.size() + !list.empty();) {
        const size_t end = std::min(list.find(',', begin), list.size());
        words.push_back(list.substr(begin, end - begin));
        begin = end + 1;
    }
    return words;
}

std::string alternatives(const std::vector<std::string>& words) {
    std::string list;
    for (size_t i = 0; i < words.size(); i++)
        list += (i == 0 ? "" : i + 1 < words.size() ? ", " : " or ") + words[i];
    return list;
}

std::string formatted(const char* pattern, ...) {
    char text[512];
    va_list values;
    va_start(values, pattern);
    std::vsnprintf(text, sizeof text, pattern, values);
    va_end(values);
    return text;
}

std::string suggestion(const std::string& name, const std::vector<std::string>& known,
                       const std::string& dashes) {
    std::vector<std::string> found;
    size_t least = 3;
    for (const std::string& other : known) {
        if (name.size() >= other.size() + least) continue;  // endless names would take endless time
        const size_t d = distance(name, other);
        if (d < least) found = {other}, least = d;
    }
    for (size_t i = 0; least == 3 && name.size() >= 3 && found.size() < 3 && i < known.size(); i++)
        if (known[i].find(name) != std::string::npos) found.push_back(known[i]);
    for (std::string& name_found : found) name_found = dashes + name_found;
    return found.empty() ? "" : " (did you mean " + alternatives(found) + "?)";
}

}  // namespace llamac
