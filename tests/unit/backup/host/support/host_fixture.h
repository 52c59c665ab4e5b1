/* Shared by the tests of the host store: a store on the simulated GPU whose driver calls can be observed, and system calls
 * that can be made to fail. Included once in a program: it defines the calls of the C library that fail.
 *
 * The chunks of this store have CHUNK bytes. Sizes in the tests are whole huge pages (2 MiB), to which blocks are rounded.
 */
#ifndef TMS_TEST_HOST_FIXTURE_H
#define TMS_TEST_HOST_FIXTURE_H

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "simulated_cuda.h"

#include "backup/host/store.h"

#define CHUNK  MIB
#define UNUSED __attribute__((unused)) /* by some of the programs */

enum { MAX_REGISTERED = 64, MAX_GIVEN_BACK = 256 };

typedef struct host_fixture {
    tms_log_t log;
    tms_driver_t driver;
    tms_devices_t devices;
    tms_quarantine_t quarantine;
    tms_host_store_t store;
    tms_driver_table_t table; /* what the store calls: the simulator's entry points, some of them observed */
} host_fixture_t;

/* The ranges registered with the driver, in order, and those unregistered. */
typedef struct registrations {
    void *addresses[MAX_REGISTERED];
    uint64_t bytes[MAX_REGISTERED];
    int count, unregistered;
} registrations_t;
UNUSED static registrations_t registrations(void);
/* Registering or unregistering blocks until it is released; how many calls block now. */
UNUSED static void hold_registering(void);
UNUSED static void release_registering(void);
UNUSED static void hold_unregistering(void);
UNUSED static void release_unregistering(void);
UNUSED static void await_held(int calls);

/* A store on one or two devices whose primary contexts are active; teardown_host fails the test if memory, threads or
 * quarantined chunks are left. */
UNUSED static int setup_host(void **state);
UNUSED static int teardown_host(void **state);

#define ASSERT_OK(call, error) assert_ok_here((call), &(error), __FILE__, __LINE__)
UNUSED static void assert_ok_here(tms_status_t status, const tms_error_t *error, const char *file, int line);

/* A started batch of `count` buffers with these sizes, on device 0; awaited. They are dropped with `policy`. */
UNUSED static struct tms_host_batch *start_batch(host_fixture_t *f, tms_backup_kind_t kind, const uint64_t *bytes,
                                                 size_t count, tms_host_policy_t policy, tms_host_buffer_t **buffers);
UNUSED static void await_all(tms_host_buffer_t *buffer);
/* One usable buffer; its batch is destroyed. */
UNUSED static tms_host_buffer_t *make_buffer(host_fixture_t *f, tms_backup_kind_t kind, uint64_t bytes,
                                             tms_host_policy_t policy);

UNUSED static uint64_t pinned_bytes(void); /* that the simulator has pinned */
/* Whether the store still has this chunk. A released chunk may have been reused by a thread or ASan. */
UNUSED static bool is_mapped(const void *chunk);
/* Asserts that the store holds nothing after it has settled. */
UNUSED static void assert_empty(host_fixture_t *f);

/* System calls: `call` succeeds `succeed` times more and then fails `fail` times. */
typedef enum host_call { CALL_MMAP, CALL_MUNMAP, CALL_MINCORE, CALL_THREAD, HOST_CALLS } host_call_t;
UNUSED static void fail_call(host_call_t call, int succeed, int fail);
UNUSED static int calls_made(host_call_t call); /* since the test began */
/* Called at the end of each mincore, which the store calls once for each prefaulted part, with its number. */
UNUSED static void on_touch(void (*watch)(int count));

/* ---- system calls ---- */

static struct {
    _Atomic int made, succeed, fail;
} faults[HOST_CALLS];
static void (*_Atomic touch_watch)(int);
/* Chunks that were unmapped, the oldest overwritten first. */
static struct {
    _Atomic unsigned count;
    _Atomic uintptr_t chunks[MAX_GIVEN_BACK];
} given_back;

static void fail_call(host_call_t call, int succeed, int fail) {
    atomic_store(&faults[call].succeed, succeed);
    atomic_store(&faults[call].fail, fail);
}

static int calls_made(host_call_t call) { return atomic_load(&faults[call].made); }

static void on_touch(void (*watch)(int count)) { atomic_store(&touch_watch, watch); }

/* `count`: the calls including this one. */
static bool is_to_fail_counted(host_call_t call, int *count) {
    *count = atomic_fetch_add(&faults[call].made, 1) + 1;
    if (atomic_load(&faults[call].fail) <= 0) return false;
    if (atomic_fetch_sub(&faults[call].succeed, 1) > 0) return false;
    return atomic_fetch_sub(&faults[call].fail, 1) > 0;
}

static bool is_to_fail(host_call_t call) {
    int count;
    return is_to_fail_counted(call, &count);
}

#define REAL(name) ((__typeof__(&(name)))dlsym(RTLD_NEXT, #name))

