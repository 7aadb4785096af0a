// "Did you mean": known names that are near one that is not known.
#pragma once
#include <string>
#include <vector>

namespace llamac {

// " (did you mean --steps?)": the name within two edits, else up to three names that contain the unknown one; "": none.
std::string suggestion(const std::string& name, const std::vector<std::string>& known,
                       const std::string& dashes = "");

}  // namespace llamac
