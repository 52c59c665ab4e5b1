/* Guards pauses with a store that plans by fingerprint, and the resumes that check what it has kept: which passes there are,
 * what the store gets, and what fails. The store is the tests' own (support/named_store.h). */

#include "support/named_store.h"

#include "captured_stderr.h"
#include "core/transition/pending.h"

static uint64_t launches(void) { return simulator()->calls("cuLaunchKernel"); }

/* Asserts how often a store has planned, and how often with fingerprints, since the last time. */
static void assert_planned(int times, int with_fingerprints) {
    assert_int_equal(named.planned, times);
    assert_int_equal(named.planned_with_fingerprints, with_fingerprints);
    named.planned = named.planned_with_fingerprints = 0;
}

static void pause_launching(fixture_t *f, uint64_t copied, uint64_t unchanged, uint64_t kernels) {
    simulator()->clear_counts();
    pause_copying(f, copied, unchanged);
    assert_int_equal(launches(), kernels);
}

static void resume_launching(fixture_t *f, uint64_t kernels) {
    simulator()->clear_counts();
    resume(f);
    assert_int_equal(launches(), kernels);
}

/* ---- the pass before the plan ---- */

static void contents_that_the_store_has_are_not_copied(void **state) {
    fixture_t *f = *state;
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_SHARED, BYTES, 1);
    pause_launching(f, BYTES, 0, 1);
    assert_planned(1, 1);
    resume_launching(f, 1);
    uint64_t other = allocate_filled(f, "b", TMS_BACKUP_SHARED, BYTES, 1);
    pause_launching(f, 0, 2 * BYTES, 1);
    assert_planned(2, 2);
    assert_int_equal(named.count, 1);
    resume_launching(f, 1);
    assert_filled(address, BYTES, 1);
    assert_filled(other, BYTES, 1);
    add_one(other + 3);
    pause_launching(f, BYTES, BYTES, 1);
    resume_launching(f, 1);
    subtract_one(other + 3);
    assert_filled(other, BYTES, 1);
}

/* Blocks of one size that lie at other places, one of them with bytes that fill no vector. */
static void blocks_are_found_wherever_they_lie(void **state) {
    fixture_t *f = *state;
    const uint64_t size = 2 * CHUNK + 5, in_first = 0, in_second = CHUNK + 512;
    uint64_t first = allocate_filled(f, "a", TMS_BACKUP_SHARED, BYTES, 1),
             second = allocate(f, "b", TMS_BACKUP_SHARED, BYTES);
    memcpy((void *)(second + in_second), (void *)(first + in_first), size);
    knowledge_t known = {.addresses = {first < second ? first : second, first < second ? second : first}};
    for (int i = 0; i < 2; i++) {
        const uint64_t begin = known.addresses[i] + (known.addresses[i] == first ? in_first : in_second);
        known.ranges[known.count++] = (tms_live_range_t){begin, begin + size};
    }
    pause_live(f, &known, 2 * size, 0);
    assert_int_equal(named.count, 1);
    resume(f);
    pause_live(f, &known, 2 * 5, 2 * (size - 5));
    resume(f);
    assert_filled_part(first, in_first, size, 1);
    assert_memory_equal((void *)(second + in_second), (void *)first, size);
}

static void retained_contents_are_read_once(void **state) {
    fixture_t *f = *state;
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_SHARED, BYTES, 1);
    pause_launching(f, BYTES, 0, 1);
    resume_launching(f, 1);
    for (int cycle = 0; cycle < 2; cycle++) {
        pause_launching(f, 0, BYTES, 1);
        resume_launching(f, 1);
    }
    assert_planned(3, 3);
    assert_filled(address, BYTES, 1);
}

