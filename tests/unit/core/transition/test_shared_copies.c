/* Guards how the bytes of shared backups move: through the pieces of pinned memory, from blocks of any size beside each
 * other, and after memory was filled. */
#include "support/shared_store.h"

#include <dlfcn.h>
#include <errno.h>
#include <sched.h>
#include <semaphore.h>

#include "backup/shared/ring.h"

#define PART  (TMS_SHARED_LANE_BYTES / 2)
#define LARGE (5 * PART)

static void objects_larger_than_a_piece_of_pinned_memory(void **state) {
    fixture_t *f = *state;
    const uint64_t one = allocate(f, "a", KEPT, LARGE), two = allocate_filled(f, "a", KEPT, LARGE, 9);
    for (uint32_t i = 0; i < 5; i++) fill(one + i * PART, PART, i); /* the pattern repeats, and each part is another */
    refuse_registration(f);
    pause_copying(f, 2 * LARGE, 0);
    const tms_counters_t paused = counters_of(f);
    resume(f);
    const tms_counters_t resumed = counters_of(f);
    assert_true(paused.shared_file_nanoseconds_total > 0);
    assert_true(paused.shared_copy_nanoseconds_total > 0);
    assert_true(resumed.shared_file_nanoseconds_total > paused.shared_file_nanoseconds_total);
    assert_true(resumed.shared_copy_nanoseconds_total > paused.shared_copy_nanoseconds_total);
    for (uint32_t i = 0; i < 5; i++) assert_filled(one + i * PART, PART, i);
    assert_filled(two, LARGE, 9);
}

/* The object after a small block is that of a segment which has nothing else. */
static void a_private_block_before_an_object(void **state) {
    fixture_t *f = *state;
    enum { SMALL = 4096 };
    const uint64_t first = allocate(f, "a", KEPT, 2 * BYTES);
    memset((void *)(uintptr_t)first, 9, SMALL);
    fill(first + BYTES, BYTES, 1);
    knowledge_t known = {
        .addresses = {first}, .ranges = {{first, first + SMALL}, {first + BYTES, first + 2 * BYTES}}, .count = 2};
    pause_live(f, &known, SMALL + BYTES, 0);
    const tms_shared_name_t name = only_object();
    resume(f);
    assert_filled(first + BYTES, BYTES, 1);
    const uint64_t alone = allocate_filled(f, "b", KEPT, BYTES, 1);
    pause_live(f, &known, SMALL, 2 * BYTES);
    assert_string_equal(only_object().text, name.text);
    resume(f);
    assert_filled(alone, BYTES, 1);
}

/* The copies are made on other streams than the one that fills the memory. */
static void memory_is_filled_before_contents_are_copied(void **state) {
    fixture_t *f = *state;
    static char trace[1 << 16];
    tms_error_t error;
    const uint64_t address = allocate_filled(f, "a", KEPT, 2 * BYTES, 1);
    knowledge_t known = {.addresses = {address}, .ranges = {{address, address + BYTES}}, .count = 1};
    const tms_selection_t zeroing = {.zero = 1};
    refuse_registration(f);
    pause_live(f, &known, BYTES, 0);
    simulator()->trace(ON);
    ASSERT_OK(resume_selected(f, &zeroing, &error), error);
    assert_true(simulator()->read_trace(trace, sizeof trace) < sizeof trace);
    simulator()->trace(OFF);
    const char *filled = strstr(trace, "cuMemsetD8Async");
    assert_non_null(filled);
    const char *waited = strstr(filled, "cuStreamSynchronize"), *copied = strstr(trace, "cuMemcpyHtoDAsync");
    assert_non_null(waited);
    assert_non_null(copied);
    assert_true(waited < copied);
    assert_filled_part(address, 0, BYTES, 1);
    assert_int_equal(*(const char *)(uintptr_t)(address + BYTES), 0);
}

/* ---- the registrar beside a call ---- */

static fixture_t *competing;
static sem_t may_register;
static _Atomic unsigned registrations; /* begun */
static unsigned begun_in_call;         /* those that had begun when the resume made memory */
static CUresult (*creates)(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                           unsigned long long flags);

/* The first registration lasts until the resume has begun. */
static CUresult register_slowly(void *memory, size_t bytes, unsigned int flags) {
    if (flags & CU_MEMHOSTREGISTER_READ_ONLY && atomic_fetch_add(&registrations, 1) == 0)
        assert_int_equal(sem_wait(&may_register), 0);
    return registers(memory, bytes, flags);
}

static bool registrar_runs(fixture_t *f) {
    pthread_mutex_lock(&store_of(f)->lock);
    const bool runs = store_of(f)->registrar_runs;
    pthread_mutex_unlock(&store_of(f)->lock);
    return runs;
}

/* The resume makes its memory: lets the registration end, and waits until the registrar has ended or goes on. */
static CUresult create_beside(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                              unsigned long long flags) {
    if (begun_in_call == 0) {
        assert_int_equal(sem_post(&may_register), 0);
        while (registrar_runs(competing) && atomic_load(&registrations) == 1) sched_yield();
        begun_in_call = atomic_load(&registrations);
    }
    return creates(handle, bytes, properties, flags);
}

