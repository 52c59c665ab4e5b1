/* The stores behind one interface: space, contents, undoing, and views that outlive them. */

#include "support.h"

#include <string.h>

static const tms_error_context_t CONTEXT = {.operation = "test", .device = 0};
static const tms_backup_kind_t KINDS[] = {TMS_BACKUP_PINNED, TMS_BACKUP_MMAP, TMS_BACKUP_DISK};
enum { KIND_COUNT = sizeof KINDS / sizeof *KINDS };

static uint64_t held_bytes(fixture_t *f) {
    return atomic_load(&f->saver.stores.host_bytes) + atomic_load(&f->saver.stores.disk_bytes);
}

static void prepare(fixture_t *f, tms_backup_t *backup, tms_copier_t *copier) {
    tms_error_t error;
    ASSERT_OK(tms_copier_open(copier, &f->saver.stores, 0, &CONTEXT, &error), error);
    ASSERT_OK(tms_backup_prepare(backup, &f->saver.stores, &CONTEXT, &error), error);
}

static void contents_make_the_round_trip(void **state) {
    fixture_t *f = *state;
    const uint64_t bytes = 3 * MIB + 17;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, bytes);
    f->saver.stores.chunk_bytes = MIB; /* several chunks, the last one odd */
    for (uint32_t i = 0; i < KIND_COUNT; i++) {
        tms_error_t error;
        tms_copier_t copier;
        tms_backup_t backup = {.kind = KINDS[i], .bytes = bytes};
        fill(address, bytes, i);
        prepare(f, &backup, &copier);
        assert_true(held_bytes(f) >= bytes);
        ASSERT_OK(tms_backup_save(&backup, &copier, address, &CONTEXT, &error), error);
        ASSERT_OK(tms_copier_wait(&copier, &CONTEXT, &error), error);
        assert_false(backup.saved); /* contents count from the commit on */
        tms_backup_commit(&backup);
        memset((void *)address, 0, bytes);
        ASSERT_OK(tms_backup_load(&backup, &copier, address, &CONTEXT, &error), error);
        ASSERT_OK(tms_copier_wait(&copier, &CONTEXT, &error), error);
        assert_filled(address, bytes, i);
        tms_copier_close(&copier);
        tms_backup_destroy(&backup, &f->saver.stores);
        assert_int_equal(held_bytes(f), 0);
    }
}

static void cancel_takes_away_what_prepare_made_and_nothing_else(void **state) {
    fixture_t *f = *state;
    for (uint32_t i = 0; i < KIND_COUNT; i++) {
        tms_copier_t copier;
        tms_backup_t backup = {.kind = KINDS[i], .bytes = MIB};
        prepare(f, &backup, &copier);
        tms_backup_cancel(&backup, &f->saver.stores);
        assert_int_equal(held_bytes(f), 0);
        tms_copier_close(&copier);

        prepare(f, &backup, &copier);
        tms_backup_commit(&backup);
        uint64_t held = held_bytes(f);
        tms_copier_close(&copier);
        prepare(f, &backup, &copier); /* a second pause uses what is there */
        tms_backup_cancel(&backup, &f->saver.stores);
        assert_int_equal(held_bytes(f), held);
        tms_copier_close(&copier);
        tms_backup_destroy(&backup, &f->saver.stores);
    }
}

static void discard_keeps_files_and_retained_memory(void **state) {
    fixture_t *f = *state;
    for (uint32_t i = 0; i < KIND_COUNT; i++) {
        tms_copier_t copier;
        tms_backup_t backup = {.kind = KINDS[i], .bytes = MIB};
        bool on_disk = KINDS[i] == TMS_BACKUP_DISK;
        prepare(f, &backup, &copier);
        tms_backup_commit(&backup);
        tms_copier_close(&copier);
        tms_backup_discard(&backup, true);
        assert_int_equal(backup.saved, !on_disk);
        assert_true(held_bytes(f) >= MIB);
        tms_backup_discard(&backup, false);
        assert_false(backup.saved);
        assert_int_equal(held_bytes(f) > 0, on_disk);
        tms_backup_destroy(&backup, &f->saver.stores);
        assert_int_equal(held_bytes(f), 0);
    }
}

static void a_host_buffer_lives_as_long_as_its_last_reference(void **state) {
    fixture_t *f = *state;
    for (uint32_t i = 0; i < 2; i++) {
        tms_copier_t copier;
        tms_backup_t backup = {.kind = KINDS[i], .bytes = MIB};
        prepare(f, &backup, &copier);
        tms_copier_close(&copier);
        tms_host_buffer_t *view = backup.host;
        tms_host_buffer_acquire(view);
        tms_backup_destroy(&backup, &f->saver.stores);
        memset(view->memory, 7, MIB);
        assert_int_equal(held_bytes(f), MIB);
        tms_host_buffer_drop(view);
        assert_int_equal(held_bytes(f), 0);
    }
}

static void no_pinned_memory_is_the_hosts_shortage(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_backup_t backup = {.kind = TMS_BACKUP_PINNED, .bytes = MIB};
    simulator()->fail_after("cuMemHostAlloc", 0, 1, CUDA_ERROR_OUT_OF_MEMORY);
    assert_int_equal(tms_backup_prepare(&backup, &f->saver.stores, &CONTEXT, &error), TMS_OUT_OF_HOST_MEMORY);
    assert_non_null(strstr(error.message, "mmap")); /* what to do instead */
    assert_null(backup.host);
    assert_int_equal(held_bytes(f), 0);
}

static void mmap_beyond_reason_is_refused(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_backup_t backup = {.kind = TMS_BACKUP_MMAP, .bytes = (uint64_t)1 << 60};
    assert_int_equal(tms_backup_prepare(&backup, &f->saver.stores, &CONTEXT, &error), TMS_OUT_OF_HOST_MEMORY);
    assert_string_equal(error.call, "mmap");
    assert_int_equal(held_bytes(f), 0);
}

static void a_copier_leaves_nothing_open(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_copier_t copier = {.open = false};
    tms_sim_usage_t usage;
    tms_copier_close(&copier); /* never opened */
    simulator()->fail_after("cuStreamCreate", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(tms_copier_open(&copier, &f->saver.stores, 0, &CONTEXT, &error), TMS_DRIVER);
    assert_int_equal(simulator()->calls("cuCtxPushCurrent"), simulator()->calls("cuCtxPopCurrent"));
    ASSERT_OK(tms_copier_open(&copier, &f->saver.stores, 0, &CONTEXT, &error), error);
    tms_copier_close(&copier);
    simulator()->usage(0, &usage);
    assert_int_equal(usage.streams, 0);
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(contents_make_the_round_trip),
        ONE(cancel_takes_away_what_prepare_made_and_nothing_else),
        ONE(discard_keeps_files_and_retained_memory),
        ONE(a_host_buffer_lives_as_long_as_its_last_reference),
        ONE(no_pinned_memory_is_the_hosts_shortage),
        ONE(mmap_beyond_reason_is_refused),
        ONE(a_copier_leaves_nothing_open),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
