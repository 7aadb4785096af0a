#include "checkpoint/output.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/checkpoint.h"
#include "checkpoint/truncate_log.h"
#include "core/file.h"
#include "run/options.h"

namespace llamac {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr int attempts = 10, wait_us = 50000;

std::string now() {
    const std::time_t seconds = std::time(nullptr);
    std::tm utc{};
    gmtime_r(&seconds, &utc);
    char text[32];
    std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
    return text;
}

// A file system without locks: Lustre without -o flock, NFS without lockd.
bool has_no_locks(int reason) {
    return reason == ENOLCK || reason == ENOSYS || reason == EOPNOTSUPP;
}

// The first of NAME, NAME_2, NAME_3, ... that does not exist.
std::string free_name(const OpenFolder& folder, const std::string& name) {
    std::string found = name;
    for (int n = 2; folder.has(found); n++) found = name + "_" + std::to_string(n);
    return found;
}

// Moves an entry one folder down. A relative link would lead elsewhere from there: it gets a new text.
void move_into(const OpenFolder& deeper, const OpenFolder& folder, const std::string& name) {
    char target[PATH_MAX];
    const ssize_t length = readlinkat(folder.fd, name.c_str(), target, sizeof target);
    if (length <= 0 || target[0] == '/') return rename_durably(folder, name, deeper, name);
    const std::string text = "../" + std::string(target, static_cast<size_t>(length));
    if (symlinkat(text.c_str(), deeper.fd, name.c_str()) != 0)
        fail_with_errno(deeper.path + "/" + name, "write");
    folder.remove(name);
}

// Moves an earlier run's files into the first previous_N that does not exist yet; returns its path.
std::string set_aside(const OpenFolder& folder, const std::vector<std::string>& names) {
    int n = 1;
    while (folder.has("previous_" + std::to_string(n))) n++;
    const std::string previous = "previous_" + std::to_string(n);
    if (mkdirat(folder.fd, previous.c_str(), 0777) != 0)
        fail_with_errno(folder.path + "/" + previous, "write");
    const OpenFolder deeper(folder, previous);
    for (const std::string& name : names) move_into(deeper, folder, name);
    return deeper.path;
}

bool is_own(const std::string& name) {
    return name == "log.jsonl" || name == run_config_name || name == "loss.png" || name == "profile.json" ||
           name == "trace.json" || name.rfind("damaged_step_", 0) == 0;
}

}  // namespace

// flock, not fcntl's record lock: that ends when the process closes any descriptor of the file, and two trainers of one process
// would not see each other. On NFS, flock becomes a lock of the server, which frees it when the client's lease ends. Python has
// it by name, and scripts can wait for it: `flock --timeout 600 OUT/.lock true`. Children do not hold it: the descriptor is
// closed on exec, and the destructor unlocks explicitly.
FolderLock::FolderLock(const OpenFolder& in)
    : FolderLock(in, -1) {  // so that an error below runs the destructor
    // A few times: an owner that ends is waited for, and one that has just started has written who it is.
    for (int attempt = 1; !take(); attempt++) {
        const std::string owner = read_owner();
        close(std::exchange(fd, -1));
        if (attempt == attempts)
            fail(folder.path, ": expected a folder that no other run writes to, found ", owner,
                 "; wait for its end, or choose another folder (--out)");
        usleep(wait_us);
    }
    if (warning.empty()) write_owner();
}

FolderLock::~FolderLock() {
    if (fd < 0) return;
    flock(fd, LOCK_UN);
    close(fd);
}

// Opens the file and tries to lock it. The file is never removed: a run that had opened it before would lock a file that no
// other run finds.
bool FolderLock::take() {
    const std::string path = folder.path + "/" + name;
    fd = openat(folder.fd, name, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
    if (fd < 0) fail_with_errno(path, "write");
    struct stat status;
    if (fstat(fd, &status) != 0) fail_with_errno(path, "read");
    if (!S_ISREG(status.st_mode)) fail(path, ": expected a file, found something else");
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) return is_in_place();
    if (errno == EWOULDBLOCK || errno == EINTR) return false;
    const int reason = errno;
    if (!has_no_locks(reason)) fail_with_errno(path, "lock");
    warning = path + ": the file system has no locks (" + std::strerror(reason) +
              "): nothing keeps a second run out of " + folder.path;
    return true;
}

