/* Guards backups retained after a resume when a later pause fails: copies that it has not begun to overwrite keep their
 * contents, the others have none until the next pause, and all keep their address. */

#include "support.h"

#include <string.h>

#include "copies.h"
#include "temporary.h"

static const uint64_t BYTES = 4 * MIB;

/* Active, filled with `seed`, with that retained. */
static uint64_t allocate_retained(fixture_t *f, const char *tag, tms_backup_kind_t backup, uint32_t seed) {
    tms_error_t error;
    uint64_t address = allocate(f, tag, backup, BYTES);
    atomic_store(&f->saver.host_policy, TMS_HOST_RETAIN);
    fill(address, BYTES, seed);
    ASSERT_OK(pause_tag(f, tag, &error), error);
    ASSERT_OK(resume_tag(f, tag, &error), error);
    return address;
}

static void assert_copy(fixture_t *f, uint64_t address, const void *where, uint32_t seed) {
    view_t view = view_of(f, address, BYTES);
    assert_ptr_equal(view.host, where);
    assert_filled((uint64_t)view.host, BYTES, seed);
    tms_host_buffer_drop(view.buffer);
}

/* The next pause makes a copy of `seed` at the same place. */
static void assert_renewed(fixture_t *f, uint64_t address, const void *where, uint32_t seed) {
    tms_error_t error;
    fill(address, BYTES, seed);
    ASSERT_OK(pause_all(f, &error), error);
    assert_copy(f, address, where, seed);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(address, BYTES, seed);
    assert_copy(f, address, where, seed);
}

static uint64_t buffer_bytes(fixture_t *f) { return atomic_load(&f->saver.stores.host.buffer_bytes); }

/* ---- nothing has been copied ---- */

static void a_pause_that_fails_before_it_copies_keeps_the_contents(void **state) {
    fixture_t *f = *state;
    static const tms_backup_kind_t kinds[] = {TMS_BACKUP_PINNED, TMS_BACKUP_MMAP};
    /* The two passes that compute fingerprints create streams as well. They may fail. */
    static const struct {
        const char *name;
        uint64_t failures;
    } calls[] = {{"cuCtxSynchronize", 1}, {"cuStreamCreate", 3}, {"cuMemcpyDtoHAsync", 1}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        tms_error_t error;
        uint64_t address = allocate_retained(f, "a", kinds[i], 1);
        view_t view = view_of(f, address, BYTES);
        for (size_t j = 0; j < sizeof calls / sizeof *calls; j++) {
            fill(address, BYTES, 2);
            simulator()->fail_after(calls[j].name, 0, calls[j].failures, CUDA_ERROR_UNKNOWN);
            assert_int_equal(pause_all(f, &error), TMS_DRIVER);
            assert_string_equal(error.call, calls[j].name);
            assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
            assert_copy(f, address, view.host, 1);
        }
        assert_renewed(f, address, view.host, 3);
        tms_host_buffer_drop(view.buffer);
        assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
        assert_int_equal(buffer_bytes(f), 0);
    }
}

