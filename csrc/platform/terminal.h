// The width of a terminal, and text in lines of it.
#pragma once
#include <cstdio>
#include <optional>
#include <string>

namespace llamac {

constexpr size_t default_columns = 110;  // of text for a file or a pipe

// COLUMNS, as Python reads it, or the columns of the terminal that the stream writes to; none: it writes to no terminal.
std::optional<size_t> terminal_columns(std::FILE* stream);

// Columns that UTF-8 text takes: its bytes that do not continue a character.
size_t columns(const std::string& text);
std::string padded(const std::string& text, size_t to);

// The line, of which `column` columns lie before the text, broken at blanks into lines of at most `width` columns; those
// after the first begin with `indent` blanks. A longer word has a line of its own.
std::string wrapped(const std::string& line, size_t width, size_t indent, size_t column = 0);

}  // namespace llamac
