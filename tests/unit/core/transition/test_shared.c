/* Guards pauses and resumes with shared backups: what is copied, written, linked, registered and verified, and what follows
 * when another process writes, stops or dies, when the folder or an object is damaged, and when the driver fails.
 *
 * The other process is a second folder_t with a holder of its own: flock distinguishes descriptors, not processes. */

#include "support/shared_store.h"

#include "captured_stderr.h"

/* ---- what is copied ---- */

static void equal_contents_are_one_object(void **state) {
    fixture_t *f = *state;
    const uint64_t one = allocate_filled(f, "a", KEPT, BYTES, 1), two = allocate_filled(f, "b", KEPT, BYTES, 1);
    const uint64_t other = allocate_filled(f, "b", KEPT, BYTES, 2);
    pause_copying(f, 2 * BYTES, BYTES);
    assert_objects(2);
    assert_int_equal(held(f), 2 * BYTES);
    assert_int_equal(made(f), 2 * BYTES);
    resume(f);
    assert_filled(one, BYTES, 1);
    assert_filled(two, BYTES, 1);
    assert_filled(other, BYTES, 2);
}

static void unchanged_contents_are_not_copied_whatever_the_policy_is(void **state) {
    fixture_t *f = *state;
    static const tms_host_policy_t policies[] = {TMS_HOST_RELEASE, TMS_HOST_POOL, TMS_HOST_RETAIN};
    const uint64_t address = allocate_filled(f, "a", KEPT, BYTES + 100, 1); /* 96 bytes of it are vectors */
    for (size_t i = 0; i < sizeof policies / sizeof *policies; i++) {
        atomic_store(&f->saver.host_policy, policies[i]);
        cycle_copying(f, i == 0 ? BYTES + 100 : 4, i == 0 ? 0 : BYTES + 96);
        cycle_copying(f, 4, BYTES + 96);
        assert_filled(address, BYTES + 100, 1);
        assert_int_equal(counters_of(f).shared_backup_bytes, BYTES + 96);
    }
    assert_objects(1);
}

static void small_blocks_are_private(void **state) {
    fixture_t *f = *state;
    const uint64_t bytes = TMS_MIN_OBJECT_BYTES - 16;
    const uint64_t address = allocate_filled(f, "a", KEPT, bytes, 1);
    cycle_copying(f, bytes, 0);
    cycle_copying(f, bytes, 0);
    assert_objects(0);
    assert_int_equal(held(f), 0);
    assert_filled(address, bytes, 1);
}

/* What replaces an object does not need room beside it. */
static void a_changed_object_is_replaced(void **state) {
    fixture_t *f = *state;
    const uint64_t address = allocate_filled(f, "a", KEPT, BYTES, 1);
    cycle_copying(f, BYTES, 0);
    const tms_shared_name_t before = only_object();
    add_one(address + 5);
    pause_copying(f, BYTES, 0);
    assert_string_not_equal(only_object().text, before.text);
    resume(f);
    subtract_one(address + 5);
    assert_filled(address, BYTES, 1);
}

static uint64_t used[2]; /* of the ranges */

static int32_t tell_used(void *context, tms_live_t *live) {
    const int32_t result = tell(context, live);
    live->used = used;
    return result;
}

/* The same blocks at other places and beside others, as two processes place them. */
static void blocks_are_objects_wherever_they_lie(void **state) {
    fixture_t *f = *state;
    const uint64_t apart = allocate_filled(f, "a", KEPT, BYTES, 1), together = allocate(f, "b", KEPT, 3 * BYTES);
    tms_error_t error;
    tms_report_t report;
    memset((void *)(uintptr_t)together, 9, 3 * BYTES);
    fill(together + BYTES, BYTES, 1);
    knowledge_t known = {.addresses = {apart < together ? apart : together, apart < together ? together : apart},
                         .count = 2};
    const size_t of_apart = apart < together ? 0 : 1, of_together = 1 - of_apart;
    known.ranges[of_apart] = (tms_live_range_t){apart, apart + BYTES};
    known.ranges[of_together] = (tms_live_range_t){together + BYTES, together + 2 * BYTES};
    used[of_apart] = apart + BYTES;
    used[of_together] = together + 2 * BYTES - 512;
    const tms_selection_t selection = {.find_live = tell_used, .live_context = &known};
    ASSERT_OK(pause_selected_with_report(f, &selection, &report, &error), error);
    assert_int_equal(report.copied_bytes, 2 * BYTES - 512); /* the second is shorter: an object of its own */
    assert_objects(2);
    resume(f);
    used[of_together] = together + 2 * BYTES;
    fill(together + BYTES, BYTES, 1); /* its last bytes were not kept */
    ASSERT_OK(pause_selected_with_report(f, &selection, &report, &error), error);
    assert_int_equal(report.copied_bytes, 0);
    assert_objects(1);
    resume(f);
    assert_filled(apart, BYTES, 1);
    assert_filled(together + BYTES, BYTES, 1);
}

