/* Stands between the library under test and the C library, counts what the one asks of the other, and lets chosen calls
 * fail.
 *
 * Loaded with LD_PRELOAD into a worker process. Only calls whose return address lies in a watched object are counted or
 * fail; everybody else's, the simulated GPU's among them, pass through. What the watched objects allocate and map is
 * remembered, so that a test can ask what they still hold. A close that fails closes all the same, as the system's does.
 *
 * Memory functions go to the C library's own names for them (__libc_malloc, ...), because finding the next ones needs
 * memory. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <unistd.h>

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

enum { WATCHED_MOST = 8, TRACE_MOST = 1 << 16, LIVE_SLOTS = 1 << 16, MAPPED_MOST = 1 << 12, NAME_BYTES = 32 };

typedef enum call {
#define ENUMERATOR(name) CALL_##name,
    CALLS(ENUMERATOR)
#undef ENUMERATOR
        CALL_COUNT
} call_t;

static const char *const names[CALL_COUNT] = {
#define NAME(name) #name,
    CALLS(NAME)
#undef NAME
};

typedef struct rule {
    uint64_t succeed, fail;
    int error;
} rule_t;

/* A block of memory that a watched object holds. */
typedef struct live {
    _Atomic uintptr_t address; /* 0: never used, 1: used once */
} live_t;

/* What a watched object has mapped, and not unmapped since. */
typedef struct mapped {
    uintptr_t begin, end;
} mapped_t;

static struct {
    pthread_mutex_t lock;
    struct {
        uintptr_t begin, end;
    } watched[WATCHED_MOST];
    atomic_int watched_count;
    bool recording;
    size_t trace_count;
    uint8_t trace[TRACE_MOST];
    uint64_t stamps[TRACE_MOST];
    uint64_t (*clock)(const char *);
    rule_t rules[CALL_COUNT];
    uint64_t fired;
    live_t live[LIVE_SLOTS];
    atomic_size_t live_count;
    uint64_t blocks;
    mapped_t mapped[MAPPED_MOST];
    size_t mapped_count;
    atomic_uint_least64_t threads;
} it = {.lock = PTHREAD_MUTEX_INITIALIZER};

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *block, size_t bytes);
extern void __libc_free(void *block);

static bool in_watched_text(uintptr_t address) {
    int count = atomic_load_explicit(&it.watched_count, memory_order_acquire);
    for (int i = 0; i < count; i++) {
        if (address >= it.watched[i].begin && address < it.watched[i].end) return true;
    }
    return false;
}

#ifdef __x86_64__
static uint32_t displacement_at(const uint8_t *code) {
    uint32_t displacement;
    memcpy(&displacement, code, sizeof displacement);
    return displacement;
}

/* Where an instruction with an address relative to its end, `end`, points to. */
static const uint8_t *relative(const uint8_t *end) { return end + (int32_t)displacement_at(end - 4); }

/* The function of another object that was called from `caller`, or NULL for one of the same object. The compiler turns a
 * last call into a jump, so that what Python calls for a watched object has the watched object's return address as well. */
static const void *called_from(const uint8_t *caller) {
    enum { DIRECT = 0xE8, INDIRECT = 0xFF, THROUGH_RIP = 0x15, JUMP_THROUGH_RIP = 0x25, BND = 0xF2 };
    static const uint8_t landing[] = {0xF3, 0x0F, 0x1E, 0xFA}; /* endbr64 */
    const void *const *slot = NULL;
    if (caller[-6] == INDIRECT && caller[-5] == THROUGH_RIP) {
        slot = (const void *const *)(uintptr_t)relative(caller);
    } else if (caller[-5] == DIRECT) {
        const uint8_t *code = relative(caller);
        if (!in_watched_text((uintptr_t)code)) return code;
        if (memcmp(code, landing, sizeof landing) == 0) code += sizeof landing;
        if (*code == BND) code++;
        if (code[0] == INDIRECT && code[1] == JUMP_THROUGH_RIP) slot = (const void *const *)(uintptr_t)relative(code + 6);
    }
    return slot ? *slot : NULL;
}
#else
static const void *called_from(const uint8_t *caller) {
    (void)caller;
    return NULL;
}
#endif

