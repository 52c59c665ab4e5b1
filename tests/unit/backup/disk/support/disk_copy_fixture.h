/* Shared by the tests of copies between disk and device: a directory, and system calls that can be counted, delayed, or
 * made to fail. Included once in a program, after support.h: it defines openat, pread, pwrite, syscall and pthread_create,
 * which replace the C library's. */
#ifndef TMS_TESTS_DISK_COPY_FIXTURE_H
#define TMS_TESTS_DISK_COPY_FIXTURE_H

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "backup/disk/copy.h"
#include "backup/disk/queue.h"

enum {
    PATH_BYTES = 512,
    MAX_IN_FLIGHT = 16,
    MAX_AHEAD = 22,
    MAX_BUFFERS = 24,
    BUFFER = 512 << 10,
    ALIGNMENT = 4096,
    NEVER = 1 << 30
};
static const tms_error_context_t CONTEXT = {.operation = "pause", .device = 0, .tag = "first"};
static char base[PATH_BYTES];

typedef enum way { BY_URING, BY_THREADS, THROUGH_PAGE_CACHE, WAYS } way_t;

/* Injected failures: an errno, 0 for none; `..._after`: this many calls succeed first. */
static struct {
    int direct_open_error, direct_transfer_error, write_error;
    int setup_error, submit_error, submit_after, wait_error;
    int threads_after; /* EAGAIN */
    int maps_after;    /* of staging memory; ENOMEM */
    uint32_t short_by; /* of each kernel request, in bytes */
    bool bad_descriptor;
    int pipe_end; /* requests of the kernel read from this descriptor instead, and block for a byte; -1 */
    int unpiped;  /* this many of them do not, before */
    int piped;    /* this many do, then */
    int release;  /* its other end, written to when a request is waited for; -1 */
} fault;

static struct {
    _Atomic int direct_opens, plain_opens, setups, submits, waits, threads, maps;
    _Atomic int direct_writes, plain_writes, direct_reads, plain_reads;
    _Atomic int submits_before_wait; /* -1: nothing has been waited for yet */
} calls;

/* While it is closed every pwrite and pread blocks. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t opened;
    bool closed;
} gate = {.lock = PTHREAD_MUTEX_INITIALIZER, .opened = PTHREAD_COND_INITIALIZER};

static inline void set_closed(bool closed) {
    pthread_mutex_lock(&gate.lock);
    gate.closed = closed;
    pthread_cond_broadcast(&gate.opened);
    pthread_mutex_unlock(&gate.lock);
}

static inline void close_gate(void) { set_closed(true); }
static inline void open_gate(void) { set_closed(false); }

static inline void pass_gate(void) {
    pthread_mutex_lock(&gate.lock);
    while (gate.closed) pthread_cond_wait(&gate.opened, &gate.lock);
    pthread_mutex_unlock(&gate.lock);
}

static inline long refuse(int number) {
    errno = number;
    return -1;
}

/* ---- the io_uring ---- */

/* The entries of the open ring, which the process has mapped. */
static inline struct io_uring_sqe *ring_entries(void) {
    char line[PATH_BYTES];
    unsigned long begin = 0, found = 0, offset = 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%*x %*s %lx", &begin, &offset) == 2 && offset == IORING_OFF_SQES && strstr(line, "io_uring"))
            found = begin;
    }
    if (maps) fclose(maps);
    return (struct io_uring_sqe *)found;
}

/* The index of the next entry does not matter: the kernel has consumed the others. */
static inline void spoil_entries(bool through) {
    struct io_uring_sqe *entries = ring_entries();
    assert_non_null(entries);
    for (int i = 0; i < TMS_DISK_URING_ENTRIES; i++) {
        if (fault.bad_descriptor) entries[i].fd = -1;
        if (entries[i].len > fault.short_by) entries[i].len -= fault.short_by;
        if (fault.pipe_end < 0 || through) continue;
        entries[i].opcode = IORING_OP_READ;
        entries[i].fd = fault.pipe_end;
        entries[i].off = UINT64_MAX;
        entries[i].len = 1;
    }
}

