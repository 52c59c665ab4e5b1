/* Guards TMS_VERIFY_BACKUPS: a pause finds each byte that it should have copied and did not, and what it copies for that is
 * no progress. test_changed_disk_blocks.c has the tests of files. */

#include "changes.h"

#include <string.h>

#include "temporary.h"

static void a_verified_pause_fails_if_it_left_a_changed_byte_out(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    retain(f);
    f->config.verify_backups = true;
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    uint64_t other = allocate_filled(f, "b", TMS_BACKUP_MMAP, BYTES, 2);
    launch_equal(f);
    cycle_copying(f, 2 * BYTES, 0);
    cycle_copying(f, 0, 2 * BYTES);
    for (int i = 0; i < 2; i++) { /* the equal one comes before, and after */
        const uint64_t changed = i == 0 ? other : address;
        add_one(changed + 5 * CHUNK + 3);
        assert_int_equal(pause_all(f, &error), TMS_INVALID_STATE);
        assert_int_equal(error.address, changed);
        assert_non_null(strstr(error.message, "another byte 2621443 than the device"));
        assert_int_equal(state_of(f, changed), TMS_SEGMENT_ACTIVE);
        assert_null(view_of(f, changed, BYTES).host);
        cycle_copying(f, BYTES, BYTES);
    }
    subtract_one(address + 5 * CHUNK + 3);
    subtract_one(other + 5 * CHUNK + 3);
    assert_filled(address, BYTES, 1);
    assert_filled(other, BYTES, 2);
    assert_nothing_waits(&f->saver);
}

static void a_verified_pause_of_live_bytes_compares_those(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    retain(f);
    f->config.verify_backups = true;
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    knowledge_t known = {.addresses = {address},
                         .ranges = {{address + CHUNK, address + 2 * CHUNK}, {address + 4 * CHUNK, address + 5 * CHUNK}},
                         .count = 2};
    const tms_selection_t selection = {.find_live = tell, .live_context = &known};
    launch_equal(f);
    pause_live(f, &known, 2 * CHUNK, 0);
    resume(f);
    fill(address + 2 * CHUNK, CHUNK, 3); /* free */
    pause_live(f, &known, 0, 2 * CHUNK);
    resume(f);
    add_one(address + 4 * CHUNK + 1);
    assert_int_equal(pause_selected(f, &selection, &error), TMS_INVALID_STATE);
    assert_non_null(strstr(error.message, "another byte 2097153 than the device"));
}

/* Contents that were copied as a whole are not compared with what the backup held before. */
static void a_verified_pause_accepts_another_live_set(void **state) {
    fixture_t *f = *state;
    retain(f);
    f->config.verify_backups = true;
    uint64_t a = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1),
             b = allocate_filled(f, "b", TMS_BACKUP_PINNED, BYTES, 2);
    const uint64_t low = a < b ? a : b, high = a < b ? b : a;
    knowledge_t known = {.addresses = {low, high}, .ranges = {{low, low + CHUNK}, {high, high + BYTES}}, .count = 2};
    pause_live(f, &known, CHUNK + BYTES, 0);
    resume(f);
    known.ranges[0].end += CHUNK;
    pause_live(f, &known, 2 * CHUNK, BYTES);
    resume(f);
    pause_live(f, &known, 0, 2 * CHUNK + BYTES);
    resume(f);
}

/* It compares in parts of 8 MiB. */
static void a_verified_pause_compares_to_the_end(void **state) {
    static const tms_backup_kind_t kinds[] = {TMS_BACKUP_PINNED, TMS_BACKUP_DISK};
    fixture_t *f = *state;
    const uint64_t bytes = 16 * MIB + CHUNK, places[] = {8 * MIB, bytes - 1};
    char directory[TEMPORARY_BYTES];
    tms_error_t error;
    retain(f);
    assert_non_null(make_temporary_directory(directory, "changes"));
    ASSERT_OK(tms_disk_set_directory(&f->saver.stores.disk, directory, &error), error);
    f->config.verify_backups = true;
    launch_equal(f);
    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        uint64_t address = allocate_filled(f, "a", kinds[kind], bytes, 1);
        for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
            cycle_copying(f, bytes, 0);
            add_one(address + places[i]);
            assert_int_equal(pause_all(f, &error), TMS_INVALID_STATE);
            assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
        }
        ASSERT_OK(tms_free_address(&f->saver, address, &error), error);
    }
    assert_int_equal(remove_temporary_directory(directory), 0);
}

/* Verification copies everything once more, which is no progress of the pause. */
static void progress_counts_what_is_saved(void **state) {
    fixture_t *f = *state;
    const uint64_t odd = 3 * CHUNK + 777;
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    (void)allocate_filled(f, "b", TMS_BACKUP_MMAP, odd, 2);
    for (int verified = 0; verified < 2; verified++) {
        f->config.verify_backups = verified;
        cycle_with_progress(f, verified ? 0 : BYTES + odd, verified ? BYTES + odd : 0);
        cycle_with_progress(f, 0, BYTES + odd);
        add_one(address + CHUNK);
        cycle_with_progress(f, CHUNK, BYTES - CHUNK + odd);
    }
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(a_verified_pause_fails_if_it_left_a_changed_byte_out),
        ONE(a_verified_pause_of_live_bytes_compares_those),
        ONE(a_verified_pause_accepts_another_live_set),
        ONE(a_verified_pause_compares_to_the_end),
        ONE(progress_counts_what_is_saved),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
