// The output folder: one owner at a time, whatever ends it; a folder that was moved or replaced is not written to; links
// are not followed; what is set aside is kept; the newest complete checkpoint is resumed, and no other error is taken
// for damage.
#include "check.h"

#include <sys/stat.h>

#include "checkpoint/checkpoint.h"
#include "checkpoint/output.h"
#include "checkpoint/resume.h"
#include "core/file.h"
#include "core/folder.h"

using namespace llamac;
namespace fs = std::filesystem;

namespace output_checks {
namespace {

using Names = std::vector<std::string>;

// A checkpoint of three short files; the weights' text is that of the step.
std::string save(const std::string& out, int64_t step, int64_t keep = 100) {
    const std::string weights = "weights " + std::to_string(step);
    return write_checkpoint(
        OpenFolder(out), keep, describe_run(Options(), 1, step),
        {text_file("config.json", "config", "{}"), text_file("model.safetensors", "weights", weights),
         text_file("optimizer.safetensors", "optimizer", "")});
}

// A process that runs f, says so, and sleeps.
struct Child {
    pid_t process = 0;
    explicit Child(const std::function<void()>& f) {
        int done[2];
        check(pipe(done) == 0, "a pipe");
        process = fork();
        if (process == 0) {
            f();
            check(write(done[1], "x", 1) == 1, "told");
            for (;;) pause();
        }
        char byte;
        check(read(done[0], &byte, 1) == 1, "the other process");
        close(done[0]);
        close(done[1]);
    }
    void end() {
        kill(process, SIGKILL);
        waitpid(process, nullptr, 0);
    }
};

std::string lock_error(const OpenFolder& out) {
    return error_of([&] { const FolderLock lock(out); });
}

TEST(check_lock) {
    const OpenFolder out(fresh_folder("lock"));
    char host[256] = {};
    gethostname(host, sizeof host - 1);
    const auto names_owner = [&](const std::string& message, pid_t process) {
        return message.find(out.path + ": expected a folder that no other run writes to, found process " +
                            std::to_string(process) + " on " + host + ", started 20") == 0;
    };
    FolderLock* held = nullptr;  // of the other process: not destroyed
    Child owner([&] { held = new FolderLock(out); });
    check(names_owner(lock_error(out), owner.process), "another process: " + lock_error(out));
    owner.end();
    check(lock_error(out).empty(), "a killed process holds no lock");
    check(out.names() == Names{".lock"}, "the file of the lock stays");
    {
        const FolderLock lock(out);
        lock.check();
        check(names_owner(lock_error(out), getpid()), "the same process");
        check(truncate((out.path + "/.lock").c_str(), 1) == 0, "a text that says nothing");
        check(lock_error(out).find("found a process that does not say which") != std::string::npos,
              lock_error(out));
    }
    std::optional<FolderLock> lock(std::in_place, out);
    Child inherits([] {});
    lock.reset();
    check(lock_error(out).empty(), "a child that was forked meanwhile does not keep the lock");
    inherits.end();
}

// What stands at the lock's name is not followed, opened for good or believed.
TEST(check_bad_locks) {
    const OpenFolder out(fresh_folder("bad_lock"));
    const std::string lock = out.path + "/.lock", victim = put("victim", "mine");
    fs::create_symlink(victim, lock);
    refused("a link", {lock, "cannot write"}, [&] { const FolderLock taken(out); });
    check(get(victim) == "mine", "what the link leads to");
    fs::remove(lock);
    check(mkfifo(lock.c_str(), 0666) == 0, "a pipe");
    refused("a pipe", {lock, "expected a file"}, [&] { const FolderLock taken(out); });
    fs::remove(lock);
    const FolderLock taken(out);
    fs::remove(lock);
    refused("removed", {lock, "found none"}, [&] { taken.check(); });
    check(lock_error(out).empty(), "another run starts");
    refused("and then there is another file", {lock, "found another file"}, [&] { taken.check(); });
}

// A folder that is moved, removed or replaced while it is written to: an error, and nothing in the wrong place.
TEST(check_replaced_folder) {
    for (const char* const how : {"moved", "removed", "replaced"}) {
        const std::string path = fresh_folder(std::string("folder_") + how), old = path + ".old";
        const OpenFolder out(path);
        FileWriter file(out, "file");
        file.write("x", 1);
        FolderWriter folder(out, "step_000001");
        write_file(folder.folder(), "a", "x");
        fs::rename(path, old);
        if (how == std::string("removed")) fs::remove_all(old);
        if (how == std::string("replaced")) {
            fs::create_directories(path);
            fs::create_directories(path + "/.step_000001.tmp");
        }
        const std::string found = how == std::string("replaced") ? "found another one" : "found none";
        const auto is_refused = [&](const char* what, const std::function<void()>& f) {
            refused(std::string(how) + ": " + what, {path, found}, f);
        };
        is_refused("check", [&] { out.check(); });
        is_refused("a file that was begun", [&] { file.finish(); });
        is_refused("a file", [&] { write_file(out, "b", "x"); });
        is_refused("a file of a folder that was begun", [&] { write_file(folder.folder(), "b", "x"); });
        is_refused("a folder that was begun", [&] { folder.finish(); });
        is_refused("a folder", [&] { FolderWriter(out, "step_000002").finish(); });
        if (fs::exists(path))
            check(names_in(path) == Names{".step_000001.tmp"} && names_in(path + "/.step_000001.tmp").empty(),
                  std::string(how) + ": nothing is written into the other folder");
        // As where the folder goes between a check and what follows it.
        if (how != std::string("removed")) continue;
        is_refused("opening", [&] { OpenFolder(out, "step_000001"); });
        is_refused("renaming", [&] { rename_durably(out, "a", out, "b"); });
        is_refused("an entry", [&] { out.fail_on("a", "write"); });
    }
}

// A folder whose path cannot be looked at: the system's reason, once.
TEST(check_unreadable_folder) {
    const std::string path = fresh_folder("unreadable");
    const OpenFolder out(path);
    fs::rename(path, path + ".old");
    fs::create_symlink(path, path);
    refused("a folder that is a link to itself", {path, "cannot read", "symbolic links"},
            [&] { out.check(); });
}

// Links at every name that something is first written to.
TEST(check_links) {
    const std::string out = fresh_folder("links"), victim = fresh_folder("links_victim");
    overwrite(victim + "/file", "mine");
    const auto is_kept = [&](const std::string& what) {
        check(names_in(victim) == Names{"file"} && get(victim + "/file") == "mine", what + " was followed");
    };
    for (const char* const name : {"text.tmp", ".text.tmp", "log.jsonl.tmp", "text"})
        fs::create_symlink(victim + "/file", out + "/" + name);
    write_file(out + "/text", "new");
    is_kept("a link at the name of a file");
    check(get(out + "/text") == "new" && !fs::is_symlink(out + "/text"), "the file is written");
    fs::create_directory_symlink(victim, out + "/.step_000001.tmp");
    save(out, 1);
    is_kept("a link at a checkpoint's temporary name");
    fs::create_directory_symlink(victim, out + "/.step_000009.removed");
    fs::create_directory_symlink(victim, out + "/step_000000");
    save(out, 2, 2);
    is_kept("a link among what is removed");
    check(!fs::exists(out + "/step_000000") && !fs::is_symlink(out + "/.step_000009.removed"));
    fs::create_directory_symlink(victim, out + "/step_000003");
    refused("a link at a checkpoint's name", {"step_000003", "found one"}, [&] { save(out, 3); });
}

TEST(check_prepare) {
    const std::string out = folder + "/prepare/deep";
    const auto prepare = [&](const std::string& checkpoint = "", int64_t step = 0,
                             const Names& damaged = {}) {
        std::string lines;
        for (const std::string& line : OutputFolder(out).prepare(checkpoint, step, damaged))
            lines += line + "\n";
        return lines;
    };
    {
        const OutputFolder unused(out);
    }
    check(!fs::exists(out), "a run that does not begin leaves no folder");
    check(prepare().empty() && fs::is_directory(out), "no folder");
    check(prepare().empty() && names_in(out) == Names{".lock"}, "an empty folder");
    const std::string log =
        "{\"event\":\"step\",\"step\":1}\n{\"event\":\"step\",\"step\":2}\n{\"event\":\"step\",\"step\":3}\n";
    for (const int64_t step : {1, 2, 3}) save(out, step);
    overwrite(out + "/log.jsonl", log);
    for (const char* name : {"loss.png", "profile.json", "trace.json"}) overwrite(out + "/" + name, "old");
    for (const char* name : {"notes.txt", ".log.jsonl.0.tmp", ".config.toml.0.tmp", ".mine.tmp"})
        overwrite(out + "/" + name, "x");
    check(prepare(out + "/step_000003/", 3).empty(), "going on from the newest");
    check(get(out + "/log.jsonl") == log && names_in(out).size() == 10, "nothing is moved but leftovers");
    const std::string branch = prepare(out + "/step_000002", 2);
    check(branch == "newer checkpoints are now in " + out + "/previous_1\n", branch);
    check(names_in(out + "/previous_1") == Names{"step_000003"}, "newer checkpoints are set aside");
    check(get(out + "/log.jsonl") == log.substr(0, 2 * log.size() / 3), "the log is cut back");
    check(prepare() == "an earlier run's log and checkpoints are now in " + out + "/previous_2\n", "anew");
    const Names kept = {".lock", ".mine.tmp", "notes.txt", "previous_1", "previous_2"};
    check(names_in(out) == kept, "the run is set aside");
    check(names_in(out + "/previous_2") ==
          Names{"log.jsonl", "loss.png", "profile.json", "step_000001", "step_000002", "trace.json"});
    check(open_checkpoint(out + "/previous_2/step_000002").step == 2, "and it can be resumed");
    save(out, 5);
    prepare(out + "/previous_2/step_000002", 2);
    check(names_in(out).size() == kept.size() + 1, "a checkpoint from elsewhere starts a new log");
    refused("a file", {out + "/notes.txt"}, [&] { OutputFolder(out + "/notes.txt").prepare("", 0, {}); });

    const std::string late = folder + "/late";
    OutputFolder first(late), second(late);
    first.prepare("", 0, {});
    refused("a second run that saw no folder, either", {late, "process"}, [&] { second.prepare("", 0, {}); });
    OutputFolder third(folder + "/late_2");
    save(fresh_folder("late_2"), 1);
    refused("a run that has begun and ended since", {"late_2", "step_000001", "start again"},
            [&] { third.prepare("", 0, {}); });
}

// A checkpoint that a user has put elsewhere, with a link to it, is one like the others (also test_output.py).
TEST(check_linked_checkpoints) {
    const std::string out = fresh_folder("linked"), elsewhere = fresh_folder("linked_elsewhere");
    save(out, 1);
    save(out, 2);
    fs::rename(out + "/step_000002", elsewhere + "/two");
    fs::create_directory_symlink("../linked_elsewhere/two", out + "/step_000002");
    OutputFolder(out).prepare(out + "/step_000001", 1, {});
    check(open_checkpoint(out + "/previous_1/step_000002").step == 2, "a relative link still leads there");
    fs::create_directory_symlink(elsewhere + "/two", out + "/step_000002");
    OutputFolder(out).prepare("", 0, {});
    check(open_checkpoint(out + "/previous_2/step_000002").step == 2, "an absolute link");
    save(out, 3, 1);
    fs::create_directory_symlink(in_folder("nowhere"), out + "/step_000009");
    const ResumePoint before = find_checkpoint(out, {});
    check(before.directory == out + "/step_000003" && before.damaged.size() == 1);
}

TEST(check_fallback) {
    const std::string out = fresh_folder("fallback");
    for (const int64_t step : {1, 2, 3}) save(out, step);
    overwrite(out + "/step_000003/model.safetensors", "weights 6");
    fs::remove(out + "/step_000002/manifest.json");
    const ResumePoint point = find_checkpoint(out, {});
    check(point.directory == out + "/step_000001" && point.damaged.size() == 2, "the newest complete one");
    fs::create_directories(out + "/damaged_step_000003");
    const Names lines = OutputFolder(out).prepare(point.directory, 1, {"step_000003", "step_000002"});
    check(lines.size() == 2 && lines[0].find(out + "/damaged_step_000003_2") != std::string::npos, lines[0]);
    check(names_in(out) == Names({".lock", "damaged_step_000002", "damaged_step_000003",
                                  "damaged_step_000003_2", "step_000001"}));
    check(get(out + "/damaged_step_000003_2/model.safetensors") == "weights 6", "as they are");
    save(out, 2);
    for (const char* name : {"/step_000001", "/step_000002"}) overwrite(out + name + "/config.json", "[]");
    refused("nothing but damaged ones",
            {"complete", "found 2 damaged", "step_000002/config.json", "--resume none"},
            [&] { find_checkpoint(out, {}); });
    refused("a damaged directory alone", {"step_000002/config.json"},
            [&] { find_checkpoint(out, out + "/step_000002"); });
}

// What the system refuses is no damage: the same checkpoint may be read the next time.
TEST(check_errors_of_the_system) {
    const std::string out = fresh_folder("system");
    save(out, 1);
    const std::string newest = save(out, 2), file = newest + "/optimizer.safetensors";
    const auto is_told = [&](const char* reason, const std::function<void()>& prepare) {
        const int code = exit_code_of([&] {
            prepare();
            const std::string message = error_of([&] { find_checkpoint(out, {}); });
            if (message.find(reason) == message.npos) fail(message);
        });
        check(code == 0, reason);
    };
    is_told("Too many open files", [] {
        const rlimit none = {0, 64};
        setrlimit(RLIMIT_NOFILE, &none);
    });
    if (geteuid() == 0) {
        for (fs::path path = out; path != folder.substr(0, folder.rfind('/')); path = path.parent_path())
            fs::permissions(path, fs::perms(0755));
        fs::permissions(file, fs::perms(0600));
        is_told("optimizer.safetensors: cannot open: Permission denied",
                [] { check(seteuid(65534) == 0, ""); });
    }
    check(error_of([&] { find_checkpoint(out, newest); }).find("in its folder") == std::string::npos);
}

// A manifest that is whole and of a later version is not damaged: it is not passed over.
TEST(check_other_versions) {
    const std::string out = fresh_folder("version");
    save(out, 1);
    const std::string file = save(out, 2) + "/manifest.json", good = get(file);
    std::string text = good;
    text.replace(text.find("checkpoint 2"), 12, "checkpoint 9");
    overwrite(file, text);
    check(find_checkpoint(out, {}).directory == out + "/step_000001");
    text.resize(text.rfind(",\n"));
    const std::string path = put("sum", text);
    overwrite(file, text + ",\n \"xxh3\": \"" + hex(hash_file(path)) + "\"\n}\n");
    refused("another version's", {file, "checkpoint 9"}, [&] { find_checkpoint(out, {}); });
}

}  // namespace
}  // namespace output_checks