static void another_layout_needs_a_pass_of_its_own(void **state) {
    fixture_t *f = *state;
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_SHARED, BYTES, 1);
    knowledge_t known = {
        .addresses = {address}, .ranges = {{address, address + CHUNK}, {address + CHUNK, address + 4 * CHUNK}}, .count = 2};
    pause_launching(f, BYTES, 0, 1);
    resume(f);
    simulator()->clear_counts();
    pause_live(f, &known, 4 * CHUNK, 0);
    assert_int_equal(launches(), 2); /* of what is held, and of what is planned */
    resume(f);
    simulator()->clear_counts();
    pause_live(f, &known, 0, 4 * CHUNK);
    assert_int_equal(launches(), 1);
    resume(f);
    assert_planned(3, 3);
    assert_filled_part(address, 0, 4 * CHUNK, 1);
}

static void memory_with_nothing_live_needs_no_pass(void **state) {
    fixture_t *f = *state;
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_SHARED, BYTES, 1);
    knowledge_t known = {.addresses = {address}};
    simulator()->clear_counts();
    pause_live(f, &known, 0, 0);
    assert_int_equal(launches(), 0);
    resume_launching(f, 0);
    assert_planned(0, 0);
}

/* Without fingerprints the store copies everything, and the resume checks nothing. */
static void a_kernel_that_cannot_run(void **state) {
    fixture_t *f = *state;
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_SHARED, BYTES, 1);
    pause_copying(f, BYTES, 0);
    resume(f);
    assert_planned(1, 1);
    simulator()->fail_after("cuLaunchKernel", 0, 1, CUDA_ERROR_NOT_SUPPORTED);
    pause_launching(f, BYTES, 0, 1);
    assert_int_equal(simulator()->failures_fired(), 1);
    assert_planned(1, 0);
    resume_launching(f, 0);
    assert_filled(address, BYTES, 1);
    launch_nothing(f);
    pause_copying(f, BYTES, 0);
    assert_planned(1, 0);
    resume(f);
    assert_filled(address, BYTES, 1);
    assert_nothing_waits(&f->saver);
}

static void all_devices_are_read_in_one_pass(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address[2];
    for (int device = 0; device < 2; device++) {
        address[device] = allocate_on(f, device, "a", TMS_BACKUP_SHARED, BYTES);
        fill(address[device], BYTES, 7);
    }
    pause_launching(f, 2 * BYTES, 0, 2);
    resume_launching(f, 2);
    pause_launching(f, 0, 2 * BYTES, 2); /* the devices have one key */
    assert_int_equal(named.count, 1);
    resume(f);
    for (int device = 0; device < 2; device++) assert_filled(address[device], BYTES, 7);
    for (int device = 0; device < 2; device++) ASSERT_OK(tms_free_address(&f->saver, address[device], &error), error);
}

/* A check of a pause plans as the pause would. */
static void a_check_computes_fingerprints_and_keeps_nothing(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const tms_selection_t all = {.tags = NULL};
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_SHARED, BYTES, 1);
    uint64_t other = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    simulator()->clear_counts();
    ASSERT_OK(tms_pause_check(&f->saver, &all, &error), error);
    assert_int_equal(launches(), 1);
    assert_int_equal(simulator()->calls("cuMemcpyDtoHAsync"), 0);
    assert_planned(1, 1);
    assert_null(copy_of(f, address));
    assert_int_equal(named.count, 0);
    cycle_copying(f, 2 * BYTES, 0);
    ASSERT_OK(tms_pause_check(&f->saver, &all, &error), error);
    assert_filled(address, BYTES, 1);
    assert_filled(other, BYTES, 1);
    assert_nothing_waits(&f->saver);
}