static const void *const functions[CALL_COUNT], *const checked_functions[CALL_COUNT];

/* Whether a call of our function that returns to `caller` is a watched object's own. */
static bool is_watched(const void *caller, call_t call) {
    if (!in_watched_text((uintptr_t)caller)) return false;
    const void *called = called_from(caller);
    return !called || called == functions[call] || called == checked_functions[call];
}

/* Notes a call of a watched object; true, with errno: it is to fail. */
static bool fails(call_t call, const void *caller) {
    if (!is_watched(caller, call)) return false;
    /* The simulated GPU's count of calls puts both records in one order. It has its own lock and never calls back. */
    uint64_t stamp = it.recording && it.clock ? it.clock("*") : 0;
    bool failing = false;
    pthread_mutex_lock(&it.lock);
    if (it.recording && it.trace_count < TRACE_MOST) {
        it.stamps[it.trace_count] = stamp;
        it.trace[it.trace_count++] = (uint8_t)call;
    }
    rule_t *rule = &it.rules[call];
    if (rule->fail && rule->succeed) {
        rule->succeed--;
    } else if (rule->fail) {
        rule->fail--;
        it.fired++;
        failing = true;
    }
    int error = rule->error;
    pthread_mutex_unlock(&it.lock);
    if (failing) errno = error;
    return failing;
}

static size_t slot_of(uintptr_t address) { return (address >> 4) * UINT64_C(0x9E3779B97F4A7C15) >> 48; }

/* A new block of a watched object. */
static void *keep(call_t call, void *address, const void *caller) {
    if (!address || !is_watched(caller, call)) return address;
    pthread_mutex_lock(&it.lock);
    size_t slot = slot_of((uintptr_t)address);
    while (atomic_load(&it.live[slot].address) > 1) slot = (slot + 1) % LIVE_SLOTS;
    atomic_store(&it.live[slot].address, (uintptr_t)address);
    atomic_fetch_add(&it.live_count, 1);
    it.blocks++;
    pthread_mutex_unlock(&it.lock);
    return address;
}

/* Everybody's frees come by here, because a function that ends in free() has its caller's return address. */
static void forget(void *address) {
    if (!address || !atomic_load_explicit(&it.live_count, memory_order_relaxed)) return;
    size_t slot = slot_of((uintptr_t)address);
    for (uintptr_t found; (found = atomic_load(&it.live[slot].address)) != (uintptr_t)address;
         slot = (slot + 1) % LIVE_SLOTS) {
        if (!found) return;
    }
    pthread_mutex_lock(&it.lock);
    atomic_store(&it.live[slot].address, 1);
    atomic_fetch_sub(&it.live_count, 1);
    it.blocks--;
    pthread_mutex_unlock(&it.lock);
}

/* Under the lock. */
static void add_mapped(uintptr_t begin, uintptr_t end) {
    if (begin < end && it.mapped_count < MAPPED_MOST) it.mapped[it.mapped_count++] = (mapped_t){begin, end};
}

/* Takes a range out of what is mapped: it may be the middle of a mapping, or reach over several. */
static void forget_mapped(uintptr_t begin, uintptr_t end) {
    pthread_mutex_lock(&it.lock);
    for (size_t i = 0; i < it.mapped_count;) {
        mapped_t one = it.mapped[i];
        if (one.end <= begin || end <= one.begin) {
            i++;
            continue;
        }
        it.mapped[i] = it.mapped[--it.mapped_count];
        add_mapped(one.begin, begin);
        add_mapped(end, one.end);
        i = 0;
    }
    pthread_mutex_unlock(&it.lock);
}

/* ---- control ---- */

static int watch_object(struct dl_phdr_info *info, size_t size, void *wanted) {
    (void)size;
    const char *path = wanted;
    size_t length = strlen(path), found = strlen(info->dlpi_name);
    if (found < length || strcmp(info->dlpi_name + found - length, path) != 0) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        int count = atomic_load(&it.watched_count);
        if (header->p_type != PT_LOAD || !(header->p_flags & PF_X) || count == WATCHED_MOST) continue;
        it.watched[count].begin = info->dlpi_addr + header->p_vaddr;
        it.watched[count].end = it.watched[count].begin + header->p_memsz;
        atomic_store_explicit(&it.watched_count, count + 1, memory_order_release);
    }
    return 0;
}