static void a_free_gives_up_the_object(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const uint64_t one = allocate_filled(f, "a", KEPT, BYTES, 1), two = allocate_filled(f, "a", KEPT, BYTES, 1);
    pause_copying(f, BYTES, BYTES);
    settle(f); /* it is registered */
    ASSERT_OK(tms_free_address(&f->saver, one, &error), error);
    assert_objects(1);
    ASSERT_OK(tms_free_address(&f->saver, two, &error), error);
    assert_objects(0);
    settle(f);
    assert_int_equal(held(f), 0);
}

/* ---- registration ---- */

static void objects_are_registered_while_they_are_paused(void **state) {
    fixture_t *f = *state;
    const uint64_t address = allocate_filled(f, "a", KEPT, BYTES, 1);
    simulator()->clear_counts();
    pause_copying(f, BYTES, 0);
    settle(f);
    const uint64_t registered = simulator()->calls("cuMemHostRegister");
    simulator()->clear_counts();
    resume(f);
    settle(f);
    assert_true(registered >= 1);
    assert_int_equal(simulator()->calls("cuMemcpyHtoDAsync"), 1); /* straight from the object */
    assert_int_equal(simulator()->calls("cuMemHostUnregister"), 1);
    assert_filled(address, BYTES, 1);
    retain(f);
    cycle_copying(f, 0, BYTES);
    settle(f);
    simulator()->clear_counts();
    cycle_copying(f, 0, BYTES);
    settle(f);
    assert_int_equal(simulator()->calls("cuMemHostUnregister"), 0);
    assert_int_equal(simulator()->calls("cuMemcpyHtoDAsync"), 1);
}

static void without_registration_a_resume_copies_through_pinned_memory(void **state) {
    fixture_t *f = *state;
    char text[TEXT_BYTES];
    const uint64_t address = allocate_filled(f, "a", KEPT, BYTES, 1);
    refuse_registration(f);
    f->log.level = TMS_LOG_WARNING;
    const captured_stderr_t captured = capture_begin();
    for (int cycle = 0; cycle < 2; cycle++) {
        pause_copying(f, cycle == 0 ? BYTES : 0, cycle == 0 ? 0 : BYTES);
        settle(f);
        resume(f);
        settle(f);
    }
    assert_true(capture_end(captured, text, sizeof text) > 0);
    assert_int_equal(count_lines(text), 1);
    assert_non_null(strstr(text, "CUDA_ERROR_NOT_PERMITTED"));
    assert_non_null(strstr(text, "through pinned memory"));
    assert_filled(address, BYTES, 1);
}

static void a_registration_that_could_not_be_ended_is_ended_later(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const uint64_t address = allocate_filled(f, "a", KEPT, BYTES, 1);
    pause_copying(f, BYTES, 0);
    settle(f);
    simulator()->clear_counts();
    simulator()->fail_after("cuMemHostUnregister", 0, 1, CUDA_ERROR_UNKNOWN);
    resume(f);
    settle(f);
    assert_int_equal(simulator()->failures_fired(), 1);
    simulator()->fail_after("cuMemHostUnregister", 0, 1, CUDA_ERROR_UNKNOWN);
    ASSERT_OK(tms_free_address(&f->saver, address, &error), error);
    settle(f);
    assert_int_equal(simulator()->failures_fired(), 2);
    assert_objects(0);
    assert_int_equal(held(f), 0);
    assert_non_null(store_of(f)->objects); /* it is still mapped */
    const uint64_t other = allocate_filled(f, "a", KEPT, BYTES, 2);
    cycle_copying(f, BYTES, 0);
    settle(f);
    assert_int_equal(held(f), BYTES);
    assert_non_null(store_of(f)->objects); /* the other one */
    assert_null(store_of(f)->objects->next);
    assert_filled(other, BYTES, 2);
}

/* ---- the kernel ---- */