static void the_registrar_gives_up_when_a_resume_begins(void **state) {
    fixture_t *f = competing = *state;
    uint64_t addresses[3];
    for (uint32_t i = 0; i < 3; i++) addresses[i] = allocate_filled(f, "a", KEPT, BYTES, i);
    assert_int_equal(sem_init(&may_register, 0, 0), 0);
    registers = f->cuda->cuMemHostRegister;
    creates = f->cuda->cuMemCreate;
    writable(f)->cuMemHostRegister = register_slowly;
    pause_copying(f, 3 * BYTES, 0);
    while (atomic_load(&registrations) == 0) sched_yield();
    writable(f)->cuMemCreate = create_beside;
    resume(f);
    assert_int_equal(begun_in_call, 1);
    for (uint32_t i = 0; i < 3; i++) assert_filled(addresses[i], BYTES, i);
    settle(f);
    assert_int_equal(sem_destroy(&may_register), 0);
}

static _Atomic unsigned too_early; /* registrations that began within the quiet time */

static CUresult register_and_look(void *memory, size_t bytes, unsigned int flags) {
    pthread_mutex_lock(&store_of(competing)->lock);
    const bool early = tms_wait_now() < store_of(competing)->quiet_until;
    pthread_mutex_unlock(&store_of(competing)->lock);
    if (flags & CU_MEMHOSTREGISTER_READ_ONLY) atomic_fetch_add(early ? &too_early : &registrations, 1);
    return registers(memory, bytes, flags);
}

static void no_registration_holds_up_other_replicas(void **state) {
    fixture_t *f = competing = *state;
    for (uint32_t i = 0; i < 3; i++) allocate_filled(f, "a", KEPT, BYTES, i);
    registers = f->cuda->cuMemHostRegister;
    atomic_store(&registrations, 0);
    writable(f)->cuMemHostRegister = register_and_look;
    const double before = tms_wait_now();
    pause_copying(f, 3 * BYTES, 0);
    while (registrar_runs(f)) sched_yield();
    assert_int_equal(registrations, 3);
    assert_int_equal(too_early, 0);
    assert_true(store_of(f)->quiet_until >= before + TMS_SHARED_QUIET_SECONDS);
    resume(f);
    settle(f);
}

/* ---- a registrar whose thread cannot be started ---- */

static tms_shared_store_t *without_thread; /* its thread is not started; NULL: every thread is */
static int refused;                        /* threads */
static pthread_t waiter;
static sem_t waiter_has_lock;
static int woken; /* the result of the waiter's last wait */

/* Waits for the registrar's end, as a close and a drain do. */
static void *await_registrar(void *argument) {
    enum { HANGS_AFTER_SECONDS = 10 };
    tms_shared_store_t *store = argument;
    struct timespec limit;
    clock_gettime(CLOCK_MONOTONIC, &limit);
    limit.tv_sec += HANGS_AFTER_SECONDS;
    pthread_mutex_lock(&store->lock);
    sem_post(&waiter_has_lock);
    for (woken = 0; store->registrar_runs && woken == 0;)
        woken = pthread_cond_timedwait(&store->changed, &store->lock, &limit);
    pthread_mutex_unlock(&store->lock);
    return NULL;
}

/* The waiter has the lock until it sleeps, so the caller cannot end the registrar before. */
int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument) {
    int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) =
        (int (*)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *))(uintptr_t)dlsym(RTLD_NEXT,
                                                                                                  "pthread_create");
    if (!without_thread || argument != without_thread) return real(thread, attributes, start, argument);
    if (refused++ > 0) return EAGAIN;
    assert_int_equal(real(&waiter, NULL, await_registrar, without_thread), 0);
    assert_int_equal(sem_wait(&waiter_has_lock), 0);
    return EAGAIN;
}

static void a_registrar_that_cannot_start_wakes_who_waits_for_its_end(void **state) {
    fixture_t *f = *state;
    allocate_filled(f, "a", KEPT, BYTES, 1);
    assert_int_equal(sem_init(&waiter_has_lock, 0, 0), 0);
    tms_log_init(&f->log, TMS_LOG_SILENT);
    without_thread = store_of(f);
    pause_copying(f, BYTES, 0);
    assert_true(refused > 0);
    assert_int_equal(pthread_join(waiter, NULL), 0);
    without_thread = NULL;
    assert_int_equal(woken, 0);
    assert_false(registrar_runs(f));
    resume(f);
    settle(f);
    assert_int_equal(sem_destroy(&waiter_has_lock), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(objects_larger_than_a_piece_of_pinned_memory), TEST(a_private_block_before_an_object),
        TEST(memory_is_filled_before_contents_are_copied),  TEST(the_registrar_gives_up_when_a_resume_begins),
        TEST(no_registration_holds_up_other_replicas),      TEST(a_registrar_that_cannot_start_wakes_who_waits_for_its_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