/* Watches the loaded objects whose path ends so; returns the number of pieces of text that are watched. */
EXPORT int tms_fault_watch(const char *path) {
    dl_iterate_phdr(watch_object, (void *)(uintptr_t)path);
    return atomic_load(&it.watched_count);
}

EXPORT void tms_fault_clock(uint64_t (*clock)(const char *)) { it.clock = clock; }

EXPORT void tms_fault_record(int on) {
    pthread_mutex_lock(&it.lock);
    it.recording = on != 0;
    if (on) it.trace_count = 0;
    pthread_mutex_unlock(&it.lock);
}

/* The calls since recording began: one name and the number of driver calls before it a row. */
EXPORT size_t tms_fault_trace_length(void) { return it.trace_count; }
EXPORT const char *tms_fault_trace_name(size_t row) { return names[it.trace[row]]; }
EXPORT uint64_t tms_fault_trace_stamp(size_t row) { return it.stamps[row]; }

EXPORT int tms_fault_fail_after(const char *name, uint64_t succeed, uint64_t fail, int error) {
    for (int call = 0; call < CALL_COUNT; call++) {
        if (strcmp(names[call], name) != 0) continue;
        pthread_mutex_lock(&it.lock);
        it.rules[call] = (rule_t){.succeed = succeed, .fail = fail, .error = error};
        pthread_mutex_unlock(&it.lock);
        return 0;
    }
    return 1;
}

EXPORT void tms_fault_stop(void) {
    pthread_mutex_lock(&it.lock);
    memset(it.rules, 0, sizeof it.rules);
    pthread_mutex_unlock(&it.lock);
}

EXPORT uint64_t tms_fault_fired(void) { return it.fired; }
EXPORT uint64_t tms_fault_blocks(void) { return it.blocks; }
EXPORT uint64_t tms_fault_mapped_bytes(void) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < it.mapped_count; i++) bytes += it.mapped[i].end - it.mapped[i].begin;
    return bytes;
}
/* Of it, what the system has found pages for. */
EXPORT uint64_t tms_fault_touched_bytes(void) {
    uint64_t bytes = 0;
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    for (size_t i = 0; i < it.mapped_count; i++) {
        for (uintptr_t at = it.mapped[i].begin; at < it.mapped[i].end; at += page) {
            unsigned char resident = 0;
            if (mincore((void *)at, page, &resident) == 0 && resident & 1) bytes += page;
        }
    }
    return bytes;
}
EXPORT uint64_t tms_fault_threads(void) { return it.threads; }
/* The names of what can fail, NULL after the last. */
EXPORT const char *tms_fault_name(size_t row) { return row < CALL_COUNT ? names[row] : NULL; }

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

/* ---- everything else: found once, when it is first called ---- */

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
    pthread_mutex_lock(&it.lock);
    add_mapped((uintptr_t)mapped, (uintptr_t)mapped + bytes);
    pthread_mutex_unlock(&it.lock);
    return mapped;
}

EXPORT int munmap(void *address, size_t bytes) {
    NEXT(int, munmap)
    if (fails(CALL_munmap, CALLER)) return -1;
    if (it.mapped_count > 0) forget_mapped((uintptr_t)address, (uintptr_t)address + bytes);
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
    atomic_fetch_sub(&it.threads, 1);
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
    atomic_fetch_add(&it.threads, 1);
    int error = next(thread, attributes, run_thread, counted);
    if (error) {
        atomic_fetch_sub(&it.threads, 1);
        __libc_free(counted);
    }
    return error;
}

static mode_t mode_argument(int flags, va_list *arguments) {
    return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(*arguments, mode_t) : 0;
}

/* What the system says about itself is asked for everywhere, and need not be there. */
static bool is_of_system(const char *path) { return strncmp(path, "/proc/", 6) == 0 || strncmp(path, "/sys/", 5) == 0; }