static void without_the_kernel_everything_is_private(void **state) {
    fixture_t *f = *state;
    char text[TEXT_BYTES];
    const uint64_t address = allocate_filled(f, "a", KEPT, BYTES, 1);
    launch_nothing(f);
    const captured_stderr_t captured = capture_begin();
    f->log.level = TMS_LOG_WARNING;
    cycle_copying(f, BYTES, 0);
    cycle_copying(f, BYTES, 0);
    assert_true(capture_end(captured, text, sizeof text) > 0);
    const char *first = strstr(text, "private copies");
    assert_non_null(first);
    assert_null(strstr(first + 1, "private copies"));
    assert_objects(0);
    assert_filled(address, BYTES, 1);
}

/* ---- damage ---- */

/* The paused memory keeps the object, and whoever pauses equal contents afterwards writes it again. */
static void a_damaged_object_fails_the_resume(void **state) {
    fixture_t *f = *state;
    const bool registered[] = {true, false};
    const uint64_t address = allocate_filled(f, "a", KEPT, BYTES, 1);
    char path[2 * PATH_BYTES], again[2 * PATH_BYTES];
    snprintf(again, sizeof again, "%s/again", folder);
    for (size_t i = 0; i < 2; i++) {
        tms_error_t error;
        if (!registered[i]) refuse_registration(f);
        pause_copying(f, BYTES, 0);
        settle(f);
        const tms_shared_name_t name = only_object();
        snprintf(path, sizeof path, "%s/objects/%s", folder, name.text);
        assert_int_equal(link(path, again), 0);
        flip(name.text);
        for (size_t attempt = 0; attempt < 2; attempt++) {
            assert_int_equal(resume_all(f, &error), TMS_BACKUP_IO);
            assert_non_null(strstr(error.message, name.text));
            assert_non_null(strstr(error.message, "The next pause or publication writes it again."));
            assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
            assert_int_equal(physical_bytes(0), 0);
            assert_objects(0);
        }
        const uint64_t other = allocate_filled(f, "b", KEPT, BYTES, 1);
        ASSERT_OK(pause_tag(f, "b", &error), error);
        assert_string_equal(only_object().text, name.text);
        ASSERT_OK(resume_tag(f, "b", &error), error);
        assert_filled(other, BYTES, 1);
        ASSERT_OK(tms_free_address(&f->saver, other, &error), error);
        assert_objects(0);
        flip("../again"); /* the damage is undone */
        assert_int_equal(unlink(again), 0);
        resume(f);
        settle(f);
        assert_filled(address, BYTES, 1);
    }
}

static void a_deleted_folder_loses_nothing(void **state) {
    fixture_t *f = *state;
    const uint64_t address = allocate_filled(f, "a", KEPT, BYTES, 1);
    pause_copying(f, BYTES, 0);
    assert_int_equal(remove_tree(folder), 0);
    resume(f);
    assert_filled(address, BYTES, 1);
    cycle_copying(f, BYTES, 0); /* into a new folder, with a new key */
    settle(f);                  /* the object of the old folder was registered */
    assert_objects(1);
    assert_int_equal(held(f), BYTES);
    cycle_copying(f, 0, BYTES);
    assert_filled(address, BYTES, 1);
}

static void a_folder_that_cannot_be_used_fails_the_pause(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const uint64_t address = allocate_filled(f, "a", KEPT, BYTES, 1);
    store_of(f)->configured = "/proc/store";
    assert_int_equal(pause_all(f, &error), TMS_BACKUP_IO);
    assert_non_null(strstr(error.message, "/proc/store"));
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    assert_filled(address, BYTES, 1);
    store_of(f)->configured = folder;
    cycle_copying(f, BYTES, 0);
}

/* ---- another process ---- */

/* Another process, which writes the object that the next pause needs. */
typedef struct other {
    tms_shared_folder_t folder;
    tms_shared_name_t name;
    tms_shared_attempt_t claim;
    const void *contents;
    enum { DIES, FINISHES, CANCELS, STOPS } does; /* when the pause waits for it */
    int asked;
} other_t;

static const tms_error_context_t nowhere = {.operation = "test", .device = TMS_NO_DEVICE};