/* The device may have failed in the middle of a write to unpinned memory. */
static void a_copy_that_fails_with_its_device_counts_as_begun(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate_retained(f, "a", TMS_BACKUP_PINNED, 1);
    view_t view = view_of(f, address, BYTES);
    simulator()->fail_after("cuMemcpyDtoHAsync", 0, 1, CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_int_equal(pause_all(f, &error), TMS_DEVICE_LOST);
    assert_null(view_of(f, address, BYTES).host);
    assert_renewed(f, address, view.host, 2);
    tms_host_buffer_drop(view.buffer);
}

static void a_pause_that_finds_no_host_memory_for_others_keeps_the_contents(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate_retained(f, "a", TMS_BACKUP_PINNED, 1);
    view_t view = view_of(f, address, BYTES);
    uint64_t other = allocate(f, "b", TMS_BACKUP_PINNED, BYTES);
    fill(address, BYTES, 2);
    f->saver.stores.host.limits.cap_bytes = BYTES;
    assert_int_equal(pause_all(f, &error), TMS_OUT_OF_HOST_MEMORY);
    f->saver.stores.host.limits.cap_bytes = UINT64_MAX;
    assert_int_equal(state_of(f, other), TMS_SEGMENT_ACTIVE);
    assert_copy(f, address, view.host, 1);
    assert_int_equal(buffer_bytes(f), BYTES);
    assert_renewed(f, address, view.host, 3);
    tms_host_buffer_drop(view.buffer);
}

/* ---- something has ---- */

/* The first is overwritten, the second is not reached. */
static void a_pause_that_fails_among_its_copies_keeps_those_that_it_has_not_begun(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t first = allocate_retained(f, "a", TMS_BACKUP_PINNED, 1),
             second = allocate_retained(f, "b", TMS_BACKUP_PINNED, 2);
    view_t views[] = {view_of(f, first, BYTES), view_of(f, second, BYTES)};
    fill(first, BYTES, 3);
    fill(second, BYTES, 4);
    simulator()->fail_after("cuMemcpyDtoHAsync", 1, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(pause_all(f, &error), TMS_DRIVER);
    assert_null(view_of(f, first, BYTES).host);
    assert_copy(f, second, views[1].host, 2);
    assert_int_equal(buffer_bytes(f), 2 * BYTES); /* the memory of both stays */
    assert_renewed(f, first, views[0].host, 5);
    assert_copy(f, second, views[1].host, 4);
    for (int i = 0; i < 2; i++) tms_host_buffer_drop(views[i].buffer);
}

static void a_pause_that_fails_at_the_end_of_its_copies_moves_nothing(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate_retained(f, "a", TMS_BACKUP_MMAP, 1);
    view_t view = view_of(f, address, BYTES);
    fill(address, BYTES, 2);
    for (uint32_t i = 0; i < 2; i++) { /* the second has no contents to begin with, so that nothing is compared before it */
        simulator()->fail_after("cuStreamSynchronize", 1 - i, 1, CUDA_ERROR_UNKNOWN);
        assert_int_equal(pause_all(f, &error), TMS_DRIVER);
        assert_null(view_of(f, address, BYTES).host);
        assert_int_equal(buffer_bytes(f), BYTES);
    }
    assert_renewed(f, address, view.host, 2);
    tms_host_buffer_drop(view.buffer);
}

static int32_t after_the_first_chunk(void *context) {
    (void)context;
    return simulator()->calls("cuMemcpyDtoHAsync") > 0;
}

/* A view stays valid, and shows what the copy has left. */
static void a_pause_cancelled_among_its_copies_moves_nothing(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate_retained(f, "a", TMS_BACKUP_PINNED, 1);
    view_t view = view_of(f, address, BYTES);
    const tms_selection_t selection = {.interrupted = after_the_first_chunk};
    fill(address, BYTES, 2);
    copy_slowly(f, MIB);
    simulator()->clear_counts();
    assert_int_equal(pause_selected(f, &selection, &error), TMS_INTERRUPTED);
    release_copies();
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    assert_null(view_of(f, address, BYTES).host);
    assert_filled_part((uint64_t)view.host, 0, MIB, 2);
    assert_filled_part((uint64_t)view.host, 3 * MIB, MIB, 1);
    assert_renewed(f, address, view.host, 3);
    tms_host_buffer_drop(view.buffer);
}

typedef struct knowledge {
    uint64_t address;
    tms_live_range_t ranges[2];
} knowledge_t;

static int32_t tell(void *context, tms_live_t *live) {
    const knowledge_t *known = context;
    *live = (tms_live_t){.allocations = &known->address, .allocation_count = 1, .ranges = known->ranges, .range_count = 2};
    return 0;
}

/* Parts are gathered before they are queued: nothing is overwritten until the first is queued. */
static void a_pause_of_live_bytes_does_the_same(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate_retained(f, "a", TMS_BACKUP_PINNED, 1);
    view_t view = view_of(f, address, BYTES);
    knowledge_t known = {address, {{address, address + MIB}, {address + 2 * MIB, address + 3 * MIB}}};
    const tms_selection_t selection = {.find_live = tell, .live_context = &known};
    static const char *const calls[] = {"cuMemGetAccess", "cuMemcpyBatchAsync"};
    static const uint64_t failures[] = {3, 1}; /* the two passes that compute fingerprints ask for access as well */
    for (int i = 0; i < 2; i++) {
        fill(address, BYTES, 2);
        simulator()->fail_after(calls[i], 0, failures[i], CUDA_ERROR_UNKNOWN);
        assert_int_equal(pause_selected(f, &selection, &error), TMS_DRIVER);
        assert_string_equal(error.call, calls[i]);
        if (i == 0)
            assert_copy(f, address, view.host, 1);
        else
            assert_null(view_of(f, address, BYTES).host);
    }
    assert_renewed(f, address, view.host, 3);
    tms_host_buffer_drop(view.buffer);
}

/* ---- release of the memory ---- */

static void memory_without_contents_is_released_with_its_policy_or_its_allocation(void **state) {
    fixture_t *f = *state;
    for (int freed = 0; freed < 2; freed++) {
        tms_error_t error;
        uint64_t address = allocate_retained(f, "a", TMS_BACKUP_PINNED, 1);
        fill(address, BYTES, 2);
        simulator()->fail_after("cuStreamSynchronize", 1, 1, CUDA_ERROR_UNKNOWN); /* after that of the comparison */
        assert_int_equal(pause_all(f, &error), TMS_DRIVER);
        assert_null(view_of(f, address, BYTES).host);
        assert_int_equal(buffer_bytes(f), BYTES);
        if (!freed) {
            atomic_store(&f->saver.host_policy, TMS_HOST_RELEASE);
            ASSERT_OK(pause_all(f, &error), error);
            ASSERT_OK(resume_all(f, &error), error);
            assert_filled(address, BYTES, 2);
            assert_int_equal(buffer_bytes(f), 0);
        }
        assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
        assert_int_equal(buffer_bytes(f), 0);
    }
}

/* If contents go elsewhere, or nowhere. */
static void memory_without_contents_is_released_when_a_pause_saves_elsewhere(void **state) {
    fixture_t *f = *state;
    static const tms_backup_kind_t choices[] = {TMS_BACKUP_NONE, TMS_BACKUP_DISK};
    char directory[TEMPORARY_BYTES];
    tms_error_t error;
    assert_non_null(make_temporary_directory(directory, "retained"));
    ASSERT_OK(tms_disk_set_directory(&f->saver.stores.disk, directory, &error), error);
    for (size_t i = 0; i < 2; i++) {
        const tms_selection_t selection = {.has_backup = 1, .backup = choices[i]};
        uint64_t address = allocate_retained(f, "a", TMS_BACKUP_PINNED, 1);
        fill(address, BYTES, 2);
        simulator()->fail_after("cuStreamSynchronize", 1, 1, CUDA_ERROR_UNKNOWN);
        assert_int_equal(pause_all(f, &error), TMS_DRIVER);
        assert_null(view_of(f, address, BYTES).host);
        ASSERT_OK(pause_selected(f, &selection, &error), error);
        assert_int_equal(buffer_bytes(f), 0);
        ASSERT_OK(resume_all(f, &error), error);
        if (choices[i] == TMS_BACKUP_DISK) assert_filled(address, BYTES, 2);
        assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    }
    assert_int_equal(remove_temporary_directory(directory), 0);
}

/* After a failed wait the device may still write there: the next pause waits for it before it copies. */
static void memory_with_copies_in_flight_is_reused_once_the_device_is_idle(void **state) {
    fixture_t *f = *state;
    enum { CHUNK = 8192 };
    static char trace[CHUNK];
    tms_error_t error;
    uint64_t address = allocate_retained(f, "a", TMS_BACKUP_PINNED, 1);
    view_t view = view_of(f, address, BYTES);
    tms_log_init(&f->log, TMS_LOG_SILENT);
    fill(address, BYTES, 2);
    simulator()->fail_after("cuStreamSynchronize", 1, 3, CUDA_ERROR_UNKNOWN);
    simulator()->fail_after("cuCtxSynchronize", 1, 1, CUDA_ERROR_UNKNOWN); /* not the wait that a pause begins with */
    assert_int_equal(pause_all(f, &error), TMS_DRIVER);
    assert_null(view_of(f, address, BYTES).host);
    simulator()->clear_counts();
    simulator()->trace(ON);
    assert_renewed(f, address, view.host, 2);
    simulator()->read_trace(trace, sizeof trace);
    const char *wait = strstr(trace, "cuCtxSynchronize"), *copy = strstr(trace, "cuMemcpyDtoHAsync");
    assert_true(wait && copy && wait < copy);
    tms_host_buffer_drop(view.buffer);
    assert_nothing_waits(&f->saver);
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(a_pause_that_fails_before_it_copies_keeps_the_contents),
        ONE(a_copy_that_fails_with_its_device_counts_as_begun),
        ONE(a_pause_that_finds_no_host_memory_for_others_keeps_the_contents),
        ONE(a_pause_that_fails_among_its_copies_keeps_those_that_it_has_not_begun),
        ONE(a_pause_that_fails_at_the_end_of_its_copies_moves_nothing),
        ONE(a_pause_cancelled_among_its_copies_moves_nothing),
        ONE(a_pause_of_live_bytes_does_the_same),
        ONE(memory_without_contents_is_released_with_its_policy_or_its_allocation),
        ONE(memory_without_contents_is_released_when_a_pause_saves_elsewhere),
        ONE(memory_with_copies_in_flight_is_reused_once_the_device_is_idle),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
