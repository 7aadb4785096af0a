// LD_PRELOAD library: fails the k-th call of a kind that concerns files below a folder, or kills the process there.
//
//   CHAOS_FOLDER   absolute path; other files, pipes and devices are never touched
//   CHAOS_CALL     the kind (`kinds` below), or "any"
//   CHAOS_AT       k, from 1
//   CHAOS_ACTION   an errno, "short" (half of what was to be written is), "kill" (SIGKILL instead of the call), or
//                  "sleep:SECONDS" before the call, which goes through
//   CHAOS_ON       "once", or "on": the calls behind the k-th fail as well
//   CHAOS_COUNTS   file that gets the number of calls of each kind at exit: "open 12" per line
//   CHAOS_BYTES    file that gets the number of bytes read at exit
//
// Threads ("thread") are counted wherever they are started. Only calls through the dynamic linker are seen: those of the
// program and of libstdc++, not those inside libc. Headers that declare the functions below with other names of the same
// types (stat64, ...) are left out; on 64-bit Linux both names mean the same.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
// The function that ours stands before.
#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

enum kind { OPEN, READ, WRITE, FSYNC, CLOSE, RENAME, MKDIR, UNLINK, MMAP, STAT, LIST, LOCK, THREAD, KINDS };
static const char* const kinds[KINDS] = {"open",   "read", "write", "fsync", "close", "rename", "mkdir",
                                         "unlink", "mmap", "stat",  "list",  "lock",  "thread"};
enum { SHORT = -1, DESCRIPTORS = 1024 };

static atomic_int counts[KINDS], met;
static atomic_long bytes_read;
static atomic_bool ours[DESCRIPTORS];  // descriptors of files below the folder
static const char *folder, *counts_file, *bytes_file;
static int chosen = -1, at, action;
static int goes_on, kills, any, seconds;

__attribute__((constructor)) static void read_environment(void) {
    folder = getenv("CHAOS_FOLDER");
    counts_file = getenv("CHAOS_COUNTS");
    bytes_file = getenv("CHAOS_BYTES");
    const char *call = getenv("CHAOS_CALL"), *k = getenv("CHAOS_AT"), *what = getenv("CHAOS_ACTION"),
               *on = getenv("CHAOS_ON");
    if (!folder || !call || !k || !what) return;
    any = strcmp(call, "any") == 0;
    for (int i = 0; i < KINDS; i++)
        if (strcmp(call, kinds[i]) == 0) chosen = i;
    at = atoi(k);
    kills = strcmp(what, "kill") == 0;
    if (strncmp(what, "sleep:", 6) == 0) seconds = atoi(what + 6);
    action = strcmp(what, "short") == 0 ? SHORT : atoi(what);
    goes_on = on && strcmp(on, "on") == 0;
}

__attribute__((destructor)) static void write_counts(void) {
    FILE* file = counts_file ? NEXT(fopen)(counts_file, "w") : NULL;
    for (int i = 0; file && i < KINDS; i++) fprintf(file, "%s %d\n", kinds[i], counts[i]);
    if (file) fclose(file);
    FILE* bytes = bytes_file ? NEXT(fopen)(bytes_file, "w") : NULL;
    if (bytes) fprintf(bytes, "%ld\n", bytes_read), fclose(bytes);
}

// Counts a call. 0: it goes through; else what it fails with, an errno or SHORT.
static int fault(enum kind kind, int is_ours) {
    if (!is_ours) return 0;
    counts[kind]++;
    if (!any && (int)kind != chosen) return 0;
    const int k = ++met;
    if (k != at && !(goes_on && k > at)) return 0;
    if (kills) kill(getpid(), SIGKILL);
    if (seconds) sleep(seconds);
    return action;
}

static int is_ours(int fd) {
    return fd >= 0 && fd < DESCRIPTORS && ours[fd];
}
static int below(const char* path) {
    return folder && path && strncmp(path, folder, strlen(folder)) == 0;
}
// A path relative to an open folder is ours where the folder is.
static int below_at(int fd, const char* path) {
    return path && path[0] == '/' ? below(path) : is_ours(fd);
}
static int remember(int fd, int mine) {
    if (fd >= 0 && fd < DESCRIPTORS) ours[fd] = mine;
    return fd;
}
static int fail(int error) {
    errno = error;
    return -1;
}