/* Learns the name of the contents by a pause, gives the object up, and claims it in the name of the other process. */
static uint64_t begin_other(fixture_t *f, other_t *other) {
    tms_error_t error;
    const uint64_t address = allocate_filled(f, "a", KEPT, BYTES, 1);
    cycle_copying(f, BYTES, 0);
    other->name = only_object();
    ASSERT_OK(tms_free_address(&f->saver, address, &error), error);
    settle(f);
    assert_objects(0);
    ASSERT_OK(tms_shared_folder_open(&other->folder, folder, &f->log, &nowhere, &error), error);
    ASSERT_OK(tms_shared_entry_try(&other->folder, &other->name, BYTES, true, &other->claim, &nowhere, &error), error);
    assert_int_equal(other->claim.state, TMS_SHARED_CLAIMED);
    const uint64_t again = allocate_filled(f, "a", KEPT, BYTES, 1);
    other->contents = (const void *)(uintptr_t)again;
    return again;
}

static int32_t act(void *context) {
    other_t *other = context;
    tms_error_t error;
    const int first = other->asked++ == 0;
    if (other->does == CANCELS) return 1;
    if (other->does == DIES && first) assert_int_equal(close(other->claim.fd), 0);
    if (other->does == FINISHES && first) {
        ASSERT_OK(tms_shared_entry_write(&other->folder, &other->name, other->claim.fd, other->contents, BYTES, 0, &nowhere,
                                         &error),
                  error);
        ASSERT_OK(tms_shared_entry_finish(&other->folder, &other->name, &other->claim.fd, &nowhere, &error), error);
        close(other->claim.fd);
    }
    return 0;
}

static void pause_beside(fixture_t *f, other_t *other, uint64_t copied) {
    tms_error_t error;
    tms_report_t report;
    const tms_selection_t selection = {.interrupted = act, .interrupt_context = other};
    ASSERT_OK(pause_selected_with_report(f, &selection, &report, &error), error);
    assert_int_equal(report.copied_bytes, copied);
    assert_int_equal(report.copied_bytes + report.unchanged_bytes, BYTES);
}

static void what_another_process_finishes_is_linked(void **state) {
    fixture_t *f = *state;
    other_t other = {.does = FINISHES};
    const uint64_t address = begin_other(f, &other), written = counters_of(f).shared_file_nanoseconds_total;
    store_of(f)->patience = INT_MAX;
    pause_beside(f, &other, 0);
    assert_true(other.asked > 0);
    assert_true(counters_of(f).shared_wait_nanoseconds_total > 0);
    assert_int_equal(counters_of(f).shared_file_nanoseconds_total, written);
    assert_int_equal(held(f), BYTES);
    assert_int_equal(made(f), 0);
    resume(f);
    assert_filled(address, BYTES, 1);
    tms_shared_folder_close(&other.folder, &f->log);
    assert_objects(1); /* ours */
}

static void what_a_dead_process_has_begun_is_written(void **state) {
    fixture_t *f = *state;
    other_t other = {.does = DIES};
    const uint64_t address = begin_other(f, &other);
    store_of(f)->patience = INT_MAX;
    pause_beside(f, &other, BYTES);
    assert_true(other.asked > 0);
    assert_int_equal(made(f), BYTES);
    assert_objects(1);
    resume(f);
    assert_filled(address, BYTES, 1);
    tms_shared_folder_close(&other.folder, &f->log);
}

static void a_writer_without_progress_is_not_waited_for(void **state) {
    fixture_t *f = *state;
    char text[TEXT_BYTES];
    other_t other = {.does = STOPS};
    const uint64_t address = begin_other(f, &other);
    store_of(f)->patience = 200; /* milliseconds, in which `act` is called */
    f->log.level = TMS_LOG_WARNING;
    const captured_stderr_t captured = capture_begin();
    pause_beside(f, &other, BYTES);
    assert_true(capture_end(captured, text, sizeof text) > 0);
    assert_int_equal(count_lines(text), 1);
    assert_non_null(strstr(text, other.name.text));
    assert_non_null(strstr(text, "private copy"));
    assert_true(other.asked > 0);
    assert_int_equal(held(f), 0);
    assert_int_equal(counters_of(f).host_backup_bytes >= BYTES, 1);
    resume(f);
    assert_filled(address, BYTES, 1);
    tms_shared_entry_abandon(&other.folder, &other.name, other.claim.fd);
    tms_shared_folder_close(&other.folder, &f->log);
    cycle_copying(f, BYTES, 0); /* now it is shared */
    assert_objects(1);
    assert_int_equal(made(f), BYTES);
}

