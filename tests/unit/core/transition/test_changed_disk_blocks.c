/* Guards disk backups that are retained: a pause writes only the blocks of a file that have changed. */

#include "changes.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "captured_stderr.h"
#include "temporary.h"

static char directory[TEMPORARY_BYTES];

static int setup(void **state) {
    tms_error_t error;
    if (setup_one_device(state) != 0) return -1;
    fixture_t *f = *state;
    if (!make_temporary_directory(directory, "disk-changes")) return -1;
    return tms_disk_set_directory(&f->saver.stores.disk, directory, &error) == TMS_OK ? 0 : -1;
}

static int end(void **state) {
    int result = teardown(state);
    return remove_temporary_directory(directory) == 0 ? result : -1;
}

static tms_disk_file_t *only_file(fixture_t *f) {
    tms_disk_file_t *file = f->saver.stores.disk.files;
    assert_non_null(file);
    assert_null(file->next);
    return file;
}

/* Changes a byte of the only file. Again: changes it back. */
static void damage(fixture_t *f, uint64_t offset) {
    uint8_t byte = 0;
    int fd = open(only_file(f)->path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, (off_t)offset), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)offset), 1);
    assert_int_equal(close(fd), 0);
}

/* A damaged block that a pause leaves alone is found by the resume. */
static void only_changed_blocks_are_written(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    char text[64];
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_DISK, BYTES, 1);
    cycle_copying(f, BYTES, 0);
    cycle_copying(f, 0, BYTES);
    damage(f, 2 * CHUNK + 9);
    damage(f, 5 * CHUNK + 9);
    add_one(address + 5 * CHUNK + 1);
    pause_copying(f, CHUNK, BYTES - CHUNK);
    assert_int_equal(resume_all(f, &error), TMS_BACKUP_IO);
    assert_string_equal(error.tag, "a");
    (void)snprintf(text, sizeof text, "bytes at offset %d", 2 * CHUNK);
    assert_non_null(strstr(error.message, text));
    assert_non_null(strstr(error.message, only_file(f)->path));
    damage(f, 2 * CHUNK + 9);
    resume(f);
    subtract_one(address + 5 * CHUNK + 1);
    assert_filled(address, BYTES, 1);
}

/* Blocks lie in the file, which has no gaps: two live ranges may share one. */
static void a_block_is_written_with_all_that_it_has(void **state) {
    fixture_t *f = *state;
    const uint64_t part = CHUNK / 4 * 3;
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_DISK, BYTES, 1);
    knowledge_t known = {.addresses = {address},
                         .ranges = {{address, address + part},
                                    {address + 2 * CHUNK, address + 2 * CHUNK + part},
                                    {address + 4 * CHUNK, address + 4 * CHUNK + part}},
                         .count = 3};
    pause_live(f, &known, 3 * part, 0); /* in blocks of 4, 4 and 1 quarters */
    resume(f);
    pause_live(f, &known, 0, 3 * part);
    resume(f);
    add_one(address + 4 * CHUNK); /* in the second block, and the whole range is compared at once */
    pause_live(f, &known, 3 * part - CHUNK, CHUNK);
    resume(f);
    add_one(address); /* in the first block, which begins the second range */
    pause_live(f, &known, CHUNK, 3 * part - CHUNK);
    resume(f);
    subtract_one(address);
    subtract_one(address + 4 * CHUNK);
    for (int i = 0; i < 3; i++) assert_filled_part(address, (uint64_t)2 * i * CHUNK, part, 1);
}

static void an_odd_size_has_a_last_block_of_its_own(void **state) {
    fixture_t *f = *state;
    const uint64_t bytes = 3 * CHUNK + 777;
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_DISK, bytes, 1);
    cycle_copying(f, bytes, 0);
    add_one(address + bytes - 1);
    cycle_copying(f, 777, bytes - 777);
    subtract_one(address + bytes - 1);
    cycle_copying(f, 777, bytes - 777);
    cycle_copying(f, 0, bytes);
    assert_filled(address, bytes, 1);
}