// A call that fails with an errno, or goes through.
#define FAULTY(type, name, parameters, arguments, kind, mine)  \
    EXPORT type name parameters {                              \
        const int error = fault(kind, mine);                   \
        return error > 0 ? fail(error) : NEXT(name) arguments; \
    }

EXPORT int open(const char* path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    const int mode = va_arg(arguments, int);
    va_end(arguments);
    const int mine = below(path), error = fault(OPEN, mine);
    return error ? fail(error) : remember(NEXT(open)(path, flags, mode), mine);
}

EXPORT int openat(int folder_fd, const char* path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    const int mode = va_arg(arguments, int);
    va_end(arguments);
    const int mine = below_at(folder_fd, path), error = fault(OPEN, mine);
    return error ? fail(error) : remember(NEXT(openat)(folder_fd, path, flags, mode), mine);
}

EXPORT FILE* fopen(const char* path, const char* mode) {
    const int mine = below(path), error = fault(OPEN, mine);
    if (error) return fail(error), NULL;
    FILE* file = NEXT(fopen)(path, mode);
    if (file) remember(fileno(file), mine);
    return file;
}

EXPORT DIR* opendir(const char* path) {
    const int mine = below(path), error = fault(OPEN, mine);
    if (error) return fail(error), NULL;
    DIR* found = NEXT(opendir)(path);
    if (found) remember(dirfd(found), mine);
    return found;
}

EXPORT struct dirent* readdir(DIR* stream) {
    const int error = fault(LIST, is_ours(dirfd(stream)));
    if (error) return fail(error), NULL;
    return NEXT(readdir)(stream);
}

static ssize_t count_bytes(ssize_t done, int is_ours) {
    if (is_ours && done > 0) bytes_read += done;
    return done;
}
EXPORT ssize_t read(int fd, void* to, size_t bytes) {
    const int mine = is_ours(fd), error = fault(READ, mine);
    return error > 0 ? fail(error) : count_bytes(NEXT(read)(fd, to, bytes), mine);
}
EXPORT ssize_t pread(int fd, void* to, size_t bytes, off_t from) {
    const int mine = is_ours(fd), error = fault(READ, mine);
    return error > 0 ? fail(error) : count_bytes(NEXT(pread)(fd, to, bytes, from), mine);
}

EXPORT ssize_t write(int fd, const void* from, size_t bytes) {
    const int error = fault(WRITE, is_ours(fd));
    if (error == SHORT) return NEXT(write)(fd, from, bytes > 1 ? bytes / 2 : bytes);
    return error ? fail(error) : NEXT(write)(fd, from, bytes);
}

EXPORT ssize_t pwrite(int fd, const void* from, size_t bytes, off_t to) {
    const int error = fault(WRITE, is_ours(fd));
    if (error == SHORT) return NEXT(pwrite)(fd, from, bytes > 1 ? bytes / 2 : bytes, to);
    return error ? fail(error) : NEXT(pwrite)(fd, from, bytes, to);
}

FAULTY(int, ftruncate, (int fd, off_t bytes), (fd, bytes), WRITE, is_ours(fd))
FAULTY(int, fflush, (FILE * file), (file), WRITE, file&& is_ours(fileno(file)))
FAULTY(int, fsync, (int fd), (fd), FSYNC, is_ours(fd))
FAULTY(int, fdatasync, (int fd), (fd), FSYNC, is_ours(fd))

// As Linux does it: the descriptor is gone, whatever close says.
EXPORT int close(int fd) {
    const int error = fault(CLOSE, is_ours(fd));
    remember(fd, 0);
    const int result = NEXT(close)(fd);
    return error ? fail(error) : result;
}

EXPORT int closedir(DIR* stream) {
    remember(dirfd(stream), 0);
    return NEXT(closedir)(stream);
}

