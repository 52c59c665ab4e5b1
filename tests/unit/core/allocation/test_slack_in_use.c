/* Guards that memory is no slack as long as a kernel may write to it: allocations made while its free waits for the device
 * get other memory, on every thread. What a free that has ended leaves is in test_runs.c. */

#include "support.h"

#include <sched.h>

#include "neighbours.h"

enum { GATE = 1, OTHER_GATE = 2, FREED = 1, THREADS = 4 };

typedef struct work {
    pthread_t thread;
    fixture_t *fixture;
    uint64_t address;
    _Atomic bool ended;
} work_t;

static void *free_on_thread(void *argument) {
    work_t *work = argument;
    free_at(work->fixture, work->address);
    atomic_store(&work->ended, true);
    return NULL;
}

/* Returns once the free waits for the device. */
static void begin_free(work_t *work, fixture_t *f, uint64_t address) {
    const uint64_t waits = simulator()->calls("cuCtxSynchronize");
    *work = (work_t){.fixture = f, .address = address};
    assert_int_equal(pthread_create(&work->thread, NULL, free_on_thread, work), 0);
    while (simulator()->calls("cuCtxSynchronize") == waits && !atomic_load(&work->ended)) sched_yield();
    assert_false(atomic_load(&work->ended));
    simulator()->wait_until_synchronizing();
}

static void *allocate_on_thread(void *argument) {
    work_t *work = argument;
    work->address = allocate(work->fixture, "a", TMS_BACKUP_NONE, NEIGHBOUR_BYTES);
    fill(work->address, NEIGHBOUR_BYTES, (uint32_t)work->address);
    return NULL;
}

static bool is_in_run(const uint64_t *at, uint64_t address) {
    return address >= at[0] && address < at[NEIGHBOURS - 1] + NEIGHBOUR_BYTES;
}

static void allocations_meanwhile_get_other_memory(void **state) {
    fixture_t *f = *state;
    uint64_t at[NEIGHBOURS];
    work_t freed, works[THREADS];
    make_run(f, "a", TMS_BACKUP_NONE, at);
    CUstream stream = launch_behind_gate(f, GATE, at[FREED]);
    begin_free(&freed, f, at[FREED]);
    assert_int_equal(slack_bytes(f), 0);
    for (int i = 0; i < THREADS; i++) {
        works[i] = (work_t){.fixture = f};
        assert_int_equal(pthread_create(&works[i].thread, NULL, allocate_on_thread, &works[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(works[i].thread, NULL), 0);
        assert_false(is_in_run(at, works[i].address));
    }
    simulator()->open_gate(GATE);
    assert_int_equal(pthread_join(freed.thread, NULL), 0);
    destroy_stream(f, stream);
    assert_int_equal(slack_bytes(f), NEIGHBOUR_BYTES);
    for (int i = 0; i < THREADS; i++) assert_filled(works[i].address, NEIGHBOUR_BYTES, (uint32_t)works[i].address);
    work_t last = {.fixture = f};
    (void)allocate_on_thread(&last);
    assert_int_equal(last.address, at[FREED]);
    assert_filled(last.address, NEIGHBOUR_BYTES, (uint32_t)last.address);
}

/* The rest of the run is slack. Its memory stays until the free has ended. */
static void the_free_of_the_only_segment_waits_too(void **state) {
    fixture_t *f = *state;
    uint64_t at[NEIGHBOURS];
    work_t freed, meanwhile = {.fixture = f};
    make_run(f, "a", TMS_BACKUP_NONE, at);
    for (int i = 0; i < NEIGHBOURS; i++)
        if (i != FREED) free_at(f, at[i]);
    CUstream stream = launch_behind_gate(f, GATE, at[FREED]);
    begin_free(&freed, f, at[FREED]);
    assert_int_equal(physical_bytes(0), NEIGHBOURS * NEIGHBOUR_BYTES);
    (void)allocate_on_thread(&meanwhile); /* of the slack that other frees have left */
    assert_true(is_in_run(at, meanwhile.address) && meanwhile.address != at[FREED]);
    simulator()->open_gate(GATE);
    assert_int_equal(pthread_join(freed.thread, NULL), 0);
    destroy_stream(f, stream);
    assert_filled(meanwhile.address, NEIGHBOUR_BYTES, (uint32_t)meanwhile.address);
    free_at(f, meanwhile.address);
    assert_int_equal(physical_bytes(0), 0);
}

/* Work of device 1 that writes to the address once OTHER_GATE is open. */
static CUstream work_on_device_1(fixture_t *f, uint64_t address) {
    tms_error_t error;
    const tms_error_context_t context = {.operation = "test", .device = 1};
    CUstream stream = NULL;
    ASSERT_OK(tms_devices_enter(&f->devices, 1, &context, &error), error);
    ASSERT_OK(tms_peers_refresh(&f->saver, &error), error);
    assert_int_equal(f->cuda->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    assert_int_equal(simulator()->launch_add(stream, address, MIB, 1, OTHER_GATE), CUDA_SUCCESS);
    f->last_gate = OTHER_GATE;
    tms_devices_leave(&f->devices, 1);
    return stream;
}

/* The free waits for device 0 only. Before it has ended, device 1 gets access, and uses the memory. */
static void a_device_that_gets_access_during_the_wait_is_waited_for(void **state) {
    fixture_t *f = *state;
    enum { WAITS = 3 }; /* the first one for device 0, the second one for both */
    uint64_t at[NEIGHBOURS];
    work_t freed;
    make_run(f, "a", TMS_BACKUP_NONE, at);
    CUstream stream = launch_behind_gate(f, GATE, at[FREED]);
    const uint64_t waits = simulator()->calls("cuCtxSynchronize");
    begin_free(&freed, f, at[FREED]);
    CUstream other = work_on_device_1(f, at[FREED]);
    assert_int_equal(run_at(f, at[0])->accessible, 3);
    simulator()->open_gate(GATE);
    while (simulator()->calls("cuCtxSynchronize") < waits + WAITS && !atomic_load(&freed.ended)) sched_yield();
    assert_false(atomic_load(&freed.ended));
    assert_int_equal(slack_bytes(f), 0);
    simulator()->open_gate(OTHER_GATE);
    assert_int_equal(pthread_join(freed.thread, NULL), 0);
    assert_int_equal(slack_bytes(f), NEIGHBOUR_BYTES);
    destroy_stream(f, stream);
    destroy_stream(f, other);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(allocations_meanwhile_get_other_memory, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(the_free_of_the_only_segment_waits_too, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(a_device_that_gets_access_during_the_wait_is_waited_for, setup_two_devices,
                                        teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