static void a_failure_before_and_in_the_plan(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_SHARED, BYTES, 1);
    uint64_t others[] = {allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 2),
                         allocate_filled(f, "a", TMS_BACKUP_DISK, BYTES, 3)};
    tms_status_t *const points[] = {&named.fails_in_begin, &named.fails_in_plan};
    for (int i = 0; i < 2; i++) {
        *points[i] = TMS_BACKUP_IO;
        simulator()->clear_counts();
        assert_int_equal(pause_all(f, &error), TMS_BACKUP_IO);
        assert_int_equal(launches(), i);
        assert_int_equal(simulator()->calls("cuMemUnmap"), 0);
        *points[i] = TMS_OK;
    }
    simulator()->fail_after("cuStreamSynchronize", 0, 1, CUDA_ERROR_UNKNOWN); /* the wait for the kernel */
    assert_int_equal(pause_all(f, &error), TMS_DRIVER);
    assert_planned(0, 0);
    cycle_copying(f, 3 * BYTES, 0);
    assert_filled(address, BYTES, 1);
    for (uint32_t i = 0; i < 2; i++) assert_filled(others[i], BYTES, 2 + i);
    assert_nothing_waits(&f->saver);
}

/* What the store has is compared by the resume, so that a pause need not read it. */
static void a_verified_pause_compares_only_what_was_retained(void **state) {
    fixture_t *f = *state;
    retain(f);
    f->config.verify_backups = true;
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_SHARED, BYTES, 1);
    uint64_t other = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 2);
    cycle_copying(f, 2 * BYTES, 0);
    simulator()->clear_counts();
    pause_copying(f, 0, 2 * BYTES);
    assert_int_equal(simulator()->calls("cuMemcpyDtoHAsync"), 1); /* of the pinned one */
    resume(f);
    assert_filled(address, BYTES, 1);
    assert_filled(other, BYTES, 2);
}

/* ---- the key ---- */

/* The pause that sets the first key has begun to read what is retained, with the key that was drawn. */
static void a_new_key_ends_the_comparison_with_what_is_retained(void **state) {
    fixture_t *f = *state;
    retain(f);
    uint64_t pinned = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    cycle_copying(f, BYTES, 0);
    pause_launching(f, 0, BYTES, 1);
    resume(f);
    uint64_t shared = allocate_filled(f, "a", TMS_BACKUP_SHARED, BYTES, 2);
    pause_launching(f, 2 * BYTES, 0, 3); /* of what is held, for the plan, and of what was pinned */
    resume_launching(f, 1);
    pause_launching(f, 0, 2 * BYTES, 1);
    resume(f);
    named.key = key_of(1);
    pause_launching(f, 2 * BYTES, 0, 3);
    resume_launching(f, 1);
    pause_launching(f, 0, 2 * BYTES, 1);
    resume(f);
    assert_filled(pinned, BYTES, 1);
    assert_filled(shared, BYTES, 2);
}

/* Fingerprints of another key say nothing about the contents. */
static void contents_of_an_earlier_key_are_not_checked(void **state) {
    fixture_t *f = *state;
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_SHARED, BYTES, 1);
    pause_copying(f, BYTES, 0);
    tms_fingerprinter_set_key(&f->saver.stores.fingerprinter, key_of(1));
    resume_launching(f, 0);
    assert_filled(address, BYTES, 1);
}

/* ---- what a resume checks ---- */

static void damage(fixture_t *f, uint64_t address, uint64_t offset) { copy_of(f, address)->data[offset] ^= 1; }

