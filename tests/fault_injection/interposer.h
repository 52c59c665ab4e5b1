/* What the interposer keeps of calls, and the calls themselves, share. The former is interposer.c, the latter
 * interposer_calls.c: the functions of the C library by their own names. Any thread may call these functions. */
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
    X(mkdir)                                                                                                                \
    X(mkdirat)                                                                                                              \
    X(flock)                                                                                                                \
    X(fallocate)                                                                                                            \
    X(posix_fallocate)                                                                                                      \
    X(ftruncate)                                                                                                            \
    X(read)                                                                                                                 \
    X(pread)                                                                                                                \
    X(pwrite)                                                                                                               \
    X(fsync)                                                                                                                \
    X(stat)                                                                                                                 \
    X(lstat)                                                                                                                \
    X(fstat)                                                                                                                \
    X(fstatat)                                                                                                              \
    X(fstatfs)                                                                                                              \
    X(fstatvfs)                                                                                                             \
    X(fdopendir)                                                                                                            \
    X(getcwd)                                                                                                               \
    X(getrandom)                                                                                                            \
    X(unlink)                                                                                                               \
    X(unlinkat)                                                                                                             \
    X(renameat)                                                                                                             \
    X(pthread_create)

#define EXPORT __attribute__((visibility("default")))

typedef enum call {
#define ENUMERATOR(name) CALL_##name,
    CALLS(ENUMERATOR)
#undef ENUMERATOR
        CALL_COUNT
} call_t;

/* Ours for each call, and what the compiler makes of some of them: the addresses by which watched objects call them. */
extern const void *const functions[CALL_COUNT], *const checked_functions[CALL_COUNT];

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *block, size_t bytes);
extern void __libc_free(void *block);

/* Whether a call of our function that returns to `caller` is a watched object's own. */
bool is_watched(const void *caller, call_t call);
/* Notes a call of a watched object; true, with errno: it is to fail. */
bool fails(call_t call, const void *caller);

/* A new block, which is remembered where `caller` is a watched object's; returns it. */
void *keep(call_t call, void *address, const void *caller);
/* Of any caller: a function that ends in free() has its caller's return address. */
void forget(void *address);

/* What a watched object maps, and what anyone unmaps: that may be the middle of a mapping, or reach over several. */
void keep_mapped(uintptr_t begin, uintptr_t end);
void forget_mapped(uintptr_t begin, uintptr_t end);

/* Threads of watched objects: 1 when one begins, -1 when it has ended. */
void count_thread(int change);

#endif
