/* System calls of the shared store that can be made to fail, or before which something else happens. Included once in a
 * program: it defines functions that replace those of the C library. */
#ifndef TMS_TESTS_SHARED_FAULTS_H
#define TMS_TESTS_SHARED_FAULTS_H

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#define CALLS(X)                                                                                                            \
    X(openat) X(mkdirat) X(flock) X(renameat) X(linkat) X(unlinkat) X(fchmod) X(pwrite) X(pread) X(getrandom) X(fstatfs)

typedef enum call {
#define CALL(name) CALL_##name,
    CALLS(CALL)
#undef CALL
        CALL_COUNT,
    ANY_CALL
} call_t;

static struct {
    call_t call;      /* with `error`: which call fails */
    int error;        /* 0: none */
    unsigned succeed; /* this many of these calls succeed before one fails */
    unsigned fail;    /* this many fail then */
    unsigned fired;   /* number of failures so far */
    const char *fired_name;
    size_t transfer_most; /* the most bytes that one pread or pwrite moves; 0: no limit */
    void (*before[CALL_COUNT])(void);
    void (*after[CALL_COUNT])(void);
    unsigned count[CALL_COUNT];
} fault;

/* Runs a hook once it is reached; inside of it there are no hooks. */
static inline void run_hook(void (**hook)(void)) {
    void (*run)(void) = *hook;
    *hook = NULL;
    if (run) run();
}

static inline bool fails(call_t call, const char *name) {
    fault.count[call]++;
    if (fault.error == 0 || (fault.call != call && fault.call != ANY_CALL)) return false;
    if (fault.succeed > 0) {
        fault.succeed--;
        return false;
    }
    if (fault.fail == 0) return false;
    fault.fail--;
    fault.fired++;
    fault.fired_name = name;
    errno = fault.error;
    return true;
}

/* Makes `fail` calls fail after `succeed` ones. */
static inline void inject(call_t call, int number, unsigned succeed, unsigned fail) {
    fault.call = call;
    fault.error = number;
    fault.succeed = succeed;
    fault.fail = fail;
    fault.fired = 0;
}

static inline void inject_nothing(void) { memset(&fault, 0, sizeof fault); }

/* The body of a function that replaces a call. */
#define REPLACED(name, result, ...)                                                                                         \
    run_hook(&fault.before[CALL_##name]);                                                                                   \
    if (fails(CALL_##name, #name)) return -1;                                                                               \
    result got = (result)syscall(__VA_ARGS__);                                                                              \
    int os_error = errno;                                                                                                   \
    run_hook(&fault.after[CALL_##name]);                                                                                    \
    errno = os_error;                                                                                                       \
    return got

static inline size_t limited(size_t bytes) {
    return fault.transfer_most && bytes > fault.transfer_most ? fault.transfer_most : bytes;
}

int openat(int directory, const char *path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = flags & O_CREAT ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    REPLACED(openat, int, SYS_openat, directory, path, flags, mode);
}
int mkdirat(int directory, const char *path, mode_t mode) { REPLACED(mkdirat, int, SYS_mkdirat, directory, path, mode); }
int flock(int fd, int operation) { REPLACED(flock, int, SYS_flock, fd, operation); }
int renameat(int from_directory, const char *from, int to_directory, const char *to) {
    REPLACED(renameat, int, SYS_renameat2, from_directory, from, to_directory, to, 0);
}
int linkat(int from_directory, const char *from, int to_directory, const char *to, int flags) {
    REPLACED(linkat, int, SYS_linkat, from_directory, from, to_directory, to, flags);
}
int unlinkat(int directory, const char *path, int flags) { REPLACED(unlinkat, int, SYS_unlinkat, directory, path, flags); }
int fchmod(int fd, mode_t mode) { REPLACED(fchmod, int, SYS_fchmod, fd, mode); }
ssize_t pwrite(int fd, const void *data, size_t bytes, off_t offset) {
    REPLACED(pwrite, ssize_t, SYS_pwrite64, fd, data, limited(bytes), offset);
}
ssize_t pread(int fd, void *data, size_t bytes, off_t offset) {
    REPLACED(pread, ssize_t, SYS_pread64, fd, data, limited(bytes), offset);
}
ssize_t getrandom(void *memory, size_t bytes, unsigned flags) {
    REPLACED(getrandom, ssize_t, SYS_getrandom, memory, bytes, flags);
}
int fstatfs(int fd, struct statfs *found) { REPLACED(fstatfs, int, SYS_fstatfs, fd, found); }

#endif