static void a_damaged_object_fails_the_resume_and_everything_stays_paused(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_SHARED, BYTES, 1);
    uint64_t others[] = {allocate_filled(f, "b", TMS_BACKUP_PINNED, BYTES, 2),
                         allocate_filled(f, "c", TMS_BACKUP_SHARED, BYTES, 3)};
    pause_copying(f, 3 * BYTES, 0);
    damage(f, address, 3 * CHUNK + 7);
    for (int attempt = 0; attempt < 2; attempt++) {
        assert_int_equal(resume_all(f, &error), TMS_BACKUP_IO);
        assert_string_equal(error.operation, "resume");
        assert_string_equal(error.tag, "a");
        assert_non_null(strstr(error.message, "from byte 1572864 of the allocation on"));
        assert_non_null(strstr(error.message, " The object is the test's."));
        assert_int_equal(named.rejected, 3 * CHUNK);
        assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
        for (int i = 0; i < 2; i++) assert_int_equal(state_of(f, others[i]), TMS_SEGMENT_PAUSED);
        assert_int_equal(physical_bytes(0), 0);
    }
    assert_int_equal(resume_tag(f, "a", &error), TMS_BACKUP_IO);
    ASSERT_OK(resume_tag(f, "c", &error), error);
    damage(f, address, 3 * CHUNK + 7); /* repairs it */
    resume(f);
    assert_filled(address, BYTES, 1);
    for (uint32_t i = 0; i < 2; i++) assert_filled(others[i], BYTES, 2 + i);
    assert_nothing_waits(&f->saver);
}

/* Pieces that are no objects are private to the process. */
static void only_objects_are_checked(void **state) {
    fixture_t *f = *state;
    const uint64_t size = CHUNK + 5;
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_SHARED, size, 1);
    pause_copying(f, size, 0);
    damage(f, address, size - 1);
    resume_launching(f, 1);
    assert_filled_part(address, 0, size - 1, 1);
    pause_copying(f, 5, CHUNK);
    damage(f, address, CHUNK - 1);
    tms_error_t error;
    assert_int_equal(resume_all(f, &error), TMS_BACKUP_IO);
    damage(f, address, CHUNK - 1);
    resume(f);
}

static void each_device_checks_its_own_segments(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address[2];
    for (int device = 0; device < 2; device++) {
        address[device] = allocate_on(f, device, "a", TMS_BACKUP_SHARED, BYTES);
        fill(address[device], BYTES, (uint32_t)device);
    }
    pause_copying(f, 2 * BYTES, 0);
    for (int device = 0; device < 2; device++) {
        damage(f, address[device], 0);
        assert_int_equal(resume_all(f, &error), TMS_BACKUP_IO);
        assert_int_equal(error.device, device);
        assert_int_equal(error.address, address[device]);
        for (int i = 0; i < 2; i++) assert_int_equal(state_of(f, address[i]), TMS_SEGMENT_PAUSED);
        damage(f, address[device], 0);
    }
    resume(f);
    for (int device = 0; device < 2; device++) assert_filled(address[device], BYTES, (uint32_t)device);
    for (int device = 0; device < 2; device++) ASSERT_OK(tms_free_address(&f->saver, address[device], &error), error);
}

/* No stream may rely on the memory before it is checked, so the resume can be undone. */
static void a_resume_in_the_background_checks_before_it_is_ready(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_pending_t *pending = NULL;
    const tms_selection_t all = {.tags = NULL};
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_SHARED, BYTES, 1);
    pause_copying(f, BYTES, 0);
    damage(f, address, 1);
    ASSERT_OK(tms_resume_begin(&f->saver, &all, &pending, &error), error);
    assert_int_equal(tms_pending_wait(pending, NULL, NULL, NULL, &error), TMS_BACKUP_IO);
    tms_pending_release(pending);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
    damage(f, address, 1);
    ASSERT_OK(tms_resume_begin(&f->saver, &all, &pending, &error), error);
    ASSERT_OK(tms_pending_wait(pending, NULL, NULL, NULL, &error), error);
    tms_pending_release(pending);
    assert_filled(address, BYTES, 1);
    assert_nothing_waits(&f->saver);
}

static void a_check_that_cannot_run_is_logged_once(void **state) {
    fixture_t *f = *state;
    char text[4096];
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_SHARED, BYTES, 1);
    tms_log_init(&f->log, TMS_LOG_WARNING);
    captured_stderr_t captured = capture_begin();
    for (int cycle = 0; cycle < 2; cycle++) {
        pause_copying(f, cycle == 0 ? BYTES : 0, cycle == 0 ? 0 : BYTES);
        damage(f, address, 3);
        simulator()->fail_after("cuLaunchKernel", 0, 1, CUDA_ERROR_NOT_SUPPORTED);
        resume_launching(f, 1);
        fill(address, BYTES, 1);
    }
    capture_end(captured, text, sizeof text);
    const char *line = strstr(text, "The restored contents are not checked.");
    assert_non_null(line);
    assert_null(strstr(line + 1, "The restored contents are not checked."));
}

