/* The interposed functions of the C library. Each checks whether it is to fail, and otherwise calls the next function of
 * its name.
 *
 * Memory functions call the C library's own names (__libc_malloc, ...), because looking up the next function needs memory.
 */
#include "interposer.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

/* ---- memory ---- */

#define CALLER __builtin_return_address(0)

EXPORT void *malloc(size_t bytes) {
    return fails(CALL_malloc, CALLER) ? NULL : keep(CALL_malloc, __libc_malloc(bytes), CALLER);
}

EXPORT void *calloc(size_t count, size_t bytes) {
    return fails(CALL_calloc, CALLER) ? NULL : keep(CALL_calloc, __libc_calloc(count, bytes), CALLER);
}

EXPORT void *realloc(void *block, size_t bytes) {
    if (fails(CALL_realloc, CALLER)) return NULL;
    forget(block);
    return keep(CALL_realloc, __libc_realloc(block, bytes), CALLER);
}

EXPORT char *strdup(const char *text) {
    if (fails(CALL_strdup, CALLER)) return NULL;
    size_t bytes = strlen(text) + 1;
    char *copy = keep(CALL_strdup, __libc_malloc(bytes), CALLER);
    return copy ? memcpy(copy, text, bytes) : NULL;
}

EXPORT void free(void *block) {
    forget(block);
    __libc_free(block);
}

/* ---- all others: looked up at the first call ---- */

#define NEXT(type, name)                                                                                                    \
    static type (*_Atomic next_of_##name)();                                                                                \
    type (*next)() = atomic_load(&next_of_##name);                                                                          \
    if (!next) {                                                                                                            \
        void *found = dlsym(RTLD_NEXT, #name);                                                                              \
        memcpy(&next, &found, sizeof next);                                                                                 \
        atomic_store(&next_of_##name, next);                                                                                \
    }

EXPORT void *mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset) {
    NEXT(void *, mmap)
    if (fails(CALL_mmap, CALLER)) return MAP_FAILED;
    void *mapped = next(address, bytes, protection, flags, fd, offset);
    if (mapped == MAP_FAILED || !is_watched(CALLER, CALL_mmap)) return mapped;
    keep_mapped((uintptr_t)mapped, (uintptr_t)mapped + bytes, flags & MAP_ANONYMOUS);
    return mapped;
}

EXPORT int munmap(void *address, size_t bytes) {
    NEXT(int, munmap)
    if (fails(CALL_munmap, CALLER)) return -1;
    forget_mapped((uintptr_t)address, (uintptr_t)address + bytes);
    return next(address, bytes);
}

EXPORT int close(int fd) {
    NEXT(int, close)
    if (!fails(CALL_close, CALLER)) return next(fd);
    int error = errno;
    (void)next(fd);
    errno = error;
    return -1;
}

EXPORT int posix_fallocate(int fd, off_t offset, off_t bytes) {
    NEXT(int, posix_fallocate)
    int before = errno;
    if (!fails(CALL_posix_fallocate, CALLER)) return next(fd, offset, bytes);
    int error = errno;
    errno = before;
    return error;
}

/* A thread of a watched object, which is counted while it runs. */
typedef struct thread {
    void *(*start)(void *);
    void *argument;
} thread_t;

static void *run_thread(void *argument) {
    thread_t thread = *(thread_t *)argument;
    __libc_free(argument);
    void *result = thread.start(thread.argument);
    count_thread(-1);
    return result;
}

EXPORT int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument) {
    NEXT(int, pthread_create)
    int before = errno;
    if (fails(CALL_pthread_create, CALLER)) {
        int error = errno;
        errno = before;
        return error;
    }
    thread_t *counted = is_watched(CALLER, CALL_pthread_create) ? __libc_malloc(sizeof *counted) : NULL;
    if (!counted) return next(thread, attributes, start, argument);
    *counted = (thread_t){.start = start, .argument = argument};
    count_thread(1);
    int error = next(thread, attributes, run_thread, counted);
    if (error) {
        count_thread(-1);
        __libc_free(counted);
    }
    return error;
}

/* ---- time ---- */

EXPORT int clock_gettime(clockid_t clock, struct timespec *now) {
    NEXT(int, clock_gettime)
    int failed = next(clock, now);
    if (!failed && clock == CLOCK_MONOTONIC && in_watched_object((uintptr_t)CALLER)) now->tv_sec += seconds_ahead();
    return failed;
}

static bool is_before(const struct timespec *one, const struct timespec *other) {
    return one->tv_sec != other->tv_sec ? one->tv_sec < other->tv_sec : one->tv_nsec < other->tv_nsec;
}

/* Waits in turns of a millisecond, because the clock may go forward meanwhile. The conditions of the watched objects have
 * CLOCK_MONOTONIC. */
static int wait_by_watched_clock(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    enum { TURN_NS = 1000000, SECOND_NS = 1000000000 };
    int error = ETIMEDOUT;
    while (error == ETIMEDOUT) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        struct timespec end = {until->tv_sec - seconds_ahead(), until->tv_nsec};
        if (!is_before(&now, &end)) break;
        struct timespec turn = {now.tv_sec + (now.tv_nsec + TURN_NS) / SECOND_NS, (now.tv_nsec + TURN_NS) % SECOND_NS};
        error = pthread_cond_clockwait(condition, mutex, CLOCK_MONOTONIC, is_before(&turn, &end) ? &turn : &end);
    }
    return error;
}

EXPORT int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    if (in_watched_object((uintptr_t)CALLER)) return wait_by_watched_clock(condition, mutex, until);
    static int (*_Atomic next_of)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *) = atomic_load(&next_of);
    if (!next) {
        void *found = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2"); /* x86-64 has an older one as well */
        if (!found) found = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
        memcpy(&next, &found, sizeof next);
        atomic_store(&next_of, next);
    }
    return next(condition, mutex, until);
}

