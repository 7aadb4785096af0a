// Lists of words in flags, and similar words for messages.
#pragma once
#include <string>
#include <vector>

namespace llamac {

// The words between commas, which may be empty; of "" none.
std::vector<std::string> split_list(const std::string& list);

// " (did you mean --steps?)": the name within two edits, else up to three names that contain the unknown one; "": none.
std::string suggestion(const std::string& name, const std::vector<std::string>& known,
                       const std::string& dashes = "");

}  // namespace llamac
