#include "checkpoint/checkpoint.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <exception>
#include <functional>
#include <numeric>

#include "core/file.h"
#include "core/json.h"

namespace llamac {

std::string step_name(int64_t step) {
    char name[40];
    std::snprintf(name, sizeof name, "step_%06lld", static_cast<long long>(step));
    return name;
}

namespace {

constexpr const char* removed_suffix = ".removed";

bool ends_with(const std::string& name, const std::string& end) {
    return name.size() > end.size() && name.compare(name.size() - end.size(), end.size(), end) == 0;
}

std::map<int64_t, std::string> checkpoints_among(const std::vector<std::string>& names) {
    std::map<int64_t, std::string> found;
    for (const std::string& name : names)
        if (const auto step = step_of(name)) found[*step] = name;
    return found;
}

void prune(const OpenFolder& out, int64_t keep) {
    auto found = checkpoints_among(out.names());
    for (; static_cast<int64_t>(found.size()) > keep; found.erase(found.begin())) {
        const std::string name = found.begin()->second, removed = "." + name + removed_suffix;
        rename_durably(out, name, out, removed);
        out.remove(removed);
    }
}

// An error of reading: whether it says that the file is not there, and not that the system failed.
bool is_missing(const SystemError& error) {
    return error.code == ENOENT || error.code == ENOTDIR || error.code == ELOOP;
}

// Calls check(), which finds damage if it throws something else than an error of the system.
template <class Check>
auto finding_damage(const Check& check) {
    try {
        return check();
    } catch (const SystemError& error) {
        if (!is_missing(error)) throw;
        throw DamagedCheckpoint(error.what());
    } catch (const Error& error) {
        throw DamagedCheckpoint(error.what());
    }
}

void check_file(const std::string& path, const FileRecord& record) {
    const int64_t bytes = InputFile(path).size;
    if (bytes != record.bytes) fail(path, ": expected ", record.bytes, " bytes, found ", bytes);
    const uint64_t xxh3 = hash_file(path);
    if (xxh3 != record.xxh3)
        fail(path, ": expected the XXH3 checksum ", hex(record.xxh3), ", found ", hex(xxh3));
}

}  // namespace

std::optional<int64_t> step_of(const std::string& name) {
    if (name.size() < 11 || name.size() > 23 || name.rfind("step_", 0) != 0) return {};
    if (!std::all_of(name.begin() + 5, name.end(), [](char c) { return c >= '0' && c <= '9'; })) return {};
    const int64_t step = std::stoll(name.substr(5));
    if (step_name(step) != name) return {};
    return step;
}

std::map<int64_t, std::string> checkpoints_in(const std::string& out) {
    return checkpoints_among(names_in(out));
}

void remove_leftovers(const OpenFolder& out, const std::vector<std::string>& of) {
    for (const std::string& name : out.names()) {
        const bool ours = std::any_of(
            of.begin(), of.end(), [&](const std::string& begin) { return name.rfind("." + begin, 0) == 0; });
        if (ours && (ends_with(name, FolderWriter::temporary_suffix) || ends_with(name, removed_suffix)))
            out.remove(name);
    }
}

CheckpointFile text_file(const std::string& name, const std::string& role, const std::string& text) {
    return {name, role, {}, [text](FileWriter& file) {
                file.write(text.data(), static_cast<int64_t>(text.size()));
            }};
}

std::string shard_name(const std::string& stem, const Ranks& ranks, int64_t rank) {
    if (ranks.count == 1) return stem + ".safetensors";
    char numbers[48];
    std::snprintf(numbers, sizeof numbers, "-%05" PRId64 "-of-%05" PRId64, rank + 1, ranks.count);
    return stem + numbers + ".safetensors";
}

void write_checkpoint_to(const OpenFolder& parent, const std::string& name, Manifest manifest,
                         const std::vector<CheckpointFile>& files, const std::function<void()>& progress,
                         const Ranks& ranks) {
    std::optional<FolderWriter> made;
    std::optional<OpenFolder> joined;
    ranks.together("checkpoint", [&] {
        if (ranks.is_first()) made.emplace(parent, name);
    });
    ranks.together("checkpoint", [&] {
        if (!ranks.is_first()) joined.emplace(parent, "." + name + FolderWriter::temporary_suffix);
    });
    const OpenFolder& folder = made ? made->folder() : *joined;
    ranks.together("checkpoint", [&] {
        std::exception_ptr error;
        for (const CheckpointFile& each : files) {
            bool begun = false;
            try {
                if (!error) {
                    FileWriter file(folder, each.name);
                    file.progress = progress;
                    begun = true;
                    each.write(file);
                    const uint64_t xxh3 = file.finish();
                    manifest.files.push_back({each.name, file.bytes(), xxh3, each.role, each.rank});
                }
            } catch (const LostRank&) {
                throw;
            } catch (...) {
                error = std::current_exception();
            }
            if (error && !begun && each.only_take_part) each.only_take_part();
        }
        if (error) std::rethrow_exception(error);
    });
    const std::vector<std::string> all_ranks = ranks.gather("files", records_text(manifest.files));
    ranks.together("checkpoint", [&] {
        if (!made) return;
        for (int64_t rank = 1; rank < ranks.count; rank++)
            for (const FileRecord& record : parse_records(all_ranks[rank])) manifest.files.push_back(record);
        write_file(folder, "manifest.json", manifest_text(manifest));
        made->finish();
    });
}

std::string write_checkpoint(const OpenFolder& out, int64_t keep, Manifest manifest,
                             const std::vector<CheckpointFile>& files, const std::function<void()>& progress,
                             const Ranks& ranks) {
    CHECK(keep >= 1);
    // Checkpoints only, as the run's other thread may be writing another file.
    ranks.together("checkpoint", [&] {
        if (ranks.is_first()) remove_leftovers(out, {"step_"});
    });
    const std::string name = step_name(manifest.step);
    write_checkpoint_to(out, name, std::move(manifest), files, progress, ranks);
    ranks.together("checkpoint", [&] {
        if (ranks.is_first()) prune(out, keep);
    });
    return out.path + "/" + name;
}

namespace {

Manifest read_manifest(const std::string& directory) {
    const std::string where = directory + "/manifest.json";
    const std::string text = finding_damage([&] {
        if (!is_folder(directory))
            fail(directory, ": expected a checkpoint's directory, found ",
                 exists(directory) ? "something else" : "nothing");
        if (!exists(where))
            fail(directory, ": expected a checkpoint, found a directory without manifest.json");
        return read_file(where, max_json);
    });
    // A manifest with the right checksum that cannot be parsed is of another version.
    const Manifest manifest = is_whole_manifest(text)
                                  ? parse_manifest(text, where)
                                  : finding_damage([&] { return parse_manifest(text, where); });
    finding_damage([&] {
        const auto named = step_of(name_of(directory));  // a copy under another name would hide newer ones
        if (named && *named != manifest.step)
            fail(where, ": step: expected ", *named, ", as its folder's name says, found ", manifest.step);
    });
    return manifest;
}

// The rank, of `ranks`, that checks each file: the largest first, each by the rank with the fewest bytes so far and, of several
// such, by the one that wrote it, whose host may still have it in memory.
std::vector<int64_t> readers_of(const std::vector<FileRecord>& files, int64_t ranks) {
    std::vector<size_t> order(files.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, std::greater(), [&](size_t i) { return files[i].bytes; });
    std::vector<int64_t> bytes(static_cast<size_t>(ranks)), readers(files.size());
    for (const size_t i : order) {
        const int64_t least = std::ranges::min(bytes), writer = files[i].rank.value_or(0);
        readers[i] = writer < ranks && bytes[writer] == least
                         ? writer
                         : std::ranges::find(bytes, least) - bytes.begin();
        bytes[readers[i]] += files[i].bytes;
    }
    return readers;
}

}  // namespace

Manifest open_checkpoint(const std::string& directory, const Ranks& ranks) {
    Manifest manifest;
    std::string damage;
    const auto check = [&](const auto& call) {
        ranks.together("checkpoint", [&] {
            try {
                call();
            } catch (const DamagedCheckpoint& error) {
                damage = error.what();
            }
        });
        return ranks.gather("damage", damage);
    };
    const std::vector<std::string> unread = check([&] { manifest = read_manifest(directory); });
    // A rank that finds damage where others do not may see another file system.
    for (size_t rank = 1; rank < unread.size(); rank++)
        if (unread[rank].empty() != unread[0].empty())
            ranks.together("checkpoint", [&] {
                fail("rank ", rank, " and rank 0 find different files: ", unread[rank], unread[0]);
            });
    if (!unread[0].empty()) throw DamagedCheckpoint(unread[0]);
    const std::vector<int64_t> readers = readers_of(manifest.files, ranks.count);
    for (const std::string& found : check([&] {
             for (size_t i = 0; i < manifest.files.size(); i++)
                 if (readers[i] == ranks.own)
                     finding_damage(
                         [&] { check_file(directory + "/" + manifest.files[i].name, manifest.files[i]); });
         }))
        if (!found.empty()) throw DamagedCheckpoint(found);
    return manifest;
}

}  // namespace llamac
