#include "platform/terminal.h"

#include <sys/ioctl.h>

#include <algorithm>
#include <cstdlib>

namespace llamac {

std::optional<size_t> terminal_columns(std::FILE* stream) {
    constexpr long least = 40;  // less is no room for a table
    const char* text = std::getenv("COLUMNS");
    if (const long given = text ? std::strtol(text, nullptr, 10) : 0; given > 0)
        return static_cast<size_t>(std::max(given, least));
    winsize size{};
    if (ioctl(fileno(stream), TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return {};
    return static_cast<size_t>(std::max<long>(size.ws_col, least));
}

size_t columns(const std::string& text) {
    return static_cast<size_t>(
        std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

std::string padded(const std::string& text, size_t to) {
    return text + std::string(to > columns(text) ? to - columns(text) : 0, ' ');
}

std::string wrapped(const std::string& line, size_t width, size_t indent, size_t column) {
    std::string text;
    for (size_t begin = 0; begin < line.size();) {
        const size_t word = std::min(line.find_first_not_of(' ', begin), line.size());
        const size_t end = std::min(line.find(' ', word), line.size());
        const size_t length = columns(line.substr(word, end - word));
        const bool is_first = text.find_last_not_of(' ') == text.npos;
        if (!is_first && column + (word - begin) + length > width) {
            text += "\n" + std::string(indent, ' ');
            column = indent;
        } else {
            text.append(line, begin, word - begin);
            column += word - begin;
        }
        text.append(line, word, end - word);
        column += length;
        begin = end;
    }
    return text;
}

}  // namespace llamac