static void after_a_late_failure_the_whole_file_is_written(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_DISK, BYTES, 1);
    cycle_copying(f, BYTES, 0);
    add_one(address);
    add_one(address + 4 * CHUNK);
    simulator()->fail_after("cuMemcpyDtoHAsync", 1, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(pause_all(f, &error), TMS_DRIVER);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    cycle_copying(f, BYTES, 0);
    cycle_copying(f, 0, BYTES);
    subtract_one(address);
    subtract_one(address + 4 * CHUNK);
    assert_filled(address, BYTES, 1);
}

static void a_file_that_is_gone_is_made_again(void **state) {
    fixture_t *f = *state;
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_DISK, BYTES, 1);
    for (int i = 0; i < 2; i++) {
        cycle_copying(f, BYTES, 0);
        cycle_copying(f, 0, BYTES);
        assert_int_equal(unlink(only_file(f)->path), 0);
    }
    cycle_copying(f, BYTES, 0);
    assert_filled(address, BYTES, 1);
}

/* The next pause finds no contents, whether it fails or not. */
static void a_pause_that_fails_after_the_file_was_lost_has_no_contents(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_DISK, BYTES, 1);
    cycle_copying(f, BYTES, 0);
    assert_int_equal(unlink(only_file(f)->path), 0);
    simulator()->fail_after("cuMemcpyDtoHAsync", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(pause_all(f, &error), TMS_DRIVER);
    cycle_copying(f, BYTES, 0);
    assert_filled(address, BYTES, 1);
}

/* Nothing was copied, but the contents of the lost file are gone. */
static void a_lost_file_that_cannot_be_replaced_has_no_contents(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_segment_info_t row;
    struct rlimit usual;
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_DISK, BYTES, 1);
    cycle_copying(f, BYTES, 0);
    assert_int_equal(tms_inspect_find(&f->saver, address, 1, &row), TMS_OK);
    assert_int_equal(row.backup_bytes, BYTES);
    assert_int_equal(unlink(only_file(f)->path), 0);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &usual), 0);
    const struct rlimit small = {.rlim_cur = BYTES / 2, .rlim_max = usual.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    const tms_status_t status = pause_all(f, &error);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &usual), 0);
    assert_int_equal(status, TMS_BACKUP_IO);
    assert_null(f->saver.stores.disk.files);
    assert_int_equal(tms_inspect_find(&f->saver, address, 1, &row), TMS_OK);
    assert_int_equal(row.backup_bytes, 0);
    cycle_copying(f, BYTES, 0);
    assert_filled(address, BYTES, 1);
}

static void a_resume_that_does_not_retain_leaves_space_without_contents(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const tms_selection_t releasing = {.host_policy = TMS_HOST_RELEASE};
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_DISK, BYTES, 1);
    pause_copying(f, BYTES, 0);
    const ino_t number = only_file(f)->identity.number;
    ASSERT_OK(resume_selected(f, &releasing, &error), error);
    pause_copying(f, BYTES, 0);
    assert_int_equal(only_file(f)->identity.number, number);
    resume(f);
    assert_filled(address, BYTES, 1);
}

/* A region with another backup keeps the file only as long as its contents are valid. */
static void a_file_of_one_pause_goes_with_the_next_one_elsewhere(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    const tms_selection_t to_disk = {.has_backup = 1, .backup = TMS_BACKUP_DISK};
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    for (int i = 0; i < 2; i++) {
        ASSERT_OK(pause_selected_with_report(f, &to_disk, &report, &error), error);
        assert_int_equal(report.copied_bytes, i == 0 ? BYTES : 0);
        resume(f);
    }
    (void)only_file(f);
    pause_copying(f, BYTES, 0);
    assert_null(f->saver.stores.disk.files);
    resume(f);
    assert_filled(address, BYTES, 1);
}