EXPORT int open(const char *path, int flags, ...) {
    NEXT(int, open)
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = mode_argument(flags, &arguments);
    va_end(arguments);
    return fails(is_of_system(path) ? CALL_open_of_system : CALL_open, CALLER) ? -1 : next(path, flags, mode);
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
FORWARD(int, -1, mkdir, (const char *path, mode_t mode), (path, mode))
FORWARD(int, -1, mkdirat, (int directory, const char *path, mode_t mode), (directory, path, mode))
FORWARD(int, -1, flock, (int fd, int operation), (fd, operation))
FORWARD(int, -1, fallocate, (int fd, int mode, off_t offset, off_t bytes), (fd, mode, offset, bytes))
FORWARD(int, -1, ftruncate, (int fd, off_t bytes), (fd, bytes))
FORWARD(ssize_t, -1, read, (int fd, void *data, size_t bytes), (fd, data, bytes))
FORWARD(ssize_t, -1, pread, (int fd, void *data, size_t bytes, off_t offset), (fd, data, bytes, offset))
FORWARD(ssize_t, -1, pwrite, (int fd, const void *data, size_t bytes, off_t offset), (fd, data, bytes, offset))
FORWARD(int, -1, fsync, (int fd), (fd))
FORWARD(int, -1, stat, (const char *path, struct stat *found), (path, found))
FORWARD(int, -1, lstat, (const char *path, struct stat *found), (path, found))
FORWARD(int, -1, fstat, (int fd, struct stat *found), (fd, found))
FORWARD(int, -1, fstatat, (int directory, const char *path, struct stat *found, int flags), (directory, path, found, flags))
FORWARD(int, -1, fstatfs, (int fd, struct statfs *found), (fd, found))
FORWARD(int, -1, fstatvfs, (int fd, struct statvfs *found), (fd, found))
FORWARD(void *, NULL, fdopendir, (int fd), (fd))
FORWARD(char *, NULL, getcwd, (char *path, size_t bytes), (path, bytes))
FORWARD(ssize_t, -1, getrandom, (void *data, size_t bytes, unsigned flags), (data, bytes, flags))
FORWARD(int, -1, unlink, (const char *path), (path))
FORWARD(int, -1, unlinkat, (int directory, const char *path, int flags), (directory, path, flags))
FORWARD(int, -1, renameat, (int from_directory, const char *from, int to_directory, const char *to),
        (from_directory, from, to_directory, to))

/* ---- what the compiler makes of some of these calls where _FORTIFY_SOURCE has it check their arguments ---- */

#define FORWARD_CHECKED(type, failed, call, name, parameters, arguments)                                                    \
    EXPORT type name parameters;                                                                                            \
    EXPORT type name parameters {                                                                                           \
        NEXT(type, name)                                                                                                    \
        return fails(call, CALLER) ? failed : next arguments;                                                               \
    }

FORWARD_CHECKED(ssize_t, -1, CALL_read, __read_chk, (int fd, void *data, size_t bytes, size_t room), (fd, data, bytes, room))
FORWARD_CHECKED(ssize_t, -1, CALL_pread, __pread_chk, (int fd, void *data, size_t bytes, off_t offset, size_t room),
                (fd, data, bytes, offset, room))
FORWARD_CHECKED(char *, NULL, CALL_getcwd, __getcwd_chk, (char *path, size_t bytes, size_t room), (path, bytes, room))
FORWARD_CHECKED(int, -1, is_of_system(path) ? CALL_open_of_system : CALL_open, __open_2, (const char *path, int flags),
                (path, flags))
FORWARD_CHECKED(int, -1, CALL_openat, __openat_2, (int directory, const char *path, int flags), (directory, path, flags))

static const void *const checked_functions[CALL_COUNT] = {
    [CALL_read] = (const void *)__read_chk,         [CALL_pread] = (const void *)__pread_chk,
    [CALL_getcwd] = (const void *)__getcwd_chk,     [CALL_open] = (const void *)__open_2,
    [CALL_open_of_system] = (const void *)__open_2, [CALL_openat] = (const void *)__openat_2,
};

#define open_of_system open
static const void *const functions[CALL_COUNT] = {
#define FUNCTION(name) (const void *)name,
    CALLS(FUNCTION)
#undef FUNCTION
};
