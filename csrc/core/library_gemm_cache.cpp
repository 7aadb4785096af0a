#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/file.h"
#include "core/json.h"
#include "core/library_gemm.h"

namespace llamac {

using nlohmann::json;
using nlohmann::ordered_json;

std::string take_first_ranks_choices(GemmAlgorithms& algorithms) {
    const std::string first = algorithms.gather(to_json(algorithms.given()).dump())[0];
    algorithms.forget();
    const std::string own =
        algorithms.use(parse_gemm_choices(json::parse(first), "rank 0's matrix products"));
    const std::vector<std::string> refusals = algorithms.gather(own);
    for (size_t rank = 0; rank < refusals.size(); rank++) {
        if (refusals[rank].empty()) continue;
        algorithms.forget();
        return "rank " + std::to_string(rank) + ": the matrix products' choices of rank 0 are " +
               refusals[rank] + "; tuning them again";
    }
    return "";
}

std::string take_common_choices(
    GemmAlgorithms& algorithms,
    const std::function<std::vector<std::string>(const std::string& own)>& gather) {
    GemmChoices common;
    const std::vector<std::string> all = gather(to_json(algorithms.choices()).dump());
    for (size_t rank = 0; rank < all.size(); rank++) {
        const GemmChoices own = parse_gemm_choices(json::parse(all[rank]), "a rank's matrix products");
        if (rank == 0) common = {own.device, own.library, {}};
        if (own.device != common.device || own.library != common.library)
            return "rank " + std::to_string(rank) + ": the matrix products' choices are of " + own.device +
                   " with " + own.library + ", rank 0's of " + common.device + " with " + common.library +
                   ": a resumed run has other bits";
        for (const auto& [name, choice] : own.choices) {
            const auto [place, is_new] = common.choices.try_emplace(name, choice);
            if (!is_new && choice.algorithm == own_kernel) place->second = choice;
        }
    }
    return algorithms.replace(common);
}

ordered_json to_json(const GemmChoices& from) {
    ordered_json choices = ordered_json::object();
    for (const auto& [name, c] : from.choices)
        choices[name] = {{"ms", c.ms}, {"tried", c.tried}, {"algorithm", c.algorithm}};
    return {{"device", from.device}, {"library", from.library}, {"choices", choices}};
}

GemmChoices parse_gemm_choices(const json& object, const std::string& where) {
    const auto malformed = [&] {
        fail(where, ": expected device, library and choices {product: {ms, tried, algorithm}}, found ",
             excerpt(object));
    };
    GemmChoices choices;
    try {
        object.at("device").get_to(choices.device);
        object.at("library").get_to(choices.library);
        for (const auto& [name, c] : object.at("choices").get_ref<const json::object_t&>()) {
            const json& tried = c.at("tried");  // get<int> would take any number, and overflow
            if (!tried.is_number_unsigned() || tried.get<uint64_t>() > INT32_MAX) malformed();
            choices.choices[name] = {c.at("algorithm"), c.at("ms"), tried.get<int>()};
        }
    } catch (const json::exception&) {
        malformed();
    }
    return choices;
}

GemmChoices read_gemm_cache(const std::string& path) {
    std::error_code unreadable;  // reading or writing reports it
    return std::filesystem::exists(path, unreadable) ? parse_gemm_choices(read_json(path), path)
                                                     : GemmChoices{};
}

void add_to_gemm_cache(const std::string& path, const GemmChoices& choices) {
    GemmChoices all;
    try {
        all = read_gemm_cache(path);
    } catch (const Error&) {  // of no use to anybody
    }
    if (all.device != choices.device || all.library != choices.library)
        all = {choices.device, choices.library, {}};
    const ordered_json before = to_json(all);
    for (const auto& [name, choice] : choices.choices)
        if (choice.tried) all.choices[name] = choice;  // the library may have refused the one that was kept
    if (to_json(all) == before) return;
    const std::filesystem::path folder = std::filesystem::path(path).parent_path();
    std::error_code failed;  // write_file says it
    if (!folder.empty()) std::filesystem::create_directories(folder, failed);
    write_file(path,
               to_json(all).dump(2) + "\n");  // another run may write, too: each to its own temporary file
}

}  // namespace llamac
