/* Guards adopt: adopted memory is filled only with what its name says, and a later pause copies nothing of what is linked.
 */
#include "support/publish_fixture.h"

#include "captured_stderr.h"
#include "core/allocation/reclaim.h"

static size_t kept(fixture_t *f) {
    size_t count = 0;
    for (const tms_shared_contents_t *each = store_of(f)->kept; each; each = each->next_kept) count++;
    return count;
}

/* The number of live allocations of cuMemAlloc. */
static uint64_t unmanaged(void) {
    tms_sim_usage_t usage;
    simulator()->usage(0, &usage);
    return usage.runtime_allocations;
}

/* The events of waits for the devices. */
static size_t waits_of(fixture_t *f, const char *operation) {
    tms_event_t events[64];
    tms_events_copy_t copy = {.events = events, .event_room = 64};
    size_t waits = 0;
    tms_inspect_copy_events(&f->saver, &copy);
    for (size_t i = 0; i < copy.event_count; i++)
        waits += events[i].phase == TMS_PHASE_SYNCHRONIZE && strcmp(events[i].operation, operation) == 0;
    return waits;
}

static void adopted_memory_has_the_contents(void **state) {
    fixture_t *f = *state;
    const uint64_t address = allocate_filled(f, "a", KEPT, BYTES, 1);
    publish_one(f, "name", address, BYTES);
    assert_int_equal(waits_of(f, "publish"), 1);
    restart(f);
    fill(address, BYTES, 2);
    const tms_shared_piece_t piece = piece_at(address, BYTES);
    adopt_all(f, &piece, 1, objects_of("name"));
    assert_int_equal(waits_of(f, "adopt"), 1);
    assert_filled(address, BYTES, 1);
    assert_int_equal(held(f), BYTES);
    assert_int_equal(made(f), 0);
    /* The first pause copies nothing. Then its own links suffice. */
    assert_int_equal(kept(f), 1);
    pause_copying(f, 0, BYTES);
    assert_int_equal(kept(f), 0);
    assert_int_equal(held(f), BYTES);
    resume(f);
    assert_filled(address, BYTES, 1);
}

static void a_pause_that_does_not_use_the_store_leaves_the_links(void **state) {
    fixture_t *f = *state;
    const uint64_t address = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    publish_one(f, "name", address, BYTES);
    cycle_copying(f, BYTES, 0);
    assert_int_equal(kept(f), 1);
    assert_int_equal(held(f), BYTES);
}

static void a_missing_object_is_a_miss(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t written;
    size_t missing;
    char names[2 * TMS_OBJECT_NAME_DIGITS + 1];
    const uint64_t address = allocate_filled(f, "a", TMS_BACKUP_NONE, BYTES, 1);
    const tms_shared_piece_t pieces[] = {piece_at(address, BYTES / 2), piece_at(address + BYTES / 2, BYTES / 2)};
    ASSERT_OK(publish(f, "name", pieces, 2, &written, &error), error);
    restart(f);
    strcpy(names, objects_of("name"));
    memset(names + TMS_OBJECT_NAME_DIGITS, '0', TMS_OBJECT_NAME_DIGITS);
    fill(address, BYTES, 2);
    ASSERT_OK(adopt(f, pieces, 2, names, &missing, &error), error);
    assert_int_equal(missing, 1);
    assert_filled(address, BYTES, 2);
    assert_int_equal(held(f), 0);
}

static void a_damaged_object_reaches_no_piece(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    size_t missing;
    const uint64_t address = allocate_filled(f, "a", TMS_BACKUP_NONE, BYTES, 1);
    const tms_shared_piece_t piece = piece_at(address, BYTES);
    publish_one(f, "name", address, BYTES);
    restart(f);
    fill(address, BYTES, 2);
    const tms_shared_name_t name = only_object();
    flip(name.text);
    assert_int_equal(adopt(f, &piece, 1, name.text, &missing, &error), TMS_BACKUP_IO);
    assert_non_null(strstr(error.message, name.text));
    assert_non_null(strstr(error.message, folder));
    assert_filled(address, BYTES, 2);
    assert_int_equal(held(f), 0);
}

