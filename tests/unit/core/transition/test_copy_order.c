/* Guards the order in which a resume maps memory and copies contents, and what it and a pause do while they wait for
 * copies. */

#include "support.h"

#include <string.h>

#include "copies.h"

enum { COPIED = 8, OTHERS = 5, STEPS_BYTES = 256 };

static int32_t never(void *context) {
    (void)context;
    return 0;
}

/* The copies of the next call, in chunks of a MiB, last until its wait for the device with this number. */
static void hold_chunks(fixture_t *f, int wait) {
    f->saver.stores.copying.chunk_bytes = MIB;
    hold_copies_until_wait(f, wait);
}

/* The steps of a call, a letter each: C for a segment that got memory, H for a copy to the device, D for one from it, L for
 * host memory that was pinned. */
static void read_steps(char *steps) {
    static char trace[1 << 16];
    size_t count = 0;
    simulator()->read_trace(trace, sizeof trace);
    static const char *const calls[] = {"CcuMemCreate", "HcuMemcpyHtoDAsync", "DcuMemcpyDtoHAsync", "LcuMemHostRegister"};
    for (const char *line = trace; line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        assert_true(count + 1 < STEPS_BYTES);
        for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
            if (strncmp(line, calls[i] + 1, strlen(calls[i] + 1)) == 0) steps[count++] = calls[i][0];
    }
    steps[count] = '\0';
}

static void the_longest_copies_come_first(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    char steps[STEPS_BYTES];
    const uint64_t sizes[] = {4 * MIB, MIB, 3 * MIB, 2 * MIB, 6 * MIB, 3 * MIB, MIB};
    const char *const tags[] = {"empty", "1", "3", "2", "6", "3 again", "empty"};
    enum { COUNT = sizeof sizes / sizeof *sizes };
    uint64_t addresses[COUNT];
    for (uint32_t i = 0; i < COUNT; i++) {
        bool empty = strcmp(tags[i], "empty") == 0;
        addresses[i] = allocate(f, tags[i], empty ? TMS_BACKUP_NONE : TMS_BACKUP_PINNED, sizes[i]);
        fill(addresses[i], sizes[i], i);
    }
    ASSERT_OK(pause_all(f, &error), error);
    const char *const order[] = {"6", "3", "3 again", "2", "1", "empty", "empty"};
    for (uint64_t i = 0; i < COUNT; i++) {
        simulator()->fail_after("cuMemCreate", i, 1, CUDA_ERROR_UNKNOWN);
        assert_int_equal(resume_all(f, &error), TMS_DRIVER);
        assert_string_equal(error.tag, order[i]);
        assert_int_equal(physical_bytes(0), 0);
    }
    simulator()->trace(ON);
    simulator()->clear_counts();
    ASSERT_OK(resume_all(f, &error), error);
    read_steps(steps);
    simulator()->trace(OFF);
    assert_string_equal(steps, "CHCHCHCHCHCC");
    for (uint32_t i = 1; i + 1 < COUNT; i++) assert_filled(addresses[i], sizes[i], i);
}

static void the_rest_gets_memory_during_the_copies(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    char steps[STEPS_BYTES];
    const tms_selection_t selection = {.interrupted = never};
    uint64_t small[OTHERS], large = allocate(f, "large", TMS_BACKUP_PINNED, COPIED * MIB);
    fill(large, COPIED * MIB, 99);
    const char *const tags[OTHERS] = {"a", "b", "c", "d", "e"}; /* one tag would be one run */
    for (uint32_t i = 0; i < OTHERS; i++) fill(small[i] = allocate(f, tags[i], TMS_BACKUP_PINNED, MIB), MIB, i);
    ASSERT_OK(pause_all(f, &error), error);
    hold_chunks(f, 1);
    simulator()->trace(ON);
    simulator()->clear_counts();
    ASSERT_OK(resume_selected(f, &selection, &error), error);
    read_steps(steps);
    simulator()->trace(OFF);
    /* At most two chunks are in flight: that is where it waits. */
    assert_string_equal(steps, "CHHCCCCCHHHHHHHHHHH");
    assert_filled(large, COPIED * MIB, 99);
    for (uint32_t i = 0; i < OTHERS; i++) assert_filled(small[i], MIB, i);
}

static struct {
    tms_host_store_t *store;
    CUresult (*query)(CUevent);
} prefaulting;