bool FolderLock::is_in_place() const {
    struct stat own, there;
    return fstat(fd, &own) == 0 && fstatat(folder.fd, name, &there, AT_SYMLINK_NOFOLLOW) == 0 &&
           own.st_dev == there.st_dev && own.st_ino == there.st_ino;
}

void FolderLock::check() const {
    if (is_in_place()) return;
    folder.check();  // a folder that is gone has no lock either
    fail(folder.path, "/", name, ": expected the lock of this run, found ",
         folder.has(name) ? "another file" : "none",
         ": a second run may have started; nothing more is written");
}

// For the message of the next run. Written over the old text and then cut, so that the file is never empty.
void FolderLock::write_owner() const {
    char host[256] = {};
    gethostname(host, sizeof host - 1);
    const ordered_json owner = {{"host", host}, {"pid", getpid()}, {"started", now()}};
    const std::string text = owner.dump(-1, ' ', true, json::error_handler_t::replace) + "\n";
    const auto bytes = static_cast<ssize_t>(text.size()),
               written = uninterrupted([&] { return pwrite(fd, text.data(), text.size(), 0); });
    if (written >= 0 && written < bytes) errno = ENOSPC;
    if (written < bytes || ftruncate(fd, bytes) != 0) fail_with_errno(folder.path + "/" + name, "write");
}

std::string FolderLock::read_owner() const {
    char text[1024];
    const ssize_t bytes = pread(fd, text, sizeof text, 0);
    const json owner =
        json::parse(std::string(text, static_cast<size_t>(std::max<ssize_t>(bytes, 0))), nullptr, false);
    if (!owner.is_object()) return "a process that does not say which";
    const auto field = [&](const char* key) {
        const json value = owner.value(key, json());
        return value.is_string() ? value.get<std::string>() : value.dump();
    };
    return "process " + field("pid") + " on " + field("host") + ", started " + field("started");
}

std::unique_ptr<FolderLock> lock_for_save(const OpenFolder& parent, const std::string& name) {
    if (!step_of(name) && !parent.has(FolderLock::name)) return nullptr;
    return std::make_unique<FolderLock>(parent);
}

OutputFolder::OutputFolder(const std::string& out, bool is_owner) : path(out) {
    if (is_owner && exists(path)) open();
}

void OutputFolder::open() {
    opened.emplace(path);
    lock.emplace(*opened);
}

void OutputFolder::join(const std::string& logged) {
    opened.emplace(path);
    for (const json& event : json::parse(logged)) events.insert(event.get<std::string>());
}

std::string OutputFolder::logged_text() const {
    return json(events).dump();
}

void OutputFolder::check() const {
    opened->check();
    if (lock) lock->check();
}

const OpenFolder& OutputFolder::folder() const {
    check();
    return *opened;
}

std::vector<std::string> OutputFolder::prepare(const std::string& checkpoint, int64_t step,
                                               const std::vector<std::string>& damaged) {
    if (!opened) {
        create_folder(path);
        open();
        // The search for a checkpoint found no folder.
        for (const std::string& name : opened->names())
            if (step_of(name) || is_own(name))
                fail(path, ": expected no folder, as when this run started, found ", name,
                     " of another run, which has begun since; start again");
    }
    const OpenFolder& out = folder();
    std::vector<std::string> lines;
    if (!lock->warning.empty()) lines.push_back(lock->warning);
    remove_leftovers(out);
    for (const std::string& name : damaged) {
        const std::string other = free_name(out, "damaged_" + name);
        rename_durably(out, name, out, other);
        lines.push_back("the damaged checkpoint is now " + path + "/" + other);
    }
    // By its name, or by where it lies: either may be a link.
    const bool goes_on = !checkpoint.empty() &&
                         (same_file(parent_of(checkpoint), path) || same_file(checkpoint + "/..", path));
    std::vector<std::string> aside;
    for (const std::string& name : out.names()) {
        const auto its_step = step_of(name);
        if (goes_on ? its_step && *its_step > step : its_step || is_own(name)) aside.push_back(name);
    }
    if (!aside.empty())
        lines.push_back(
            (goes_on ? "newer checkpoints are now in " : "an earlier run's log and checkpoints are now in ") +
            set_aside(out, aside));
    if (goes_on) events = truncate_log(path + "/log.jsonl", step);
    return lines;
}

}  // namespace llamac
