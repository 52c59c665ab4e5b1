/* Shared by the interposer's records (interposer.c) and the interposed calls (interposer_calls.c), which have the names of
 * the C library's functions. Any thread may call these functions. */
#ifndef TMS_TESTS_INTERPOSER_H
#define TMS_TESTS_INTERPOSER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CALLS(X)                                                                                                            \
    X(malloc)                                                                                                               \
    X(calloc)                                                                                                               \
    X(realloc)                                                                                                              \
    X(strdup)                                                                                                               \
    X(mmap)                                                                                                                 \
    X(munmap)                                                                                                               \
    X(madvise)                                                                                                              \
    X(mincore)                                                                                                              \
    X(syscall)                                                                                                              \
    X(sched_getaffinity)                                                                                                    \
    X(fopen)                                                                                                                \
    X(open_of_system)                                                                                                       \
    X(open)                                                                                                                 \
    X(openat)                                                                                                               \
    X(close)                                                                                                                \
    X(fcntl)                                                                                                                \
    X(mkdirat)                                                                                                              \
    X(flock)                                                                                                                \
    X(fchmod)                                                                                                               \
    X(fallocate)                                                                                                            \
    X(posix_fallocate)                                                                                                      \
    X(ftruncate)                                                                                                            \
    X(read)                                                                                                                 \
    X(pread)                                                                                                                \
    X(pwrite)                                                                                                               \
    X(fsync)                                                                                                                \
    X(futimens)                                                                                                             \
    X(stat)                                                                                                                 \
    X(lstat)                                                                                                                \
    X(fstat)                                                                                                                \
    X(fstatat)                                                                                                              \
    X(fstatfs)                                                                                                              \
    X(fstatvfs)                                                                                                             \
    X(statvfs)                                                                                                              \
    X(fdopendir)                                                                                                            \
    X(getcwd)                                                                                                               \
    X(readlinkat)                                                                                                           \
    X(getrandom)                                                                                                            \
    X(unlink)                                                                                                               \
    X(unlinkat)                                                                                                             \
    X(renameat)                                                                                                             \
    X(renameat2)                                                                                                            \
    X(linkat)                                                                                                               \
    X(pthread_create)

#define EXPORT __attribute__((visibility("default")))

typedef enum call {
#define ENUMERATOR(name) CALL_##name,
    CALLS(ENUMERATOR)
#undef ENUMERATOR
        CALL_COUNT
} call_t;

/* Our function for each call, and the names that the compiler substitutes for some: watched objects call these addresses. */
extern const void *const functions[CALL_COUNT], *const checked_functions[CALL_COUNT];

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *block, size_t bytes);
extern void __libc_free(void *block);

/* Whether an address lies in the code of a watched object. */
bool in_watched_object(uintptr_t address);
/* Whether a call of our function that returns to `caller` comes from a watched object. */
bool is_watched(const void *caller, call_t call);
/* Records a call of a watched object. Returns true, with errno set, if it is to fail. */
bool fails(call_t call, const void *caller);

/* A new block, which is recorded if `caller` is a watched object; returns it. */
void *keep(call_t call, void *address, const void *caller);
/* From any caller: a tail call of free() has its caller's caller as return address. */
void forget(void *address);

/* A watched object's mapping, of a file or anonymous, and any caller's unmapping, which may cover part of a mapping or
 * several mappings. */
void keep_mapped(uintptr_t begin, uintptr_t end, bool anonymous);
void forget_mapped(uintptr_t begin, uintptr_t end);

/* Threads of watched objects: 1 when one begins, -1 when it has ended. */
void count_thread(int change);

/* The clock of the watched objects, CLOCK_MONOTONIC, is ahead of the system's by the seconds that have passed for them
 * alone: one whenever a test waits for their threads, so that it does not sleep where they wait for a quiet moment. */
long seconds_ahead(void);

#endif