/* ---- files ---- */

static mode_t mode_argument(int flags, va_list *arguments) {
    return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(*arguments, mode_t) : 0;
}

/* These files of the system may be absent and are read everywhere. */
static bool is_of_system(const char *path) { return strncmp(path, "/proc/", 6) == 0 || strncmp(path, "/sys/", 5) == 0; }

EXPORT int open(const char *path, int flags, ...) {
    NEXT(int, open)
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = mode_argument(flags, &arguments);
    va_end(arguments);
    return fails(is_of_system(path) ? CALL_open_of_system : CALL_open, CALLER) ? -1 : next(path, flags, mode);
}

EXPORT int fcntl(int fd, int operation, ...) {
    NEXT(int, fcntl)
    va_list arguments;
    va_start(arguments, operation);
    long argument = va_arg(arguments, long);
    va_end(arguments);
    return fails(CALL_fcntl, CALLER) ? -1 : next(fd, operation, argument);
}

EXPORT long syscall(long number, ...) {
    enum { ARGUMENTS = 6 };
    NEXT(long, syscall)
    long values[ARGUMENTS];
    va_list arguments;
    va_start(arguments, number);
    for (int i = 0; i < ARGUMENTS; i++) values[i] = va_arg(arguments, long);
    va_end(arguments);
    if (fails(CALL_syscall, CALLER)) return -1;
    return next(number, values[0], values[1], values[2], values[3], values[4], values[5]);
}

EXPORT int openat(int directory, const char *path, int flags, ...) {
    NEXT(int, openat)
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = mode_argument(flags, &arguments);
    va_end(arguments);
    return fails(CALL_openat, CALLER) ? -1 : next(directory, path, flags, mode);
}

