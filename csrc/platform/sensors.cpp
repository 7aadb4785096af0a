#include "platform/sensors.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace llamac {
namespace {

namespace fs = std::filesystem;

std::string read_text(const fs::path& file) {
    std::ifstream stream(file);
    return {std::istreambuf_iterator<char>(stream), {}};
}

// The number that a file begins with, in this unit.
double read_number(const fs::path& file, double unit) {
    const std::string text = read_text(file);
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    return end == text.c_str() ? Sensors::not_known : value * unit;
}

// The number behind a key, as in "ue: 0\nce: 12".
double read_key(const fs::path& file, const std::string& key) {
    const std::string text = read_text(file);
    const size_t at = text.find(key);
    return at == text.npos ? Sensors::not_known : std::strtod(text.c_str() + at + key.size(), nullptr);
}

double first_known(double a, double b) {
    return a == a ? a : b;
}

}  // namespace

Sensors read_amdgpu_sensors(const std::string& folder) {
    Sensors s;
    std::error_code none;  // missing files: not known
    for (const auto& entry : fs::directory_iterator(fs::path(folder) / "hwmon", none)) {
        const fs::path at = entry.path();
        // Newer devices give the power now, older ones a mean over some milliseconds.
        s.watts =
            first_known(read_number(at / "power1_input", 1e-6), read_number(at / "power1_average", 1e-6));
        // temp1: the edge, which not every device has; temp2: the junction, the hottest place.
        s.celsius = first_known(read_number(at / "temp2_input", 1e-3), read_number(at / "temp1_input", 1e-3));
        s.clock_mhz = read_number(at / "freq1_input", 1e-6);
        s.memory_clock_mhz = read_number(at / "freq2_input", 1e-6);
    }
    const fs::path errors = fs::path(folder) / "ras" / "umc_err_count";  // of the memory's controllers
    s.ecc_corrected = read_key(errors, "ce:");
    s.ecc_uncorrected = read_key(errors, "ue:");
    return s;
}

}  // namespace llamac