static void a_cancelled_pause_leaves_nothing(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    other_t other = {.does = CANCELS};
    const uint64_t waits = begin_other(f, &other), own = allocate_filled(f, "b", KEPT, BYTES, 2);
    const tms_selection_t selection = {.interrupted = act, .interrupt_context = &other};
    store_of(f)->patience = INT_MAX;
    assert_int_equal(pause_selected(f, &selection, &error), TMS_INTERRUPTED);
    assert_int_equal(state_of(f, waits), TMS_SEGMENT_ACTIVE);
    assert_int_equal(state_of(f, own), TMS_SEGMENT_ACTIVE);
    assert_objects(1); /* the other process's, unfinished */
    assert_int_equal(held(f), 0);
    tms_shared_entry_abandon(&other.folder, &other.name, other.claim.fd);
    tms_shared_folder_close(&other.folder, &f->log);
    cycle_copying(f, 2 * BYTES, 0);
    assert_filled(waits, BYTES, 1);
    assert_filled(own, BYTES, 2);
}

/* ---- failures ---- */

static void a_failed_copy_leaves_nothing(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const uint64_t one = allocate_filled(f, "a", KEPT, BYTES, 1), two = allocate_filled(f, "b", KEPT, BYTES, 2);
    simulator()->fail_after("cuMemcpyDtoHAsync", 1, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(pause_all(f, &error), TMS_DRIVER);
    assert_int_equal(state_of(f, one), TMS_SEGMENT_ACTIVE);
    assert_int_equal(state_of(f, two), TMS_SEGMENT_ACTIVE);
    assert_objects(0);
    assert_int_equal(held(f), 0);
    cycle_copying(f, 2 * BYTES, 0);
    assert_filled(one, BYTES, 1);
    assert_filled(two, BYTES, 2);
}

static void a_failed_read_leaves_everything_paused(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const uint64_t address = allocate_filled(f, "a", KEPT, BYTES, 1);
    refuse_registration(f);
    pause_copying(f, BYTES, 0);
    simulator()->fail_after("cuMemcpyHtoDAsync", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(resume_all(f, &error), TMS_DRIVER);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
    resume(f);
    assert_filled(address, BYTES, 1);
}

/* What the check of the contents had prepared is released; a leak is noticed by the sanitizer. */
static void a_failed_wait_leaves_everything_paused(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const uint64_t address = allocate_filled(f, "a", KEPT, BYTES, 1);
    pause_copying(f, BYTES, 0);
    settle(f);
    simulator()->fail_after("cuStreamSynchronize", 0, 1, CUDA_ERROR_OPERATING_SYSTEM);
    assert_int_equal(resume_all(f, &error), TMS_DRIVER);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
    resume(f);
    assert_filled(address, BYTES, 1);
}

/* A check makes the links that exist, and gives them up. */
static void a_check_of_a_pause_changes_nothing(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const tms_selection_t all = {0};
    allocate_filled(f, "a", KEPT, BYTES, 1);
    ASSERT_OK(tms_pause_check(&f->saver, &all, &error), error);
    assert_objects(0);
    cycle_copying(f, BYTES, 0);
    ASSERT_OK(tms_pause_check(&f->saver, &all, &error), error);
    assert_objects(1);
    cycle_copying(f, 0, BYTES);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(equal_contents_are_one_object),
        TEST(unchanged_contents_are_not_copied_whatever_the_policy_is),
        TEST(small_blocks_are_private),
        TEST(a_changed_object_is_replaced),
        TEST(blocks_are_objects_wherever_they_lie),
        TEST(a_free_gives_up_the_object),
        TEST(objects_are_registered_while_they_are_paused),
        TEST(without_registration_a_resume_copies_through_pinned_memory),
        TEST(a_registration_that_could_not_be_ended_is_ended_later),
        TEST(without_the_kernel_everything_is_private),
        TEST(a_damaged_object_fails_the_resume),
        TEST(a_deleted_folder_loses_nothing),
        TEST(a_folder_that_cannot_be_used_fails_the_pause),
        TEST(what_another_process_finishes_is_linked),
        TEST(what_a_dead_process_has_begun_is_written),
        TEST(a_writer_without_progress_is_not_waited_for),
        TEST(a_cancelled_pause_leaves_nothing),
        TEST(a_failed_copy_leaves_nothing),
        TEST(a_failed_read_leaves_everything_paused),
        TEST(a_failed_wait_leaves_everything_paused),
        TEST(a_check_of_a_pause_changes_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