/* Also if another process holds the damaged one, which keeps it. */
static void a_damaged_object_is_written_again(void **state) {
    fixture_t *f = *state;
    static tms_shared_folder_t other;
    static const tms_error_context_t nowhere = {.operation = "test", .device = TMS_NO_DEVICE};
    tms_shared_attempt_t attempt;
    tms_error_t error;
    size_t missing;
    const uint64_t address = allocate_filled(f, "a", TMS_BACKUP_NONE, BYTES, 1);
    const tms_shared_piece_t piece = piece_at(address, BYTES);
    publish_one(f, "name", address, BYTES);
    restart(f);
    const tms_shared_name_t name = only_object();
    ASSERT_OK(tms_shared_folder_open(&other, folder, &f->log, &nowhere, &error), error);
    ASSERT_OK(tms_shared_entry_try(&other, &name, BYTES, false, &attempt, &nowhere, &error), error);
    flip(name.text);
    assert_int_equal(adopt(f, &piece, 1, name.text, &missing, &error), TMS_BACKUP_IO);
    assert_non_null(strstr(error.message, "The next pause or publication writes it again."));
    assert_objects(0);
    publish_one(f, "name", address, BYTES);
    restart(f);
    fill(address, BYTES, 2);
    adopt_all(f, &piece, 1, name.text);
    assert_filled(address, BYTES, 1);
    struct stat damaged;
    assert_int_equal(fstat(attempt.fd, &damaged), 0);
    assert_int_equal(damaged.st_nlink, 1); /* that of the other process */
    close(attempt.fd);
    tms_shared_folder_close(&other, &f->log);
    assert_string_equal(only_object().text, name.text);
}

static void an_object_of_another_size_is_damaged(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    size_t missing;
    const uint64_t address = allocate_filled(f, "a", TMS_BACKUP_NONE, BYTES, 1);
    publish_one(f, "name", address, BYTES);
    restart(f);
    const tms_shared_piece_t piece = piece_at(address, BYTES / 2);
    const tms_shared_name_t name = only_object();
    assert_int_equal(adopt(f, &piece, 1, objects_of("name"), &missing, &error), TMS_BACKUP_IO);
    assert_non_null(strstr(error.message, name.text));
    assert_int_equal(adopt(f, &piece, 1, objects_of("name"), &missing, &error), TMS_OK);
    assert_int_equal(missing, 0);
}

/* The kernel cannot check the object, so nothing is filled with it. */
static void without_the_kernel_nothing_is_adopted(void **state) {
    fixture_t *f = *state;
    char text[4096];
    tms_error_t error;
    size_t missing;
    const uint64_t address = allocate_filled(f, "a", TMS_BACKUP_NONE, BYTES, 1);
    const tms_shared_piece_t piece = piece_at(address, BYTES);
    publish_one(f, "name", address, BYTES);
    fill(address, BYTES, 2);
    launch_nothing(f);
    captured_stderr_t captured = capture_begin();
    const tms_status_t status = adopt(f, &piece, 1, objects_of("name"), &missing, &error);
    capture_end(captured, text, sizeof text);
    assert_int_equal(status, TMS_DRIVER);
    assert_non_null(strstr(text, "warning: adopt: "));
    assert_non_null(strstr(text, "The call fails, because objects are named by their fingerprints."));
    assert_filled(address, BYTES, 2);
}

/* The scratch memory holds only some objects at once. */
static void little_device_memory_is_enough(void **state) {
    fixture_t *f = *state;
    enum { COUNT = 4 };
    tms_error_t error;
    uint64_t written;
    tms_shared_piece_t pieces[COUNT];
    for (size_t i = 0; i < COUNT; i++)
        pieces[i] = piece_at(allocate_filled(f, "a", TMS_BACKUP_NONE, BYTES, (uint32_t)i + 1), BYTES);
    ASSERT_OK(publish(f, "name", pieces, COUNT, &written, &error), error);
    for (size_t i = 0; i < COUNT; i++) fill(pieces[i].address, BYTES, 9);
    simulator()->clear_counts();
    simulator()->fail_after("cuMemAlloc", 0, 2, CUDA_ERROR_OUT_OF_MEMORY);
    adopt_all(f, pieces, COUNT, objects_of("name"));
    assert_int_equal(simulator()->calls("cuMemAlloc"), 3);
    assert_int_equal(simulator()->calls("cuMemFree"), 1);
    assert_int_equal(simulator()->calls("cuLaunchKernel"), COUNT);
    for (size_t i = 0; i < COUNT; i++) assert_filled(pieces[i].address, BYTES, (uint32_t)i + 1);
}