#define FORWARD(type, failed, name, parameters, arguments)                                                                  \
    EXPORT type name parameters {                                                                                           \
        NEXT(type, name)                                                                                                    \
        return fails(CALL_##name, CALLER) ? failed : next arguments;                                                        \
    }

FORWARD(int, -1, madvise, (void *address, size_t bytes, int advice), (address, bytes, advice))
FORWARD(int, -1, mincore, (void *address, size_t bytes, unsigned char *resident), (address, bytes, resident))
FORWARD(int, -1, sched_getaffinity, (pid_t process, size_t bytes, cpu_set_t *set), (process, bytes, set))
FORWARD(FILE *, NULL, fopen, (const char *path, const char *mode), (path, mode))
FORWARD(int, -1, mkdirat, (int directory, const char *path, mode_t mode), (directory, path, mode))
FORWARD(int, -1, flock, (int fd, int operation), (fd, operation))
FORWARD(int, -1, fchmod, (int fd, mode_t mode), (fd, mode))
FORWARD(int, -1, fallocate, (int fd, int mode, off_t offset, off_t bytes), (fd, mode, offset, bytes))
FORWARD(int, -1, ftruncate, (int fd, off_t bytes), (fd, bytes))
FORWARD(ssize_t, -1, read, (int fd, void *data, size_t bytes), (fd, data, bytes))
FORWARD(ssize_t, -1, pread, (int fd, void *data, size_t bytes, off_t offset), (fd, data, bytes, offset))
FORWARD(ssize_t, -1, pwrite, (int fd, const void *data, size_t bytes, off_t offset), (fd, data, bytes, offset))
FORWARD(int, -1, fsync, (int fd), (fd))
FORWARD(int, -1, futimens, (int fd, const struct timespec times[2]), (fd, times))
FORWARD(int, -1, stat, (const char *path, struct stat *found), (path, found))
FORWARD(int, -1, lstat, (const char *path, struct stat *found), (path, found))
FORWARD(int, -1, fstat, (int fd, struct stat *found), (fd, found))
FORWARD(int, -1, fstatat, (int directory, const char *path, struct stat *found, int flags), (directory, path, found, flags))
FORWARD(int, -1, fstatfs, (int fd, struct statfs *found), (fd, found))
FORWARD(int, -1, fstatvfs, (int fd, struct statvfs *found), (fd, found))
FORWARD(int, -1, statvfs, (const char *path, struct statvfs *found), (path, found))
FORWARD(void *, NULL, fdopendir, (int fd), (fd))
FORWARD(char *, NULL, getcwd, (char *path, size_t bytes), (path, bytes))
FORWARD(ssize_t, -1, readlinkat, (int directory, const char *path, char *target, size_t bytes),
        (directory, path, target, bytes))
FORWARD(ssize_t, -1, getrandom, (void *data, size_t bytes, unsigned flags), (data, bytes, flags))
FORWARD(int, -1, unlink, (const char *path), (path))
FORWARD(int, -1, unlinkat, (int directory, const char *path, int flags), (directory, path, flags))
FORWARD(int, -1, renameat, (int from_directory, const char *from, int to_directory, const char *to),
        (from_directory, from, to_directory, to))
FORWARD(int, -1, renameat2, (int from_directory, const char *from, int to_directory, const char *to, unsigned flags),
        (from_directory, from, to_directory, to, flags))
FORWARD(int, -1, linkat, (int from_directory, const char *from, int to_directory, const char *to, int flags),
        (from_directory, from, to_directory, to, flags))

/* ---- the names that the compiler substitutes if _FORTIFY_SOURCE makes it check arguments ---- */

#define FORWARD_CHECKED(type, failed, call, name, parameters, arguments)                                                    \
    EXPORT type name parameters;                                                                                            \
    EXPORT type name parameters {                                                                                           \
        NEXT(type, name)                                                                                                    \
        return fails(call, CALLER) ? failed : next arguments;                                                               \
    }

FORWARD_CHECKED(ssize_t, -1, CALL_read, __read_chk, (int fd, void *data, size_t bytes, size_t room), (fd, data, bytes, room))
FORWARD_CHECKED(ssize_t, -1, CALL_pread, __pread_chk, (int fd, void *data, size_t bytes, off_t offset, size_t room),
                (fd, data, bytes, offset, room))
FORWARD_CHECKED(ssize_t, -1, CALL_readlinkat, __readlinkat_chk,
                (int directory, const char *path, char *target, size_t bytes, size_t room),
                (directory, path, target, bytes, room))
FORWARD_CHECKED(char *, NULL, CALL_getcwd, __getcwd_chk, (char *path, size_t bytes, size_t room), (path, bytes, room))
FORWARD_CHECKED(int, -1, is_of_system(path) ? CALL_open_of_system : CALL_open, __open_2, (const char *path, int flags),
                (path, flags))
FORWARD_CHECKED(int, -1, CALL_openat, __openat_2, (int directory, const char *path, int flags), (directory, path, flags))

const void *const checked_functions[CALL_COUNT] = {
    [CALL_read] = (const void *)__read_chk,
    [CALL_pread] = (const void *)__pread_chk,
    [CALL_getcwd] = (const void *)__getcwd_chk,
    [CALL_open] = (const void *)__open_2,
    [CALL_readlinkat] = (const void *)__readlinkat_chk,
    [CALL_open_of_system] = (const void *)__open_2,
    [CALL_openat] = (const void *)__openat_2,
};

#define open_of_system open
const void *const functions[CALL_COUNT] = {
#define FUNCTION(name) (const void *)name,
    CALLS(FUNCTION)
#undef FUNCTION
};
