#include "checkpoint/truncate_log.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

#include "core/file.h"
#include "core/folder.h"

namespace llamac {

static constexpr int64_t max_log = int64_t{1} << 34;  // bytes: 50 million steps

std::set<std::string> truncate_log(const std::string& path, int64_t step) {
    if (!exists(path)) return {};
    const std::string log = read_file(path, max_log);
    std::string kept;
    std::set<std::string> last;
    for (std::string_view text = log; !text.empty();) {
        const std::string_view line = text.substr(0, text.find('\n'));
        text.remove_prefix(std::min(line.size() + 1, text.size()));
        // Not ordered_json, which takes quadratic time for an object of many keys.
        const nlohmann::json event = nlohmann::json::parse(line, nullptr, false);
        if (!event.is_object() || line.find('\0') != line.npos) continue;
        const auto found = event.find("step");
        // Steps only grow in a log: what follows the first one past `step` belongs to the part that is
        // redone. The event of a checkpoint that was written meanwhile, which comes late, is dropped with it.
        if (found != event.end() && found->is_number() && found->get<double>() > static_cast<double>(step))
            break;
        kept.append(line) += '\n';
        const auto name = event.find("event");
        if (found != event.end() && *found == step && name != event.end() && name->is_string())
            last.insert(name->get<std::string>());
    }
    write_file(path, kept);
    return last;
}

}  // namespace llamac