/* The call succeeds, and the next one releases it. */
static void scratch_memory_that_cannot_be_released_is_released_later(void **state) {
    fixture_t *f = *state;
    const uint64_t address = allocate_filled(f, "a", TMS_BACKUP_NONE, BYTES, 1);
    const tms_shared_piece_t piece = piece_at(address, BYTES);
    publish_one(f, "name", address, BYTES);
    fill(address, BYTES, 2);
    simulator()->fail_after("cuMemFree", 0, 2, CUDA_ERROR_UNKNOWN);
    adopt_all(f, &piece, 1, objects_of("name"));
    assert_filled(address, BYTES, 1);
    assert_int_equal(tms_quarantine_held(&f->saver.quarantine, TMS_QUARANTINE_HANDLE), 1);
    tms_reclaim_all(&f->saver); /* the second failure */
    assert_int_equal(unmanaged(), 1);
    tms_reclaim_all(&f->saver);
    assert_int_equal(unmanaged(), 0);
    assert_true(tms_quarantine_is_empty(&f->saver.quarantine));
}

static void without_scratch_memory_nothing_is_adopted(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    size_t missing;
    const uint64_t address = allocate_filled(f, "a", TMS_BACKUP_NONE, BYTES, 1);
    const tms_shared_piece_t piece = piece_at(address, BYTES);
    publish_one(f, "name", address, BYTES);
    fill(address, BYTES, 2);
    simulator()->fail_after("cuMemAlloc", 0, 9, CUDA_ERROR_OUT_OF_MEMORY);
    assert_int_equal(adopt(f, &piece, 1, objects_of("name"), &missing, &error), TMS_OUT_OF_DEVICE_MEMORY);
    assert_filled(address, BYTES, 2);
}

static void objects_that_are_registered_are_copied_directly(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const uint64_t address = allocate_filled(f, "a", KEPT, BYTES, 1);
    const uint64_t target = allocate(f, "b", TMS_BACKUP_NONE, BYTES);
    publish_one(f, "name", address, BYTES);
    ASSERT_OK(pause_tag(f, "a", &error), error);
    settle(f);
    const tms_shared_piece_t piece = piece_at(target, BYTES);
    simulator()->clear_counts();
    adopt_all(f, &piece, 1, objects_of("name"));
    assert_int_equal(simulator()->calls("cuMemcpyHtoDAsync"), 1);
    assert_filled(target, BYTES, 1);
    settle(f);
    ASSERT_OK(resume_tag(f, "a", &error), error);
}

/* ---- two devices ---- */

static int setup_two(void **state) {
    if (setup_two_devices(state) != 0) return -1;
    make_folder(*state);
    return 0;
}

static void each_device_fills_its_own_pieces(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t written;
    tms_shared_piece_t pieces[4];
    for (size_t i = 0; i < 4; i++) {
        pieces[i] = piece_at(allocate_on(f, i % 2, "a", TMS_BACKUP_NONE, BYTES), BYTES);
        pieces[i].device = i % 2;
        fill(pieces[i].address, BYTES, (uint32_t)i + 1);
    }
    ASSERT_OK(publish(f, "name", pieces, 4, &written, &error), error);
    assert_int_equal(written, 4 * BYTES);
    for (size_t i = 0; i < 4; i++) fill(pieces[i].address, BYTES, 9);
    adopt_all(f, pieces, 4, objects_of("name"));
    for (size_t i = 0; i < 4; i++) assert_filled(pieces[i].address, BYTES, (uint32_t)i + 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(adopted_memory_has_the_contents),
        TEST(a_pause_that_does_not_use_the_store_leaves_the_links),
        TEST(a_missing_object_is_a_miss),
        TEST(a_damaged_object_reaches_no_piece),
        TEST(a_damaged_object_is_written_again),
        TEST(an_object_of_another_size_is_damaged),
        TEST(without_the_kernel_nothing_is_adopted),
        TEST(little_device_memory_is_enough),
        TEST(scratch_memory_that_cannot_be_released_is_released_later),
        TEST(without_scratch_memory_nothing_is_adopted),
        TEST(objects_that_are_registered_are_copied_directly),
        cmocka_unit_test_setup_teardown(each_device_fills_its_own_pieces, setup_two, end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