/* The device could not be waited for, so that the kernel may still be reading what the undo would unmap. */
static void memory_that_a_kernel_may_read_stays_mapped(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    enum { ALWAYS = 1000 };
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_SHARED, BYTES, 1);
    pause_copying(f, BYTES, 0);
    simulator()->clear_counts();
    simulator()->fail_after("cuStreamSynchronize", 1, ALWAYS, CUDA_ERROR_UNKNOWN); /* the copies are waited for */
    simulator()->fail_after("cuCtxSynchronize", 0, ALWAYS, CUDA_ERROR_UNKNOWN);
    f->log.level = TMS_LOG_SILENT;
    assert_int_equal(resume_all(f, &error), TMS_DRIVER);
    simulator()->fail_after("cuStreamSynchronize", 0, 0, CUDA_SUCCESS);
    simulator()->fail_after("cuCtxSynchronize", 0, 0, CUDA_SUCCESS);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_DAMAGED);
    assert_int_equal(simulator()->calls("cuMemUnmap"), 0);
    resume(f);
    assert_filled(address, BYTES, 1);
}

static void other_stores_pay_nothing(void **state) {
    fixture_t *f = *state;
    static const tms_backup_kind_t kinds[] = {TMS_BACKUP_PINNED, TMS_BACKUP_MMAP, TMS_BACKUP_DISK};
    tms_error_t error;
    uint64_t shared = allocate_filled(f, "a", TMS_BACKUP_SHARED, BYTES, 1);
    cycle_copying(f, BYTES, 0); /* the key is set */
    ASSERT_OK(tms_free_address(&f->saver, shared, &error), error);
    retain(f);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        uint64_t address = allocate_filled(f, "a", kinds[i], BYTES, 1);
        for (int cycle = 0; cycle < 2; cycle++) {
            pause_launching(f, cycle == 0 ? BYTES : 0, cycle == 0 ? 0 : BYTES, 1);
            resume_launching(f, 0);
            assert_int_equal(simulator()->calls("cuStreamSynchronize"), 1);
            assert_int_equal(simulator()->calls("cuStreamCreate"), 1);
        }
        ASSERT_OK(tms_free_address(&f->saver, address, &error), error);
    }
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_with_names, teardown_names)
#define TWO(test) cmocka_unit_test_setup_teardown(test, setup_two_with_names, teardown_names)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(contents_that_the_store_has_are_not_copied),
        ONE(blocks_are_found_wherever_they_lie),
        ONE(retained_contents_are_read_once),
        ONE(another_layout_needs_a_pass_of_its_own),
        ONE(memory_with_nothing_live_needs_no_pass),
        ONE(a_kernel_that_cannot_run),
        TWO(all_devices_are_read_in_one_pass),
        ONE(a_check_computes_fingerprints_and_keeps_nothing),
        ONE(a_failure_before_and_in_the_plan),
        ONE(a_verified_pause_compares_only_what_was_retained),
        ONE(a_new_key_ends_the_comparison_with_what_is_retained),
        ONE(contents_of_an_earlier_key_are_not_checked),
        ONE(a_damaged_object_fails_the_resume_and_everything_stays_paused),
        ONE(only_objects_are_checked),
        TWO(each_device_checks_its_own_segments),
        ONE(a_resume_in_the_background_checks_before_it_is_ready),
        ONE(a_check_that_cannot_run_is_logged_once),
        ONE(memory_that_a_kernel_may_read_stays_mapped),
        ONE(other_stores_pay_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