/* Only the store's requests: the test's own memory, thread stacks and the simulator's memory do not count. */
static bool is_the_stores(size_t bytes, int protection, int flags) {
    return bytes >= 2 * MIB && protection == (PROT_READ | PROT_WRITE) && flags & MAP_NORESERVE && !(flags & MAP_FIXED);
}

void *mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset) {
    if (is_the_stores(bytes, protection, flags) && is_to_fail(CALL_MMAP)) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    void *memory = REAL(mmap)(address, bytes, protection, flags, file, offset);
    if (memory == MAP_FAILED || !is_the_stores(bytes, protection, flags)) return memory;
    for (int i = 0; i < MAX_GIVEN_BACK; i++) { /* the store has it again */
        uintptr_t chunk = atomic_load(&given_back.chunks[i]);
        if (chunk >= (uintptr_t)memory && chunk - (uintptr_t)memory < bytes) atomic_store(&given_back.chunks[i], 0);
    }
    return memory;
}

int munmap(void *address, size_t bytes) {
    if (bytes == CHUNK && is_to_fail(CALL_MUNMAP)) {
        errno = ENOMEM;
        return -1;
    }
    if (bytes != CHUNK) return REAL(munmap)(address, bytes);
    /* Before the call: after it the store may reuse the address at once. */
    _Atomic uintptr_t *place = &given_back.chunks[atomic_fetch_add(&given_back.count, 1) % MAX_GIVEN_BACK];
    atomic_store(place, (uintptr_t)address);
    int result = REAL(munmap)(address, bytes);
    if (result != 0) atomic_store(place, 0);
    return result;
}

int mincore(void *address, size_t bytes, unsigned char *resident) {
    int count;
    bool refused = is_to_fail_counted(CALL_MINCORE, &count);
    void (*watch)(int) = atomic_load(&touch_watch);
    int result = refused ? -1 : REAL(mincore)(address, bytes, resident);
    if (refused) errno = EAGAIN;
    if (watch) watch(count);
    return result;
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
    return is_to_fail(CALL_THREAD) ? EAGAIN : REAL(pthread_create)(thread, attributes, run, argument);
}

/* ---- watched driver calls ---- */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    registrations_t seen;
    bool hold_registering, hold_unregistering;
    int held;
} watched = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static registrations_t registrations(void) {
    pthread_mutex_lock(&watched.lock);
    registrations_t seen = watched.seen;
    pthread_mutex_unlock(&watched.lock);
    return seen;
}

static void set(bool *flag, bool value) {
    pthread_mutex_lock(&watched.lock);
    *flag = value;
    pthread_cond_broadcast(&watched.changed);
    pthread_mutex_unlock(&watched.lock);
}

static void hold_registering(void) { set(&watched.hold_registering, true); }
static void release_registering(void) { set(&watched.hold_registering, false); }
static void hold_unregistering(void) { set(&watched.hold_unregistering, true); }
static void release_unregistering(void) { set(&watched.hold_unregistering, false); }

static void await_held(int calls) {
    pthread_mutex_lock(&watched.lock);
    while (watched.held < calls) pthread_cond_wait(&watched.changed, &watched.lock);
    pthread_mutex_unlock(&watched.lock);
}

static void pass(const bool *hold) {
    watched.held++;
    pthread_cond_broadcast(&watched.changed);
    while (*hold) pthread_cond_wait(&watched.changed, &watched.lock);
    watched.held--;
}

static CUresult watched_register(void *host, size_t bytes, unsigned int flags) {
    pthread_mutex_lock(&watched.lock);
    pass(&watched.hold_registering);
    pthread_mutex_unlock(&watched.lock);
    CUresult result = CALL(cuMemHostRegister_v2, host, bytes, flags);
    pthread_mutex_lock(&watched.lock);
    if (result == CUDA_SUCCESS && watched.seen.count < MAX_REGISTERED) {
        watched.seen.addresses[watched.seen.count] = host;
        watched.seen.bytes[watched.seen.count++] = bytes;
    }
    pthread_mutex_unlock(&watched.lock);
    return result;
}

static CUresult watched_unregister(void *host) {
    pthread_mutex_lock(&watched.lock);
    pass(&watched.hold_unregistering);
    pthread_mutex_unlock(&watched.lock);
    CUresult result = CALL(cuMemHostUnregister, host);
    pthread_mutex_lock(&watched.lock);
    if (result == CUDA_SUCCESS) watched.seen.unregistered++;
    pthread_mutex_unlock(&watched.lock);
    return result;
}

/* ---- the store ---- */

static void assert_ok_here(tms_status_t status, const tms_error_t *error, const char *file, int line) {
    if (status == TMS_OK) return;
    print_error("%s:%d: %s: %s\n", file, line, tms_status_name(status), error->message);
    _fail(file, line);
}

