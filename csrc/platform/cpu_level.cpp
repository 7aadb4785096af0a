#include "platform/cpu_level.h"

#include <cstdlib>
#include <string>
#include <string_view>

#include "platform/error.h"

#ifdef LLAMAC_CPU_LEVELS
using Constructor = void (*)();
// A level's constructors of static objects (level.ld). They contain the level's instructions, so the loader must not run them.
extern "C" {
extern const Constructor llamac_baseline_begin[], llamac_baseline_end[];
extern const Constructor llamac_v3_begin[], llamac_v3_end[];
extern const Constructor llamac_v4_begin[], llamac_v4_end[];
}
#endif

namespace llamac {
namespace {

constexpr const char* level_variable = "LLAMAC_CPU_LEVEL";
// Null where the variable is not set, or empty.
const char* wanted_level() {
    const char* level = std::getenv(level_variable);
    return level && *level ? level : nullptr;
}

#ifdef LLAMAC_CPU_LEVELS
// The features of -march=x86-64-v3 and -v4 that do not imply each other, including the system's support for the registers. By
// name: g++ 11 does not know the levels.
bool has_v3() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("lzcnt") &&
           __builtin_cpu_supports("movbe") && __builtin_cpu_supports("popcnt");
}
bool has_v4() {
    return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}

struct Level {
    const char* name;
    bool (*is_supported)();
    const Constructor *begin, *end;
};
// The best last.
constexpr Level levels[] = {
    {"baseline", [] { return true; }, llamac_baseline_begin, llamac_baseline_end},
    {"v3", has_v3, llamac_v3_begin, llamac_v3_end},
    {"v4", has_v4, llamac_v4_begin, llamac_v4_end},
};

const Level& choose() {
    const Level *best = nullptr, *chosen = nullptr;
    const char* wanted = wanted_level();
    std::string known;
    for (const Level& level : levels) {
        if (level.is_supported()) best = &level;
        if (wanted && std::string_view(wanted) == level.name) chosen = &level;
        known += std::string(known.empty() ? "" : ", ") + level.name;
    }
    if (!wanted) return *best;
    if (!chosen) fail(level_variable, ": expected one of ", known, ", found ", wanted);
    if (chosen > best) fail(level_variable, ": this processor has at most ", best->name, ", found ", wanted);
    return *chosen;
}

const Level& current() {
    static const Level& level = choose();
    return level;
}
#endif

}  // namespace

#ifdef LLAMAC_CPU_LEVELS
const char* cpu_level() {
    return current().name;
}

void start_cpu_level() {
    const Level& level = current();
    for (const Constructor* construct = level.begin; construct < level.end; construct++) (*construct)();
}
#else
const char* cpu_level() {
    if (const char* wanted = wanted_level())
        fail(level_variable, ": this program is for one instruction set only, found ", wanted);
    return "";
}

void start_cpu_level() {
    cpu_level();
}
#endif

}  // namespace llamac
