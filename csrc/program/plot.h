// The loss plot at the end of a run, drawn by the Python package if it is installed.
#pragma once
#include <string>

namespace llamac {

// Runs `python -m llamac plot OUT` with the Python that the environment variable LLAMAC_PYTHON names, else that
// of the checkout in whose build/ the program lies, else python3 beside the program, else python3 on PATH.
// Returns a text for the final line: the path of the plot, or the reason why there is none.
std::string draw_loss_plot(const std::string& out);

}  // namespace llamac
