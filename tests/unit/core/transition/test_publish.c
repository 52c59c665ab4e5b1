/* Guards publish: which objects and names it makes, what it needs room for, and which memory it refuses, as adopt does. */
#include "support/publish_fixture.h"

#include <dlfcn.h>
#include <errno.h>
#include <sys/statvfs.h>

#include "captured_stderr.h"

/* The room that the folder's file system has left; 0: what it says. */
static uint64_t left_bytes;

int fstatvfs(int fd, struct statvfs *found) {
    int (*real)(int, struct statvfs *) = (int (*)(int, struct statvfs *))(uintptr_t)dlsym(RTLD_NEXT, "fstatvfs");
    const int result = real(fd, found);
    if (result == 0 && left_bytes > 0) found->f_bavail = left_bytes / found->f_frsize;
    return result;
}

static void a_name_keeps_objects_that_no_process_holds(void **state) {
    fixture_t *f = *state;
    const uint64_t address = allocate_filled(f, "a", TMS_BACKUP_NONE, BYTES, 1);
    publish_one(f, "name", address, BYTES);
    assert_objects(1);
    assert_int_equal(list("names/name").count, 2); /* the link and the manifest */
    assert_int_equal(made(f), BYTES);
    restart(f);
    assert_objects(1);
    publish_one(f, "other", address, 0);
    assert_objects(1);
    assert_int_equal(list("names").count, 2);
    assert_string_equal(objects_of("name"), only_object().text);
}

static void a_name_that_is_published_again_has_the_new_contents(void **state) {
    fixture_t *f = *state;
    const uint64_t address = allocate_filled(f, "a", TMS_BACKUP_NONE, BYTES, 1);
    publish_one(f, "name", address, BYTES);
    const tms_shared_name_t before = only_object();
    restart(f);
    add_one(address);
    publish_one(f, "name", address, BYTES);
    assert_string_not_equal(only_object().text, before.text); /* the old one has gone */
    assert_int_equal(list("names").count, 1);
    char holder[PATH_BYTES];
    snprintf(holder, sizeof holder, "holders/%s", store_of(f)->folder.holder_name);
    assert_int_equal(list(holder).count, 2); /* the link and the lock */
}

static void pieces_are_in_order_and_equal_ones_are_one_object(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t written;
    const uint64_t one = allocate_filled(f, "a", TMS_BACKUP_NONE, BYTES, 1);
    const uint64_t two = allocate_filled(f, "a", TMS_BACKUP_NONE, BYTES, 2);
    const tms_shared_piece_t pieces[] = {piece_at(two, BYTES), piece_at(one, BYTES), piece_at(two, BYTES),
                                         piece_at(one, TMS_MIN_OBJECT_BYTES)};
    ASSERT_OK(publish(f, "name", pieces, 4, &written, &error), error);
    assert_int_equal(written, 2 * BYTES + TMS_MIN_OBJECT_BYTES);
    assert_objects(3);
    const char *names = objects_of("name");
    assert_int_equal(strlen(names), 4 * TMS_OBJECT_NAME_DIGITS);
    assert_memory_equal(names, names + 2 * TMS_OBJECT_NAME_DIGITS, TMS_OBJECT_NAME_DIGITS);
    const tms_shared_piece_t places[] = {piece_at(one, BYTES), piece_at(two, BYTES), piece_at(one, BYTES),
                                         piece_at(one, TMS_MIN_OBJECT_BYTES)};
    adopt_all(f, places, 4, names);
    assert_filled(two, BYTES, 1);
    assert_filled(one, TMS_MIN_OBJECT_BYTES, 1); /* the last one of the three */
}

static void nothing_can_be_published(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t written = 1;
    allocate(f, "a", TMS_BACKUP_NONE, BYTES);
    ASSERT_OK(publish(f, "name", NULL, 0, &written, &error), error);
    assert_int_equal(written, 0);
    assert_string_equal(objects_of("name"), "");
    adopt_all(f, NULL, 0, "");
}