/* Replaces cuEventQuery. Only prefaulted memory can be pinned, and other threads prefault it. */
static CUresult query_after_prefaulting(CUevent event) {
    tms_host_store_t *store = prefaulting.store;
    pthread_mutex_lock(&store->lock);
    while (store->planned_bytes + store->in_flight_bytes > 0) pthread_cond_wait(&store->changed, &store->lock);
    pthread_mutex_unlock(&store->lock);
    return prefaulting.query(event);
}

/* If part of the backups goes to the pool's memory, the rest is prepared during those copies. */
static void a_pause_pins_during_the_copies(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    char steps[STEPS_BYTES];
    const tms_selection_t selection = {.interrupted = never};
    f->saver.stores.host.chunk_bytes = MIB;
    atomic_store(&f->saver.host_policy, TMS_HOST_POOL);
    uint64_t before = allocate(f, "before", TMS_BACKUP_PINNED, 4 * MIB);
    fill(before, 4 * MIB, 1);
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(resume_all(f, &error), error);
    uint64_t after = allocate(f, "after", TMS_BACKUP_PINNED, 2 * MIB);
    fill(after, 2 * MIB, 2);
    prefaulting.store = &f->saver.stores.host;
    prefaulting.query = f->cuda->cuEventQuery;
    writable(f)->cuEventQuery = query_after_prefaulting;
    hold_chunks(f, 2); /* the first is for the work of the program */
    simulator()->trace(ON);
    simulator()->clear_counts();
    ASSERT_OK(pause_selected(f, &selection, &error), error);
    read_steps(steps);
    simulator()->trace(OFF);
    assert_string_equal(steps, "DDLLDDDD");
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(before, 4 * MIB, 1);
    assert_filled(after, 2 * MIB, 2);
}

/* If the driver does not report whether a copy has completed, the call waits for it. */
static void if_the_event_query_fails_it_waits(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    char steps[STEPS_BYTES];
    const tms_selection_t selection = {.interrupted = never};
    uint64_t large = allocate(f, "large", TMS_BACKUP_PINNED, 3 * MIB);
    fill(large, 3 * MIB, 1);
    allocate(f, "empty", TMS_BACKUP_NONE, MIB);
    ASSERT_OK(pause_all(f, &error), error);
    hold_chunks(f, 1);
    simulator()->trace(ON);
    simulator()->clear_counts();
    simulator()->fail_after("cuEventQuery", 0, 2, CUDA_ERROR_UNKNOWN);
    ASSERT_OK(resume_selected(f, &selection, &error), error);
    assert_int_equal(simulator()->calls("cuEventQuery"), 2);
    assert_int_equal(simulator()->calls("cuEventSynchronize"), 2);
    read_steps(steps);
    simulator()->trace(OFF);
    assert_string_equal(steps, "CHHHC");
    assert_filled(large, 3 * MIB, 1);
}

static void a_failure_ahead_of_the_copies_undoes_everything(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const tms_selection_t selection = {.interrupted = never};
    uint64_t first = allocate(f, "first", TMS_BACKUP_PINNED, COPIED * MIB);
    uint64_t second = allocate(f, "second", TMS_BACKUP_PINNED, MIB), third = allocate(f, "third", TMS_BACKUP_NONE, MIB);
    fill(first, COPIED * MIB, 1);
    fill(second, MIB, 2);
    ASSERT_OK(pause_all(f, &error), error);
    hold_chunks(f, 1); /* for the end of its copies */
    simulator()->clear_counts();
    simulator()->fail_after("cuMemCreate", 2, 1, CUDA_ERROR_OUT_OF_MEMORY);
    assert_int_equal(resume_selected(f, &selection, &error), TMS_OUT_OF_DEVICE_MEMORY);
    assert_string_equal(error.tag, "third");
    assert_string_equal(error.call, "cuMemCreate");
    assert_non_null(strstr(error.message, "Everything stays paused"));
    assert_int_equal(simulator()->calls("cuMemcpyHtoDAsync"), 2); /* the other chunks are no longer copied */
    assert_int_equal(physical_bytes(0), 0);
    const uint64_t addresses[] = {first, second, third};
    for (size_t i = 0; i < 3; i++) assert_int_equal(state_of(f, addresses[i]), TMS_SEGMENT_PAUSED);
    ASSERT_OK(resume_selected(f, &selection, &error), error);
    assert_filled(first, COPIED * MIB, 1);
    assert_filled(second, MIB, 2);
}

#define TEST(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(the_longest_copies_come_first),
        TEST(the_rest_gets_memory_during_the_copies),
        TEST(a_pause_pins_during_the_copies),
        TEST(if_the_event_query_fails_it_waits),
        TEST(a_failure_ahead_of_the_copies_undoes_everything),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
