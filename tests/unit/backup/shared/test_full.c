/* Guards that a full folder is an error that says what to do, and harms nothing: a tmpfs of a few pages, or of a few files,
 * in a mount namespace of its own. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <sys/mount.h>

#include "backup/shared/entry.h"
#include "own_process.h"
#include "support/shared_fixture.h"

static void check_message(void) {
    CHECK(error.status == TMS_BACKUP_IO && error.os_error == ENOSPC);
    CHECK(strstr(error.message, root) && strstr(error.message, "TMS_SHARED_DIR") && strstr(error.message, "--shm-size"));
}

static void check_nothing_left(void) {
    CHECK(count_names(below("objects")) == 0);
    CHECK(count_names(below("holders")) == 0);
}

/* Writes objects until one fails, and gives its claim up. Returns the number of objects. */
static unsigned fill(const tms_shared_folder_t *folder) {
    for (unsigned number = 1;; number++) {
        tms_shared_attempt_t attempt;
        bool good = try_object(folder, number, true, &attempt) == TMS_OK;
        if (good && write_part(folder, number, attempt.fd, 0, OBJECT_BYTES) != TMS_OK) {
            abandon(folder, number, attempt.fd);
            good = false;
        }
        if (good) good = finish(folder, number, &attempt.fd) == TMS_OK;
        if (!good) return number - 1;
        close(attempt.fd);
    }
}

/* The objects are whole, there is nothing beside them, and after one was given up there is room for another. */
static void check_full(const tms_shared_folder_t *folder, unsigned count) {
    bool written;
    CHECK(count_names(below("objects")) == count);
    CHECK(count_names(holder_path(folder, "")) == count + 1);
    for (unsigned number = 1; number <= count; number++) CHECK(get_object(folder, number, &written) && !written);
    if (count == 0) return;
    drop(folder, 1);
    CHECK(get_object(folder, count + 1, &written) && written);
    drop(folder, count + 1);
}

static void fill_bytes(void) {
    tms_shared_folder_t folder;
    enter_mount_namespace();
    mount_memory(base, "size=1m,mode=0700");
    CHECK(tms_shared_folder_open(&folder, root, &quiet, &context, &error) == TMS_OK);
    unsigned count = fill(&folder);
    CHECK(count > 10 && strcmp(error.call, "pwrite") == 0);
    CHECK(strstr(error.message, "The file system has "));
    check_message();
    check_full(&folder, count);
    tms_shared_folder_close(&folder, &quiet);
    check_nothing_left();
    CHECK(umount(base) == 0);
    mount_memory(base, "size=256k,mode=0700");
    CHECK(tms_shared_folder_open(&folder, root, &quiet, &context, &error) == TMS_BACKUP_IO);
    check_message();
    CHECK(strstr(error.message, below("key")) && !exists(below("key")));
    check_nothing_left();
    _exit(0);
}

static void a_folder_that_is_full_in_bytes(void **state) {
    (void)state;
    assert_exits(fill_bytes);
}

/* With each number of files something else is the first that does not fit: the folder, a directory, the lock, the key, an
 * object, a link. */
static void fill_files(void) {
    unsigned refused = 0, count = 0;
    enter_mount_namespace();
    for (unsigned files = 1; count < 3; files++) {
        char options[64];
        tms_shared_folder_t folder;
        snprintf(options, sizeof options, "nr_inodes=%u,mode=0700", files);
        mount_memory(base, options);
        if (tms_shared_folder_open(&folder, root, &quiet, &context, &error) == TMS_OK) {
            count = fill(&folder);
            check_message();
            check_full(&folder, count);
            tms_shared_folder_close(&folder, &quiet);
        } else {
            check_message();
            refused++;
        }
        check_nothing_left();
        CHECK(umount(base) == 0);
    }
    CHECK(refused >= 7); /* the root of the tmpfs, the folder, holders, objects, a holder, its lock, the key, its link */
    _exit(0);
}

static void a_folder_that_is_full_in_files(void **state) {
    (void)state;
    assert_exits(fill_files);
}

int main(void) {
#define FULL_TEST(test) cmocka_unit_test_setup_teardown(test, make, release)
    const struct CMUnitTest tests[] = {
        FULL_TEST(a_folder_that_is_full_in_bytes),
        FULL_TEST(a_folder_that_is_full_in_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
