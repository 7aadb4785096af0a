// The loss plot at the end of a run, drawn by the Python package where there is one.
#pragma once
#include <string>

namespace llamac {

// Runs `python -m llamac.plot OUT`. Returns what the final line says of it: where it lies, or why there is
// none.
std::string draw_loss_plot(const std::string& out);

}  // namespace llamac