static void memory_that_is_not_managed_is_published_and_adopted(void **state) {
    fixture_t *f = *state;
    CUdeviceptr address = 0;
    tms_error_t error;
    ASSERT_OK(tms_devices_enter(&f->devices, 0, &(tms_error_context_t){.operation = "test"}, &error), error);
    assert_int_equal(f->cuda->cuMemAlloc(&address, BYTES), CUDA_SUCCESS);
    fill(address, BYTES, 1);
    publish_one(f, "name", address, BYTES);
    memset((void *)(uintptr_t)address, 0, BYTES);
    const tms_shared_piece_t piece = piece_at(address, BYTES);
    adopt_all(f, &piece, 1, objects_of("name"));
    assert_filled(address, BYTES, 1);
    assert_int_equal(f->cuda->cuMemFree(address), CUDA_SUCCESS);
    tms_devices_leave(&f->devices, 0);
}

static void refuse(fixture_t *f, tms_shared_piece_t piece, tms_status_t status, const char *text) {
    tms_error_t error;
    uint64_t written;
    size_t missing;
    char name[TMS_OBJECT_NAME_DIGITS + 1];
    memset(name, '0', TMS_OBJECT_NAME_DIGITS);
    name[TMS_OBJECT_NAME_DIGITS] = 0;
    assert_int_equal(publish(f, "name", &piece, 1, &written, &error), status);
    assert_non_null(strstr(error.message, text));
    assert_int_equal(list("names").count, 0);
    if (piece.address % 16 != 0) return; /* adopted memory may begin anywhere */
    assert_int_equal(adopt(f, &piece, 1, name, &missing, &error), status);
    assert_non_null(strstr(error.message, text));
}

static void paused_memory_is_refused(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const uint64_t address = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    ASSERT_OK(pause_all(f, &error), error);
    refuse(f, piece_at(address, BYTES), TMS_INVALID_STATE, "paused");
    ASSERT_OK(resume_all(f, &error), error);
    publish_one(f, "name", address, BYTES);
}

/* PyTorch's expandable segments: ordinary memory, and then memory of a handle, side by side in one tensor. */
static void paused_memory_behind_ordinary_memory_is_refused(void **state) {
    fixture_t *f = *state;
    const tms_region_settings_t settings = {.managed = true, .tag = "a", .backup = TMS_BACKUP_PINNED};
    const CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    const CUmemAccessDesc access = {.location = properties.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle ordinary;
    CUdeviceptr base = 0;
    tms_region_t region;
    tms_error_t error;
    uint64_t number = 0, written;
    bool busy;
    assert_int_equal(f->cuda->cuMemAddressReserve(&base, 4 * MIB, 0, 0, 0), CUDA_SUCCESS);
    assert_int_equal(f->cuda->cuMemCreate(&ordinary, 2 * MIB, &properties, 0), CUDA_SUCCESS);
    assert_int_equal(f->cuda->cuMemMap(base, 2 * MIB, 0, ordinary, 0), CUDA_SUCCESS);
    assert_int_equal(f->cuda->cuMemSetAccess(base, 2 * MIB, &access, 1), CUDA_SUCCESS);
    ASSERT_OK(tms_region_from_settings(&f->regions, &settings, &region, &error), error);
    ASSERT_OK(tms_handles_create(&f->saver, &region, 2 * MIB, 0, &number, &error), error);
    ASSERT_OK(tms_handles_map(&f->saver, base + 2 * MIB, 2 * MIB, number, &busy, &error), error);
    fill(base, 4 * MIB, 1);
    ASSERT_OK(pause_all(f, &error), error);
    refuse(f, piece_at(base, 4 * MIB), TMS_INVALID_STATE, "paused");
    ASSERT_OK(resume_all(f, &error), error);
    const tms_shared_piece_t piece = piece_at(base, 4 * MIB);
    ASSERT_OK(publish(f, "name", &piece, 1, &written, &error), error);
    assert_int_equal(written, 4 * MIB);
    ASSERT_OK(tms_handles_unmap(&f->saver, base + 2 * MIB, 2 * MIB, &error), error);
    ASSERT_OK(tms_handles_release(&f->saver, number, &error), error);
    assert_int_equal(f->cuda->cuMemUnmap(base, 2 * MIB), CUDA_SUCCESS);
    assert_int_equal(f->cuda->cuMemRelease(ordinary), CUDA_SUCCESS);
    assert_int_equal(f->cuda->cuMemAddressFree(base, 4 * MIB), CUDA_SUCCESS);
}

static void pieces_that_cannot_be_objects_are_refused(void **state) {
    fixture_t *f = *state;
    const uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 80 * MIB);
    tms_shared_piece_t elsewhere = piece_at(address, BYTES);
    elsewhere.device = 1;
    const tms_shared_piece_t wrong[] = {piece_at(address, TMS_MIN_OBJECT_BYTES - 16),
                                        piece_at(address, BYTES + 8),
                                        piece_at(address, TMS_MAX_OBJECT_BYTES + 16),
                                        piece_at(0, BYTES),
                                        piece_at(address + 8, BYTES),
                                        elsewhere};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        refuse(f, wrong[i], TMS_INVALID_ARGUMENT, "cannot be an object");
}