long syscall(long number, ...) {
    long a[6];
    static long (*_Atomic next)(long, ...);
    va_list arguments;
    va_start(arguments, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(arguments, long);
    va_end(arguments);
    long (*real)(long, ...) = next;
    if (!real) {
        *(void **)&real = dlsym(RTLD_NEXT, "syscall");
        next = real;
    }
    if (number == __NR_io_uring_setup) {
        if (fault.setup_error) return refuse(fault.setup_error);
        calls.setups++;
    } else if (number == __NR_io_uring_enter && a[1] > 0) {
        if (fault.submit_error && fault.submit_after-- <= 0) return refuse(fault.submit_error);
        bool through = fault.unpiped-- > 0;
        if (!through && fault.piped-- <= 0) fault.pipe_end = -1;
        if (fault.short_by || fault.bad_descriptor || (fault.pipe_end >= 0 && !through)) spoil_entries(through);
        calls.submits++;
    } else if (number == __NR_io_uring_enter) {
        if (calls.waits++ == 0) calls.submits_before_wait = calls.submits;
        const char bytes[MAX_IN_FLIGHT] = {0};
        if (fault.release >= 0 && calls.waits == 1)
            assert_int_equal(write(fault.release, bytes, sizeof bytes), sizeof bytes);
        if (fault.wait_error) return refuse(fault.wait_error);
    }
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/* ---- files and threads ---- */

int openat(int directory, const char *path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = flags & O_CREAT ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    bool backup = strstr(path, ".backup") && !(flags & O_CREAT);
    if (backup && flags & O_DIRECT && fault.direct_open_error) return (int)refuse(fault.direct_open_error);
    if (backup) (*(flags & O_DIRECT ? &calls.direct_opens : &calls.plain_opens))++;
    return (int)syscall(SYS_openat, directory, path, flags, mode);
}

static inline bool is_direct(int fd) { return (fcntl(fd, F_GETFL) & O_DIRECT) != 0; }

ssize_t pwrite(int fd, const void *data, size_t bytes, off_t offset) {
    bool direct = is_direct(fd);
    (*(direct ? &calls.direct_writes : &calls.plain_writes))++;
    pass_gate();
    if (fault.write_error) return refuse(fault.write_error);
    if (direct && fault.direct_transfer_error) return refuse(fault.direct_transfer_error);
    return syscall(SYS_pwrite64, fd, data, bytes, offset);
}

ssize_t pread(int fd, void *data, size_t bytes, off_t offset) {
    bool direct = is_direct(fd);
    (*(direct ? &calls.direct_reads : &calls.plain_reads))++;
    pass_gate();
    if (direct && fault.direct_transfer_error) return refuse(fault.direct_transfer_error);
    return syscall(SYS_pread64, fd, data, bytes, offset);
}

/* Whether the call comes from this program, and not from the simulated GPU. */
static inline bool is_ours(const void *caller) {
    Dl_info found, self;
    return dladdr(caller, &found) && dladdr(base, &self) && found.dli_fbase == self.dli_fbase;
}

/* Hidden: mappings of libraries do not count, and those of sanitizers happen before anything else works. */
void *mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset) {
    void *(*next)(void *, size_t, int, int, int, off_t);
    *(void **)&next = dlsym(RTLD_NEXT, "mmap");
    if (flags & MAP_NORESERVE) {
        if (calls.maps >= fault.maps_after) return errno = ENOMEM, MAP_FAILED;
        calls.maps++;
    }
    return next(address, bytes, protection, flags, file, offset);
}

__attribute__((visibility("default"))) int pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                                                          void *(*start)(void *), void *argument) {
    int (*next)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    *(void **)&next = dlsym(RTLD_NEXT, "pthread_create");
    bool ours = is_ours(__builtin_return_address(0));
    if (ours && calls.threads >= fault.threads_after) return EAGAIN;
    calls.threads += ours;
    return next(thread, attributes, start, argument);
}

/* ---- the fixture ---- */

static inline void reset_faults(void) {
    memset(&fault, 0, sizeof fault);
    memset(&calls, 0, sizeof calls);
    fault.threads_after = fault.maps_after = fault.piped = NEVER;
    fault.pipe_end = -1;
    fault.release = -1;
    calls.submits_before_wait = -1;
    open_gate();
}

/* Starts counting; the test's own calls are not counted. */
static inline void clear_calls(void) {
    memset(&calls, 0, sizeof calls);
    calls.submits_before_wait = -1;
    simulator()->clear_counts();
}

static inline void set_way(fixture_t *f, way_t way) {
    f->saver.stores.disk.no_uring = way == BY_THREADS;
    f->saver.stores.disk.no_direct = way == THROUGH_PAGE_CACHE;
}

static inline int setup_disk_copies(void **state) {
    tms_error_t error;
    const char *parent = getenv("TMPDIR");
    reset_faults();
    snprintf(base, sizeof base, "%.200s/tms-test-copies-XXXXXX", parent && *parent ? parent : "/tmp");
    if (!mkdtemp(base) || setup_one_device(state) != 0) return -1;
    fixture_t *f = *state;
    return tms_disk_set_directory(&f->saver.stores.disk, base, &error) == TMS_OK ? 0 : -1;
}

static inline int teardown_disk_copies(void **state) {
    fixture_t *f = *state;
    reset_faults();
    tms_reclaim_all(&f->saver);
    assert_true(tms_quarantine_is_empty(&f->saver.quarantine));
    assert_int_equal(atomic_load(&f->saver.stores.disk.total), 0);
    int result = teardown(state);
    return rmdir(base) == 0 ? result : -1; /* and it is empty */
}