static void a_verified_pause_reads_the_file(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    retain(f);
    f->config.verify_backups = true;
    launch_equal(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_DISK, BYTES, 1);
    cycle_copying(f, BYTES, 0);
    cycle_copying(f, 0, BYTES);
    add_one(address + 3 * CHUNK);
    assert_int_equal(pause_all(f, &error), TMS_INVALID_STATE);
    assert_non_null(strstr(error.message, "another byte 1572864 than the device"));
    cycle_copying(f, BYTES, 0);
    subtract_one(address + 3 * CHUNK);
    assert_filled(address, BYTES, 1);
}

static void progress_counts_what_is_written(void **state) {
    fixture_t *f = *state;
    const uint64_t odd = 3 * CHUNK + 777;
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_DISK, odd, 1);
    for (int verified = 0; verified < 2; verified++) {
        f->config.verify_backups = verified;
        cycle_with_progress(f, verified ? 0 : odd, verified ? odd : 0);
        add_one(address + odd - 1);
        cycle_with_progress(f, 777, odd - 777);
    }
}

/* Other files are left as they are, and the pause after writes only what has changed. */
static void a_verified_pause_writes_a_damaged_file_again(void **state) {
    fixture_t *f = *state;
    retain(f);
    f->config.verify_backups = true;
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_DISK, BYTES, 1);
    cycle_copying(f, BYTES, 0);
    uint64_t other = allocate_filled(f, "b", TMS_BACKUP_PINNED, BYTES, 2);
    cycle_copying(f, BYTES, BYTES);
    char text[4096];
    captured_stderr_t captured = capture_begin();
    for (int time = 0; time < 3; time++) {
        damage(f, 2 * CHUNK + 9);
        if (time == 1) add_one(address + 5 * CHUNK);
        cycle_with_progress(f, BYTES, BYTES);
    }
    capture_end(captured, text, sizeof text);
    assert_non_null(strstr(text, "warning: pause: a backup could not be"));
    assert_non_null(strstr(text, only_file(f)->path));
    assert_non_null(strstr(text, "so this pause writes them to the file again"));
    assert_null(strstr(strstr(text, "writes them") + 1, "writes them"));
    cycle_copying(f, 0, 2 * BYTES);
    subtract_one(address + 5 * CHUNK);
    cycle_copying(f, CHUNK, 2 * BYTES - CHUNK);
    assert_filled(address, BYTES, 1);
    assert_filled(other, BYTES, 2);
}

/* The disk fails while the damaged file is written again: nothing was released, and the next pause writes all of it. */
static void a_damaged_file_that_cannot_be_written_again_fails_the_pause(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    retain(f);
    f->config.verify_backups = true;
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_DISK, BYTES, 1);
    cycle_copying(f, BYTES, 0);
    damage(f, 2 * CHUNK + 9);
    simulator()->fail_after("cuMemcpyDtoHAsync", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(pause_all(f, &error), TMS_DRIVER);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    assert_filled(address, BYTES, 1);
    cycle_copying(f, BYTES, 0);
    assert_filled(address, BYTES, 1);
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup, end)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(only_changed_blocks_are_written),
        ONE(a_block_is_written_with_all_that_it_has),
        ONE(an_odd_size_has_a_last_block_of_its_own),
        ONE(after_a_late_failure_the_whole_file_is_written),
        ONE(a_file_that_is_gone_is_made_again),
        ONE(a_pause_that_fails_after_the_file_was_lost_has_no_contents),
        ONE(a_lost_file_that_cannot_be_replaced_has_no_contents),
        ONE(a_resume_that_does_not_retain_leaves_space_without_contents),
        ONE(a_file_of_one_pause_goes_with_the_next_one_elsewhere),
        ONE(a_verified_pause_reads_the_file),
        ONE(progress_counts_what_is_written),
        ONE(a_verified_pause_writes_a_damaged_file_again),
        ONE(a_damaged_file_that_cannot_be_written_again_fails_the_pause),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