EXPORT int fclose(FILE* file) {
    remember(fileno(file), 0);
    return NEXT(fclose)(file);
}

FAULTY(int, rename, (const char* from, const char* to), (from, to), RENAME, below(from))
FAULTY(int, renameat, (int from_fd, const char* from, int to_fd, const char* to), (from_fd, from, to_fd, to),
       RENAME, below_at(from_fd, from))
FAULTY(int, mkdirat, (int folder_fd, const char* path, unsigned mode), (folder_fd, path, mode), MKDIR,
       below_at(folder_fd, path))
FAULTY(int, mkdir, (const char* path, unsigned mode), (path, mode), MKDIR, below(path))
FAULTY(int, unlink, (const char* path), (path), UNLINK, below(path))
FAULTY(int, unlinkat, (int folder_fd, const char* path, int flags), (folder_fd, path, flags), UNLINK,
       below_at(folder_fd, path))
FAULTY(int, rmdir, (const char* path), (path), UNLINK, below(path))
FAULTY(int, remove, (const char* path), (path), UNLINK, below(path))
void* mmap(void*, size_t, int, int, int, off_t);
EXPORT void* mmap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) {
    const int error = fault(MMAP, is_ours(fd));
    if (error) return fail(error), (void*)-1;
    return NEXT(mmap)(address, bytes, protection, flags, fd, offset);
}

int stat(const char*, void*);
FAULTY(int, stat, (const char* path, void* status), (path, status), STAT, below(path))
int lstat(const char*, void*);
FAULTY(int, lstat, (const char* path, void* status), (path, status), STAT, below(path))
int fstat(int, void*);
FAULTY(int, fstat, (int fd, void* status), (fd, status), STAT, is_ours(fd))
int fstatat(int, const char*, void*, int);
FAULTY(int, fstatat, (int folder_fd, const char* path, void* status, int flags),
       (folder_fd, path, status, flags), STAT, below_at(folder_fd, path))
int flock(int, int);
FAULTY(int, flock, (int fd, int operation), (fd, operation), LOCK, is_ours(fd))

int fcntl(int, int, ...);
EXPORT int fcntl(int fd, int command, ...) {
    va_list arguments;
    va_start(arguments, command);
    void* argument = va_arg(arguments, void*);
    va_end(arguments);
    const int error = fault(LOCK, is_ours(fd));
    return error ? fail(error) : NEXT(fcntl)(fd, command, argument);
}

int pthread_create(void*, const void*, void* (*)(void*), void*);
EXPORT int pthread_create(void* thread, const void* attributes, void* (*work)(void*), void* argument) {
    const int error = fault(THREAD, 1);
    return error ? error : NEXT(pthread_create)(thread, attributes, work, argument);
}

// The names that programs with 64-bit offsets are linked to.
EXPORT int open64(const char* path, int flags, ...) __attribute__((alias("open")));
EXPORT int openat64(int fd, const char* path, int flags, ...) __attribute__((alias("openat")));
EXPORT ssize_t pread64(int, void*, size_t, off_t) __attribute__((alias("pread")));
EXPORT ssize_t pwrite64(int, const void*, size_t, off_t) __attribute__((alias("pwrite")));
EXPORT int ftruncate64(int, off_t) __attribute__((alias("ftruncate")));
EXPORT FILE* fopen64(const char* path, const char* mode) __attribute__((alias("fopen")));
EXPORT void* mmap64(void*, size_t, int, int, int, off_t) __attribute__((alias("mmap")));
EXPORT int stat64(const char*, void*) __attribute__((alias("stat")));
EXPORT int lstat64(const char*, void*) __attribute__((alias("lstat")));
EXPORT int fstat64(int, void*) __attribute__((alias("fstat")));
EXPORT int fstatat64(int, const char*, void*, int) __attribute__((alias("fstatat")));
EXPORT int fcntl64(int, int, ...) __attribute__((alias("fcntl")));
EXPORT struct dirent64* readdir64(DIR*) __attribute__((alias("readdir")));