/* Skips the test if this system lacks what the way of copying needs. */
static inline bool has_way(way_t way) {
    struct io_uring_params parameters = {0};
    char path[PATH_BYTES + 8];
    snprintf(path, sizeof path, "%s/probe", base);
    int file = open(path, O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600);
    if (file >= 0) close(file);
    unlink(path);
    int ring = (int)syscall(__NR_io_uring_setup, 1, &parameters);
    if (ring >= 0) close(ring);
    bool has = (way == THROUGH_PAGE_CACHE || file >= 0) && (way != BY_URING || ring >= 0);
    static const char *const names[] = {"io_uring", "direct I/O", "files"};
    if (!has) print_message("not tested: no %s here\n", names[way]);
    return has;
}

#define FOR_EACH_WAY(way)                                                                                                   \
    for (way_t way = BY_URING; way < WAYS; way++)                                                                           \
        if (has_way(way))

static inline void open_copier(fixture_t *f, tms_copier_t *copier, tms_wait_t *wait) {
    tms_error_t error;
    ASSERT_OK(tms_copier_open(copier, &f->saver.stores.copying, 0, wait, &CONTEXT, &error), error);
}

/* The first step of a pause. */
static inline void plan(fixture_t *f, tms_backup_t *backup) {
    tms_error_t error;
    tms_backup_batch_t batch = {{NULL}};
    const tms_backup_request_t request = {.policy = TMS_HOST_RELEASE};
    ASSERT_OK(tms_backup_choose(backup, &f->saver.stores, &batch, TMS_BACKUP_DISK, NULL, 0, &CONTEXT, &error), error);
    ASSERT_OK(tms_backup_plan(backup, &f->saver.stores, &batch, &request, &CONTEXT, &error), error);
}

static inline tms_backup_t prepared(fixture_t *f, uint64_t bytes) {
    tms_backup_t backup = {.kind = TMS_BACKUP_DISK, .bytes = bytes};
    plan(f, &backup);
    return backup;
}

/* Copies one backup with a copier of its own. */
static inline void save_one(fixture_t *f, tms_backup_t *backup, uint64_t address) {
    tms_error_t error;
    tms_copier_t copier;
    plan(f, backup);
    open_copier(f, &copier, NULL);
    ASSERT_OK(tms_backup_save(backup, &f->saver.stores, &copier, address, &CONTEXT, &error), error);
    ASSERT_OK(tms_copier_wait(&copier, &CONTEXT, &error), error);
    tms_copier_close(&copier);
    tms_backup_commit(backup, &f->saver.stores);
}

static inline tms_status_t load_one(fixture_t *f, tms_backup_t *backup, uint64_t address, tms_error_t *error) {
    tms_copier_t copier;
    open_copier(f, &copier, NULL);
    tms_status_t status = tms_backup_load(backup, &f->saver.stores, &copier, address, &CONTEXT, error);
    if (status == TMS_OK) status = tms_copier_wait(&copier, &CONTEXT, error);
    tms_copier_close(&copier);
    return status;
}

static inline void assert_loads(fixture_t *f, tms_backup_t *backup, uint64_t address, uint32_t seed) {
    tms_error_t error;
    memset((void *)address, 0, backup->bytes);
    ASSERT_OK(load_one(f, backup, address, &error), error);
    assert_filled(address, backup->bytes, seed);
}

/* The resources that the copier and its pipe hold. */
static inline void assert_nothing_held(void) {
    tms_sim_usage_t usage;
    simulator()->usage(0, &usage);
    assert_int_equal(usage.host_bytes, 0);
    assert_int_equal(usage.streams, 0);
    assert_int_equal(simulator()->calls("cuEventCreate"), simulator()->calls("cuEventDestroy"));
    assert_int_equal(simulator()->calls("cuMemHostRegister"), simulator()->calls("cuMemHostUnregister"));
    assert_null(ring_entries());
}

static inline int count_descriptors(void) {
    int count = 0;
    DIR *stream = opendir("/proc/self/fd");
    while (stream && readdir(stream)) count++;
    if (stream) closedir(stream);
    return count;
}

/* Adds `by` to a byte of a file. */
static inline void change_byte(const char *path, uint64_t offset, int by) {
    char byte = 0;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    assert_int_equal(lseek(fd, (off_t)offset, SEEK_SET), offset);
    assert_int_equal(read(fd, &byte, 1), 1);
    byte = (char)(byte + by);
    assert_int_equal(lseek(fd, (off_t)offset, SEEK_SET), offset);
    assert_int_equal(write(fd, &byte, 1), 1);
    close(fd);
}

#endif
