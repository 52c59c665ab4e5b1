/* Guards guard mode where calls fail: a pause does not fail because of it, a failed resume leaves everything guarded, and
 * nothing leaks. */
#include "support/guard_fixture.h"

#include "core/transition/pending.h"

enum { SEGMENTS = 2, BYTES = 4 << 20 };

/* The call after `succeed` others of its name. */
typedef struct failing {
    const char *call;
    uint64_t succeed;
} failing_t;

static void allocate_both(fixture_t *f, uint64_t *addresses) {
    addresses[0] = allocate(f, "kv", TMS_BACKUP_NONE, BYTES);
    addresses[1] = allocate(f, "weights", TMS_BACKUP_PINNED, BYTES);
    fill(addresses[1], BYTES, 1);
}

static void free_both(fixture_t *f, const uint64_t *addresses) {
    tms_error_t error;
    for (int i = 0; i < SEGMENTS; i++) assert_int_equal(tms_free_address(&f->saver, addresses[i], &error), TMS_OK);
    assert_int_equal(physical_bytes(0), 0);
    assert_int_equal(counters_of(f).guarded_bytes, 0);
    assert_nothing_waits(&f->saver);
}

/* The segments are active again, with their contents. */
static void assert_resumed(fixture_t *f, const uint64_t *addresses) {
    tms_error_t error;
    ASSERT_OK(resume_all(f, &error), error);
    assert_guard_bytes(addresses[0], BYTES);
    assert_filled(addresses[1], BYTES, 1);
    assert_int_equal(counters_of(f).guarded_bytes, 0);
    assert_int_equal(physical_bytes(0), SEGMENTS * BYTES);
}

static void a_pause_does_not_fail_because_of_the_guard(void **state) {
    fixture_t *f = *state;
    /* The first of some names belongs to the wait for the device. */
    const failing_t calls[] = {{"cuMemAddressReserve", 0},
                               {"cuMemCreate", 0},
                               {"cuMemMap", 0},
                               {"cuMemMap", 1},
                               {"cuMemMap", 2},
                               {"cuMemMap", 4},
                               {"cuMemSetAccess", 0},
                               {"cuMemSetAccess", 1},
                               {"cuMemSetAccess", 2},
                               {"cuDevicePrimaryCtxRetain", 1},
                               {"cuCtxPushCurrent_v2", 1},
                               {"cuStreamCreate", 0},
                               {"cuMemsetD8Async", 0},
                               {"cuStreamSynchronize", 0}};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        tms_error_t error;
        uint64_t addresses[SEGMENTS], before = counters_of(f).guard_failures_total, guarded = 0;
        for (int s = 0; s < SEGMENTS; s++) addresses[s] = allocate(f, "kv", TMS_BACKUP_NONE, BYTES);
        uint64_t fired = simulator()->failures_fired();
        simulator()->fail_after(calls[i].call, calls[i].succeed, 1, CUDA_ERROR_UNKNOWN);
        ASSERT_OK(pause_all(f, &error), error);
        if (simulator()->failures_fired() != fired + 1) fail_msg("%s was not called so often", calls[i].call);
        assert_int_equal(counters_of(f).guard_failures_total, before + 1);
        for (int s = 0; s < SEGMENTS; s++) {
            assert_int_equal(state_of(f, addresses[s]), TMS_SEGMENT_PAUSED);
            const tms_segment_t *segment = tms_segment_of(tms_registry_find(&f->saver.registry, addresses[s]));
            if (segment->guarded > 0) assert_guard_bytes(addresses[s], BYTES);
            guarded += segment->guarded;
        }
        assert_int_equal(guarded, BYTES); /* the other one */
        assert_int_equal(counters_of(f).guarded_bytes, guarded);
        ASSERT_OK(resume_all(f, &error), error);
        for (int s = 0; s < SEGMENTS; s++) assert_guard_bytes(addresses[s], BYTES);
        free_both(f, addresses);
    }
}

static void a_part_that_could_not_be_undone_is_unmapped_later(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    for (int freed = 0; freed < 2; freed++) {
        uint64_t address = allocate(f, "kv", TMS_BACKUP_NONE, BYTES);
        simulator()->fail_after("cuMemMap", 2, 1, CUDA_ERROR_UNKNOWN);
        simulator()->fail_after("cuMemUnmap", 1, 1, CUDA_ERROR_UNKNOWN);
        ASSERT_OK(pause_all(f, &error), error);
        assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
        assert_int_equal(tms_segment_of(tms_registry_find(&f->saver.registry, address))->guarded, PAGE);
        assert_int_equal(counters_of(f).guarded_bytes, PAGE);
        if (!freed) ASSERT_OK(resume_all(f, &error), error);
        if (!freed) assert_guard_bytes(address, BYTES);
        assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
        assert_int_equal(physical_bytes(0), 0);
        assert_int_equal(counters_of(f).guarded_bytes, 0);
        assert_nothing_waits(&f->saver);
    }
}