static void without_the_kernel_nothing_is_published(void **state) {
    fixture_t *f = *state;
    char text[4096];
    tms_error_t error;
    uint64_t written;
    const tms_shared_piece_t piece = piece_at(allocate_filled(f, "a", TMS_BACKUP_NONE, BYTES, 1), BYTES);
    launch_nothing(f);
    captured_stderr_t captured = capture_begin();
    const tms_status_t status = publish(f, "name", &piece, 1, &written, &error);
    capture_end(captured, text, sizeof text);
    assert_int_equal(status, TMS_DRIVER);
    assert_non_null(strstr(error.message, "fingerprints"));
    assert_non_null(strstr(text, "warning: publish: "));
    assert_non_null(strstr(text, "The call fails, because objects are named by their fingerprints."));
    assert_objects(0);
    assert_int_equal(list("names").count, 0);
}

/* There would be room for one of the two objects, and for the ring that writes it. */
static void what_does_not_fit_is_not_begun(void **state) {
    fixture_t *f = *state;
    enum { LARGE = 8 * BYTES };
    tms_error_t error;
    uint64_t written;
    tms_shared_piece_t pieces[2];
    for (uint32_t i = 0; i < 2; i++) pieces[i] = piece_at(allocate_filled(f, "a", TMS_BACKUP_NONE, LARGE, i + 1), LARGE);
    f->saver.stores.host.limits.cap_bytes = 2 * LARGE - 1;
    simulator()->clear_counts();
    assert_int_equal(publish(f, "name", pieces, 2, &written, &error), TMS_OUT_OF_HOST_MEMORY);
    assert_int_equal(simulator()->calls("cuMemcpyDtoHAsync"), 0);
    assert_objects(0);
    f->saver.stores.host.limits.cap_bytes = UINT64_MAX;
    ASSERT_OK(publish(f, "name", pieces, 2, &written, &error), error);
    assert_objects(2);
}

static void a_folder_without_room_is_not_begun(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t written;
    const tms_shared_piece_t piece = piece_at(allocate_filled(f, "a", TMS_BACKUP_NONE, BYTES, 1), BYTES);
    simulator()->clear_counts();
    left_bytes = BYTES - 4096;
    const tms_status_t status = publish(f, "name", &piece, 1, &written, &error);
    left_bytes = BYTES;
    assert_int_equal(status, TMS_BACKUP_IO);
    assert_non_null(strstr(error.message, folder));
    assert_int_equal(error.os_error, ENOSPC);
    assert_non_null(strstr(error.message, " of free space. The folder is full, in bytes or in files: set TMS_SHARED_DIR"));
    assert_non_null(strstr(error.message, "--shm-size"));
    assert_int_equal(simulator()->calls("cuMemcpyDtoHAsync"), 0);
    assert_objects(0);
    publish_one(f, "name", piece.address, BYTES);
    left_bytes = 4096; /* what exists needs no room */
    publish_one(f, "other", piece.address, 0);
    left_bytes = 0;
}

