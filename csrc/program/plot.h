// The loss plot at the end of a run, drawn by the Python package if it is installed.
#pragma once
#include <string>

namespace llamac {

// Runs `python -m llamac plot OUT` with the Python of the environment variable LLAMAC_PYTHON, else of the checkout in whose build/
// the program lies, else beside the program, else on PATH. Returns the path of the plot, or why there is none, for the final line.
std::string draw_loss_plot(const std::string& out);

}  // namespace llamac