static int setup_host(void **state) {
    const tms_error_context_t context = {.operation = "test", .device = 0};
    const tms_driver_table_t *driver = NULL;
    tms_error_t error;
    CALL(reset, 2, DEVICE_MEMORY);
    memset(&watched.seen, 0, sizeof watched.seen);
    for (int i = 0; i < HOST_CALLS; i++) {
        fail_call((host_call_t)i, 0, 0);
        atomic_store(&faults[i].made, 0);
    }
    on_touch(NULL);
    host_fixture_t *f = calloc(1, sizeof *f);
    assert_non_null(f);
    tms_log_init(&f->log, TMS_LOG_WARNING);
    tms_driver_init(&f->driver, getenv("TMS_CUDA_DRIVER"), &f->log);
    tms_devices_init(&f->devices, &f->driver);
    ASSERT_OK(tms_quarantine_init(&f->quarantine, &error), error);
    ASSERT_OK(tms_devices_load(&f->devices, &driver, NULL, &context, &error), error);
    f->table = *driver;
    f->table.cuMemHostRegister = watched_register;
    f->table.cuMemHostUnregister = watched_unregister;
    tms_driver_release(&f->driver);
    atomic_store(&f->driver.table, &f->table);
    for (int device = 0; device < 2; device++) { /* the first entry creates the context and keeps it */
        ASSERT_OK(tms_devices_enter(&f->devices, device, &context, &error), error);
        tms_devices_leave(&f->devices, device);
    }
    ASSERT_OK(tms_host_store_init(&f->store, &f->devices, &f->log, &f->quarantine, UINT64_MAX, 0, &error), error);
    f->store.chunk_bytes = CHUNK;
    f->store.prefaulting_threads = 3;
    CALL(clear_counts);
    *state = f;
    return 0;
}

static int teardown_host(void **state) {
    host_fixture_t *f = *state;
    for (int i = 0; i < HOST_CALLS; i++) fail_call((host_call_t)i, 0, 0);
    /* A failed test may have left them blocked. */
    release_registering();
    release_unregistering();
    tms_host_store_release(&f->store);
    assert_null(f->store.blocks);
    assert_int_equal(f->store.threads, 0);
    assert_int_equal(atomic_load(&f->store.buffer_bytes), 0);
    assert_int_equal(atomic_load(&f->store.resident_bytes), 0);
    assert_int_equal(atomic_load(&f->store.pooled_bytes), 0);
    assert_int_equal(f->store.planned_bytes + f->store.in_flight_bytes + f->store.reserving_bytes, 0);
    assert_true(tms_quarantine_is_empty(&f->quarantine));
    assert_int_equal(pinned_bytes(), 0);
    tms_quarantine_release(&f->quarantine);
    tms_devices_release(&f->devices);
    free(f);
    return 0;
}

static struct tms_host_batch *start_batch(host_fixture_t *f, tms_backup_kind_t kind, const uint64_t *bytes, size_t count,
                                          tms_host_policy_t policy, tms_host_buffer_t **buffers) {
    const tms_error_context_t context = {.operation = "pause", .device = 0};
    struct tms_host_batch *batch = NULL;
    tms_error_t error;
    ASSERT_OK(tms_host_batch_create(&batch, &f->store, &context, &error), error);
    for (size_t i = 0; i < count; i++) {
        const tms_host_request_t request = {.bytes = bytes[i], .device = 0, .kind = kind};
        ASSERT_OK(tms_host_batch_add(batch, &request, &buffers[i], &context, &error), error);
        atomic_store(&buffers[i]->policy, policy);
    }
    ASSERT_OK(tms_host_batch_start(batch, &context, &error), error);
    return batch;
}

static void await_all(tms_host_buffer_t *buffer) {
    const tms_error_context_t context = {.operation = "pause", .device = 0};
    tms_error_t error;
    for (uint64_t part = 0, done = 0; done < buffer->bytes; done += part) {
        ASSERT_OK(tms_host_buffer_await(buffer, done, NULL, &part, &context, &error), error);
        assert_true(part > 0);
    }
}

static tms_host_buffer_t *make_buffer(host_fixture_t *f, tms_backup_kind_t kind, uint64_t bytes, tms_host_policy_t policy) {
    tms_host_buffer_t *buffer = NULL;
    struct tms_host_batch *batch = start_batch(f, kind, &bytes, 1, policy, &buffer);
    await_all(buffer);
    tms_host_batch_destroy(batch);
    return buffer;
}

static uint64_t pinned_bytes(void) { return usage_of(0).host_bytes; }

static bool is_mapped(const void *chunk) {
    unsigned char resident;
    for (int i = 0; i < MAX_GIVEN_BACK; i++)
        if (atomic_load(&given_back.chunks[i]) == (uintptr_t)chunk) return false;
    return REAL(mincore)((void *)(uintptr_t)chunk, 1, &resident) == 0;
}

static void assert_empty(host_fixture_t *f) {
    tms_host_store_settle(&f->store);
    assert_int_equal(atomic_load(&f->store.buffer_bytes), 0);
    assert_int_equal(atomic_load(&f->store.resident_bytes), 0);
    assert_int_equal(atomic_load(&f->store.pooled_bytes), 0);
    assert_int_equal(pinned_bytes(), 0);
    assert_null(f->store.blocks);
}

#endif
