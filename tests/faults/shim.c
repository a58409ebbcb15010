/* Every call that writes below one folder, in order; the n-th of them can be made to fail.
 *
 * LD_PRELOADed into a Python process, which arms it through ctypes:
 *
 *     faults_start(log, prefix, n, error)   n: 1 for the first, 0 for none; error: errno, -1: a short write
 *     faults_stop()                         returns the number of calls seen
 *
 * A line of the log is `CALL INODE PATH [PATH]`, tabs between, inode 0 for calls on paths, FAILED before it if that one was made to
 * fail; it is written by a raw system call so that it is not logged itself. Descriptors are resolved through
 * /proc/self/fd. What a library does by raw system calls is not seen: Rust's renameat in safetensors is one.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char prefix[4096];
static int log_fd = -1, count, fail_at, fail_with;

void faults_start(const char *log, const char *below, int at, int error) {
    log_fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600);
    snprintf(prefix, sizeof prefix, "%s", below);
    count = 0;
    fail_at = at;
    fail_with = error;
}

int faults_stop(void) {
    if (log_fd >= 0) syscall(SYS_close, log_fd);
    log_fd = -1;
    return count;
}

/* Logs a call; what it must fail with, or 0. */
static int seen(const char *call, ino_t inode, const char *path, const char *other) {
    char line[17000];
    int error = 0;
    if (log_fd < 0 || (strncmp(path, prefix, strlen(prefix)) && strncmp(other, prefix, strlen(prefix)))) return 0;
    pthread_mutex_lock(&lock);
    if (++count == fail_at) error = fail_with;
    if (error == -1 && strcmp(call, "write")) error = 0;
    int length = snprintf(line, sizeof line, "%s%s\t%lu\t%s%s%s\n", error ? "FAILED " : "", call,
                          (unsigned long)inode, path, *other ? "\t" : "", other);
    if (syscall(SYS_write, log_fd, line, length) != length) error = EIO;
    pthread_mutex_unlock(&lock);
    return error;
}

static const char *path_of(int fd, char *path, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, size - 1);
    path[length < 0 ? 0 : length] = 0;
    return path;
}

static int seen_fd(const char *call, int fd) {
    char path[4096];
    struct stat facts;
    if (log_fd < 0 || fstat(fd, &facts)) return 0;
    return seen(call, facts.st_ino, path_of(fd, path, sizeof path), "");
}

/* A path as given to an -at call. */
static const char *path_at(int folder, const char *name, char *path, size_t size) {
    char base[4096];
    if (name[0] == '/' || folder == AT_FDCWD) snprintf(path, size, "%s", name);
    else snprintf(path, size, "%s/%s", path_of(folder, base, sizeof base), name);
    return path;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL(error) do { errno = (error); return -1; } while (0)

static int opened(int folder, const char *name, int flags, mode_t mode) {
    char path[8200];
    int error = 0;
    if (flags & (O_WRONLY | O_RDWR | O_CREAT)) {
        error = seen("open", 0, path_at(folder, name, path, sizeof path), "");
    }
    if (error > 0) FAIL(error);
    return REAL(openat)(folder, name, flags, mode);
}

#define OPEN(name)                                             \
    int name(const char *path, int flags, ...) {               \
        va_list rest;                                          \
        va_start(rest, flags);                                 \
        mode_t mode = va_arg(rest, mode_t);                    \
        va_end(rest);                                          \
        return opened(AT_FDCWD, path, flags, mode);     \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                           \
    int name(int folder, const char *path, int flags, ...) {   \
        va_list rest;                                          \
        va_start(rest, flags);                                 \
        mode_t mode = va_arg(rest, mode_t);                    \
        va_end(rest);                                          \
        return opened(folder, path, flags, mode);       \
    }
OPENAT(openat64)

ssize_t write(int fd, const void *data, size_t size) {
    int error = seen_fd("write", fd);
    if (error == -1) return REAL(write)(fd, data, size > 1 ? size / 2 : size);
    if (error) FAIL(error);
    return REAL(write)(fd, data, size);
}

ssize_t writev(int fd, const struct iovec *parts, int number) {
    int error = seen_fd("write", fd);
    if (error == -1) return REAL(write)(fd, parts[0].iov_base, parts[0].iov_len);
    if (error) FAIL(error);
    return REAL(writev)(fd, parts, number);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    int error = seen_fd("write", fd);
    if (error > 0) FAIL(error);
    return REAL(pwrite64)(fd, data, size, at);
}

#define ON_FD(name)                            \
    int name(int fd) {                         \
        int error = seen_fd("fsync", fd);      \
        if (error > 0) FAIL(error);            \
        return REAL(name)(fd);                 \
    }
ON_FD(fsync)
ON_FD(fdatasync)

int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    char a[8200], b[8200];
    path_at(from_folder, from, a, sizeof a);
    int error = seen("rename", 0, a, path_at(to_folder, to, b, sizeof b));
    if (error > 0) FAIL(error);
    return (int)syscall(SYS_renameat2, from_folder, from, to_folder, to, flags);
}

int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    return renameat2(from_folder, from, to_folder, to, 0);
}

int rename(const char *from, const char *to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }

int unlinkat(int folder, const char *name, int flags) {
    char path[8200];
    int error = seen(flags & AT_REMOVEDIR ? "rmdir" : "unlink", 0, path_at(folder, name, path, sizeof path), "");
    if (error > 0) FAIL(error);
    return (int)syscall(SYS_unlinkat, folder, name, flags);
}

int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int mkdir(const char *name, mode_t mode) {
    int error = seen("mkdir", 0, name, "");
    if (error > 0) FAIL(error);
    return (int)syscall(SYS_mkdirat, AT_FDCWD, name, mode);
}