/* There is room for one object, which both pieces are. */
static void equal_pieces_need_room_once(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t written;
    tms_shared_piece_t pieces[2];
    for (size_t i = 0; i < 2; i++) pieces[i] = piece_at(allocate_filled(f, "a", TMS_BACKUP_NONE, BYTES, 1), BYTES);
    left_bytes = BYTES + BYTES / 2;
    const tms_status_t status = publish(f, "name", pieces, 2, &written, &error);
    left_bytes = 0;
    ASSERT_OK(status, error);
    assert_int_equal(written, BYTES);
    assert_objects(1);
}

static void a_failed_copy_publishes_nothing(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t written;
    const tms_shared_piece_t piece = piece_at(allocate_filled(f, "a", TMS_BACKUP_NONE, BYTES, 1), BYTES);
    simulator()->fail_after("cuMemcpyDtoHAsync", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(publish(f, "name", &piece, 1, &written, &error), TMS_DRIVER);
    assert_objects(0);
    assert_int_equal(list("names").count, 0);
    assert_int_equal(held(f), 0);
    publish_one(f, "name", piece.address, BYTES);
}

static int32_t stop(void *context) {
    (void)context;
    return 1;
}

/* Another process writes the object, and makes no progress. */
static void an_object_of_a_stopped_writer_is_not_published(void **state) {
    fixture_t *f = *state;
    static tms_shared_folder_t other;
    static const tms_error_context_t nowhere = {.operation = "test", .device = TMS_NO_DEVICE};
    tms_shared_attempt_t claim;
    tms_error_t error;
    uint64_t written;
    const uint64_t address = allocate_filled(f, "a", TMS_BACKUP_NONE, BYTES, 1);
    const tms_shared_piece_t piece = piece_at(address, BYTES);
    publish_one(f, "name", address, BYTES);
    const tms_shared_name_t name = only_object();
    restart(f);
    assert_int_equal(remove_tree(folder), 0);
    publish_one(f, "name", address, BYTES); /* in a new folder, with a new key */
    const tms_shared_name_t again = only_object();
    assert_string_not_equal(again.text, name.text);
    restart(f);
    assert_int_equal(remove_tree(strcat(strcpy((char[2 *PATH_BYTES]){0}, folder), "/names/name")), 0);
    tms_shared_folder_clean(&store_of(f)->folder, &f->log);
    tms_shared_entry_drop(&store_of(f)->folder, &again);
    assert_objects(0);
    ASSERT_OK(tms_shared_folder_open(&other, folder, &f->log, &nowhere, &error), error);
    ASSERT_OK(tms_shared_entry_try(&other, &again, BYTES, true, &claim, &nowhere, &error), error);
    assert_int_equal(claim.state, TMS_SHARED_CLAIMED);
    store_of(f)->patience = INT_MAX;
    const tms_selection_t cancelled = {.interrupted = stop};
    assert_int_equal(tms_publish_perform(&f->saver, &cancelled, &piece, 1, "name", contents, &written, &error),
                     TMS_INTERRUPTED);
    store_of(f)->patience = 0;
    assert_int_equal(publish(f, "name", &piece, 1, &written, &error), TMS_BACKUP_IO);
    assert_non_null(strstr(error.message, again.text));
    assert_int_equal(list("names").count, 0);
    tms_shared_entry_abandon(&other, &again, claim.fd);
    tms_shared_folder_close(&other, &f->log);
    publish_one(f, "name", address, BYTES);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_name_keeps_objects_that_no_process_holds),
        TEST(a_name_that_is_published_again_has_the_new_contents),
        TEST(pieces_are_in_order_and_equal_ones_are_one_object),
        TEST(nothing_can_be_published),
        TEST(memory_that_is_not_managed_is_published_and_adopted),
        TEST(paused_memory_is_refused),
        TEST(paused_memory_behind_ordinary_memory_is_refused),
        TEST(pieces_that_cannot_be_objects_are_refused),
        TEST(without_the_kernel_nothing_is_published),
        TEST(what_does_not_fit_is_not_begun),
        TEST(a_folder_without_room_is_not_begun),
        TEST(equal_pieces_need_room_once),
        TEST(a_failed_copy_publishes_nothing),
        TEST(an_object_of_a_stopped_writer_is_not_published),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
