/* Guards that memory is no slack as long as a kernel may write to it: allocations made while its free waits for the device
 * get other memory, on every thread. What a free that has ended leaves is in test_runs.c. */

#include "neighbours.h"
#include "support.h"

enum { GATE = 1, FREED = 1, THREADS = 4 };

typedef struct work {
    fixture_t *fixture;
    uint64_t address;
} work_t;

static void *free_on_thread(void *argument) {
    const work_t *work = argument;
    free_at(work->fixture, work->address);
    return NULL;
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
    pthread_t freer, allocators[THREADS];
    work_t works[THREADS];
    make_run(f, "a", TMS_BACKUP_NONE, at);
    work_t freed = {.fixture = f, .address = at[FREED]};
    CUstream stream = launch_behind_gate(f, GATE, at[FREED]);
    assert_int_equal(pthread_create(&freer, NULL, free_on_thread, &freed), 0);
    simulator()->wait_until_synchronizing();
    assert_int_equal(slack_bytes(f), 0);
    for (int i = 0; i < THREADS; i++) {
        works[i] = (work_t){.fixture = f};
        assert_int_equal(pthread_create(&allocators[i], NULL, allocate_on_thread, &works[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(allocators[i], NULL), 0);
        assert_false(is_in_run(at, works[i].address));
    }
    simulator()->open_gate(GATE);
    assert_int_equal(pthread_join(freer, NULL), 0);
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
    pthread_t freer;
    make_run(f, "a", TMS_BACKUP_NONE, at);
    for (int i = 0; i < NEIGHBOURS; i++)
        if (i != FREED) free_at(f, at[i]);
    work_t freed = {.fixture = f, .address = at[FREED]}, meanwhile = {.fixture = f};
    CUstream stream = launch_behind_gate(f, GATE, at[FREED]);
    assert_int_equal(pthread_create(&freer, NULL, free_on_thread, &freed), 0);
    simulator()->wait_until_synchronizing();
    assert_int_equal(physical_bytes(0), NEIGHBOURS * NEIGHBOUR_BYTES);
    (void)allocate_on_thread(&meanwhile); /* of the slack that other frees have left */
    assert_true(is_in_run(at, meanwhile.address) && meanwhile.address != at[FREED]);
    simulator()->open_gate(GATE);
    assert_int_equal(pthread_join(freer, NULL), 0);
    destroy_stream(f, stream);
    assert_filled(meanwhile.address, NEIGHBOUR_BYTES, (uint32_t)meanwhile.address);
    free_at(f, meanwhile.address);
    assert_int_equal(physical_bytes(0), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(allocations_meanwhile_get_other_memory, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(the_free_of_the_only_segment_waits_too, setup_one_device, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