static void a_failed_resume_leaves_everything_guarded(void **state) {
    fixture_t *f = *state;
    const failing_t calls[] = {{"cuCtxSynchronize", 0}, {"cuMemUnmap", 0},      {"cuMemUnmap", 1},
                               {"cuMemCreate", 0},      {"cuMemCreate", 1},     {"cuMemMap", 0},
                               {"cuMemMap", 1},         {"cuMemSetAccess", 0},  {"cuMemSetAccess", 1},
                               {"cuStreamCreate", 0},   {"cuMemsetD8Async", 0}, {"cuMemcpyHtoDAsync_v2", 0}};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        tms_error_t error;
        uint64_t addresses[SEGMENTS];
        allocate_both(f, addresses);
        ASSERT_OK(pause_all(f, &error), error);
        simulator()->fail_after(calls[i].call, calls[i].succeed, 1, CUDA_ERROR_UNKNOWN);
        if (resume_all(f, &error) != TMS_DRIVER) fail_msg("%s was not called so often", calls[i].call);
        assert_int_equal(counters_of(f).guarded_bytes, SEGMENTS * BYTES); /* before memory is read that may not be there */
        for (int s = 0; s < SEGMENTS; s++) {
            assert_int_equal(state_of(f, addresses[s]), TMS_SEGMENT_PAUSED);
            assert_guard_bytes(addresses[s], BYTES);
        }
        assert_int_equal(physical_bytes(0), PAGE);
        assert_resumed(f, addresses);
        free_both(f, addresses);
    }
    assert_int_equal(counters_of(f).guard_failures_total, 0);
}

static int32_t stop(void *context) {
    (*(int *)context)++;
    return 1;
}

static void a_cancelled_resume_leaves_everything_guarded(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    int asked = 0;
    const tms_selection_t selection = {.interrupted = stop, .interrupt_context = &asked};
    uint64_t addresses[SEGMENTS], other = allocate(f, "other", TMS_BACKUP_NONE, 2 * MIB);
    const char *const tags[] = {"kv", "weights"};
    tms_selection_t both = selection;
    both.tags = tags;
    both.tag_count = 2;
    allocate_both(f, addresses);
    ASSERT_OK(pause_tag(f, "kv", &error), error);
    ASSERT_OK(pause_tag(f, "weights", &error), error);
    CUstream stream = launch_behind_gate(f, 1, other);
    assert_int_equal(resume_selected(f, &both, &error), TMS_INTERRUPTED);
    assert_true(asked > 0);
    for (int s = 0; s < SEGMENTS; s++) assert_guard_bytes(addresses[s], BYTES);
    simulator()->open_gate(1);
    destroy_stream(f, stream);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(addresses[1], BYTES, 1);
}

static void a_page_that_is_not_released_is_quarantined(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const failing_t calls[] = {{"cuMemUnmap", SEGMENTS}, {"cuMemRelease", 0}, {"cuMemAddressFree", 0}};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        uint64_t addresses[SEGMENTS];
        allocate_both(f, addresses);
        ASSERT_OK(pause_all(f, &error), error);
        simulator()->fail_after(calls[i].call, calls[i].succeed, 1, CUDA_ERROR_UNKNOWN);
        ASSERT_OK(resume_all(f, &error), error);
        assert_int_equal(counters_of(f).quarantined_handles + counters_of(f).quarantined_ranges, i == 0 ? 2 : 1);
        ASSERT_OK(pause_all(f, &error), error); /* releases it, and makes another */
        assert_int_equal(counters_of(f).quarantined_handles + counters_of(f).quarantined_ranges, 0);
        assert_int_equal(physical_bytes(0), PAGE);
        assert_resumed(f, addresses);
        free_both(f, addresses);
    }
}

static void a_free_that_cannot_unmap_the_page_is_retried(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "kv", TMS_BACKUP_NONE, BYTES);
    ASSERT_OK(pause_all(f, &error), error);
    simulator()->fail_after("cuMemUnmap", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    assert_int_equal(counters_of(f).quarantined_ranges, 1);
    assert_int_equal(counters_of(f).guarded_bytes, BYTES);
    tms_reclaim_all(&f->saver);
    assert_int_equal(counters_of(f).guarded_bytes, 0);
    assert_int_equal(physical_bytes(0), 0);
    assert_nothing_waits(&f->saver);
}

/* Late reads may be part of the capture's graph, and waiting for the device would invalidate it. */
static void a_free_during_a_capture_is_deferred(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t identity = 0, address = allocate(f, "kv", TMS_BACKUP_NONE, BYTES);
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(tms_capture_table_begin(&f->saver, NULL, &identity, &error), error);
    assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    assert_int_equal(counters_of(f).deferred_frees, 1);
    assert_guard_bytes(address, BYTES);
    assert_true(tms_capture_end_of(&f->saver, identity));
    assert_int_equal(counters_of(f).guarded_bytes, 0);
    assert_nothing_waits(&f->saver);
}

/* The device may still be filling the page, so it stays mapped until the device has been waited for. */
static void a_page_that_may_be_written_is_not_unmapped(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "kv", TMS_BACKUP_NONE, BYTES);
    simulator()->fail_after("cuStreamSynchronize", 0, 1000, CUDA_ERROR_UNKNOWN);
    simulator()->fail_after("cuCtxSynchronize", 1, 1000, CUDA_ERROR_UNKNOWN);
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(counters_of(f).guard_failures_total, 1);
    assert_int_equal(counters_of(f).deferred_frees, 1);
    assert_int_equal(physical_bytes(0), PAGE);
    simulator()->fail_after("cuStreamSynchronize", 0, 0, 0);
    simulator()->fail_after("cuCtxSynchronize", 0, 0, 0);
    ASSERT_OK(resume_all(f, &error), error);
    assert_int_equal(physical_bytes(0), BYTES);
    assert_guard_bytes(address, BYTES);
    assert_nothing_waits(&f->saver);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(a_pause_does_not_fail_because_of_the_guard), ONE(a_part_that_could_not_be_undone_is_unmapped_later),
        ONE(a_failed_resume_leaves_everything_guarded),  ONE(a_cancelled_resume_leaves_everything_guarded),
        ONE(a_page_that_is_not_released_is_quarantined), ONE(a_free_that_cannot_unmap_the_page_is_retried),
        ONE(a_free_during_a_capture_is_deferred),        ONE(a_page_that_may_be_written_is_not_unmapped),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
