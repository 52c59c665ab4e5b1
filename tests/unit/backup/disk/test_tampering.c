/* Guards single files of the disk store against other programs and users: directories that are removed or replaced, links of
 * other users, and files that are replaced, changed, truncated or unreadable. Only here each byte, owner and lock file is
 * checked: the error names the cause, no file of another owner is changed, and a retry succeeds once the cause is gone.
 * Pauses and resumes with such files are in core/test_saver_faults.c. */
#include "support/disk_hostile_fixture.h"

static void assert_loads(tms_disk_file_t *file) {
    if (load(file) != TMS_OK) fail_msg("%s", error.message);
    assert_memory_equal(got, pattern, BYTES);
}

/* The message contains `text`; the errno is `os_error`. */
static void assert_refused(tms_status_t status, int os_error, const char *text) {
    assert_int_equal(status, TMS_BACKUP_IO);
    assert_int_equal(error.status, TMS_BACKUP_IO);
    assert_int_equal(error.os_error, os_error);
    if (!strstr(error.message, text)) fail_msg("'%s' does not say '%s'", error.message, text);
    assert_string_equal(error.operation, "pause");
}

static void shell(const char *format, const char *one, const char *two) {
    char command[4 * PATH_BYTES];
    snprintf(command, sizeof(command), format, one, two);
    assert_int_equal(system(command), 0);
}

static void need_root(void) {
    if (geteuid() == 0) return;
    print_message("skipped: only root can act for several users\n");
    skip();
}

/* ---- the directory ---- */

static void a_removed_directory_loses_its_files_and_is_recreated(void **state) {
    (void)state;
    tms_disk_file_t *file = create_saved();
    shell("rm -rf '%s'%s", below("d"), "");
    assert_refused(load(file), ENOENT, file->path);
    assert_refused(save(file), ENOENT, file->path);
    assert_false(tms_disk_file_is_usable(file));
    tms_disk_file_t *next = create_saved(); /* beside the first, whose directory no longer has this name */
    assert_entries(below("d"), 1, 1);
    assert_destroyed_with_warnings(file, 0);
    assert_loads(next);
    assert_true(tms_disk_file_is_usable(next));
    tms_disk_file_destroy(&disk, next);
    assert_entries(below("d"), 0, 0);
    assert_null(disk.locks);
}

static void replacing_the_directory_changes_no_file(void **state) {
    (void)state;
    tms_disk_file_t *file = create_saved();
    assert_int_equal(rename(below("d"), below("moved")), 0);
    assert_int_equal(mkdir(below("victim"), 0700), 0);
    char trap[4 * PATH_BYTES], kept[4 * PATH_BYTES];
    snprintf(trap, sizeof(trap), "%s/%s", below("victim"), file->name);
    snprintf(kept, sizeof(kept), "%s/%s", below("moved"), file->name);
    put_file(trap, "precious");
    assert_int_equal(symlink(below("victim"), below("d")), 0);

    assert_loads(file);
    for (int i = 0; i < BYTES; i++) pattern[i] ^= 0x55;
    assert_int_equal(save(file), TMS_OK);
    assert_loads(file);
    assert_file(trap, "precious");
    assert_true(exists(kept));
    tms_disk_file_t *next = create_saved(); /* a new file follows the path as it is now: the link is this user's */
    assert_entries(below("victim"), 2, 1);
    tms_disk_file_destroy(&disk, file);
    assert_false(exists(kept));
    assert_entries(below("moved"), 0, 0);
    assert_file(trap, "precious");
    tms_disk_file_destroy(&disk, next);
    assert_entries(below("victim"), 1, 0);
}

static void a_link_of_another_user_is_not_followed(void **state) {
    (void)state;
    need_root();
    assert_int_equal(mkdir(below("victim"), 0777), 0);
    assert_int_equal(symlink(below("victim"), below("link")), 0);
    assert_int_equal(tms_disk_set_directory(&disk, below("link"), &error), TMS_OK); /* root's: followed */
    tms_disk_file_t *file = create_saved();
    assert_int_equal(lchown(below("link"), OTHER_USER, OTHER_USER), 0);

    tms_disk_file_t *none = NULL;
    assert_refused(tms_disk_file_create(&disk, 10, &none, NULL, &context, &error), EPERM, "symbolic link of another user");
    assert_null(none);
    assert_int_equal(tms_disk_set_directory(&disk, below("link"), &error), TMS_BACKUP_IO);
    assert_int_equal(tms_disk_set_directory(&disk, below("link///"), &error), TMS_BACKUP_IO);
    assert_entries(below("victim"), 1, 1);
    assert_loads(file); /* opened while it was trusted */
    assert_int_equal(lchown(below("link"), 0, 0), 0);
    tms_disk_file_destroy(&disk, create_saved());
    tms_disk_file_destroy(&disk, file);
    assert_entries(below("victim"), 0, 0);
}

static void a_directory_that_others_can_change_is_reported(void **state) {
    (void)state;
    assert_int_equal(mkdir(below("own"), 0700), 0);
    assert_int_equal(tms_disk_set_directory(&disk, below("own"), &error), TMS_OK);
    assert_false(disk.warned_shared);
    assert_int_equal(chmod(below("own"), 0777), 0);
    tms_disk_file_t *file = create_saved(); /* safe there */
    assert_true(disk.warned_shared);
    assert_loads(file);
    tms_disk_file_destroy(&disk, file);
}

/* The reverse: an ordinary user and a link that root made. */
static void a_link_of_root_is_followed_by_others(void **state) {
    (void)state;
    need_root();
    assert_int_equal(chmod(base, 0755), 0);
    assert_int_equal(mkdir(below("real"), 0700), 0);
    assert_int_equal(chown(below("real"), OTHER_USER, OTHER_USER), 0);
    assert_int_equal(symlink(below("real"), below("link")), 0);
    assert_int_equal(seteuid(OTHER_USER), 0);
    tms_status_t status = tms_disk_set_directory(&disk, below("link"), &error);
    assert_int_equal(seteuid(0), 0);
    assert_int_equal(status, TMS_OK);
}

/* ---- the file ---- */

static void a_changed_byte_is_never_returned(void **state) {
    (void)state;
    tms_disk_file_t *file = create_saved();
    static const off_t places[] = {0, 1024 * 1024 - 1, 1024 * 1024, BYTES - 1};
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        char changed = (char)(pattern[places[i]] ^ 4);
        int fd = open(file->path, O_WRONLY);
        assert_int_equal(pwrite(fd, &changed, 1, places[i]), 1);
        assert_refused(load(file), 0, "was changed or truncated");
        assert_non_null(strstr(error.message, file->path));
        assert_int_equal(pwrite(fd, &pattern[places[i]], 1, places[i]), 1);
        close(fd);
        assert_loads(file);
    }
    tms_disk_file_destroy(&disk, file);
}

static void a_truncated_file_is_refused_and_recreated(void **state) {
    (void)state;
    tms_disk_file_t *file = create_saved();
    assert_int_equal(truncate(file->path, 2 * MIB + 7), 0);
    assert_refused(load(file), 0, "was changed or truncated");
    assert_false(tms_disk_file_is_usable(file));
    assert_int_equal(truncate(file->path, BYTES), 0); /* its size is restored, and its end is zeros */
    assert_refused(load(file), 0, "was changed or truncated");
    assert_int_equal(truncate(file->path, BYTES + 1), 0);
    assert_false(tms_disk_file_is_usable(file));
    tms_disk_file_destroy(&disk, file);
    assert_entries(below("d"), 0, 0);
}

static void an_unwritten_file_is_no_backup(void **state) {
    (void)state;
    tms_disk_file_t *file = create(BYTES);
    assert_refused(load(file), 0, "was changed or truncated");
    fault.pwrite_error = EIO; /* and a failed save does not leave one */
    assert_int_equal(save(file), TMS_BACKUP_IO);
    fault.pwrite_error = 0;
    assert_refused(load(file), 0, "was changed or truncated");
    assert_int_equal(save(file), TMS_OK);
    assert_loads(file);
    tms_disk_file_destroy(&disk, file);
}

static void a_file_that_replaced_ours_is_left_alone(void **state) {
    (void)state;
    tms_disk_file_t *file = create_saved();
    char path[2 * PATH_BYTES];
    snprintf(path, sizeof(path), "%s", file->path);
    assert_int_equal(rename(path, below("moved")), 0);
    put_file(path, "precious");
    assert_refused(save(file), ESTALE, "was replaced by another file");
    assert_refused(load(file), 0, "was changed or truncated");
    assert_false(tms_disk_file_is_usable(file));
    assert_file(path, "precious");

    assert_int_equal(rename(below("moved"), path), 0); /* the cause is gone */
    assert_true(tms_disk_file_is_usable(file));
    assert_loads(file);
    assert_int_equal(save(file), TMS_OK);

    /* A restored copy has the right contents. It may be read, but it is not our file and is not written. */
    shell("cp -p '%s' '%s'", path, below("copy"));
    assert_int_equal(unlink(path), 0);
    put_file(below("number"), ""); /* takes the inode number that the file system may reuse */
    assert_int_equal(rename(below("copy"), path), 0);
    assert_loads(file);
    assert_refused(save(file), ESTALE, "was replaced by another file");
    assert_destroyed_with_warnings(file, 1);
    assert_true(exists(path));
    assert_entries(below("d"), 1, 0);
    assert_int_equal(unlink(path), 0);
}

static void a_lock_file_that_replaced_ours_is_left_alone(void **state) {
    (void)state;
    tms_disk_file_t *file = create_saved();
    char path[2 * PATH_BYTES];
    snprintf(path, sizeof(path), "%s.lock", file->owner_lock->prefix);
    assert_int_equal(unlink(path), 0);
    put_file(below("number"), "");
    put_file(below("lock"), "precious");
    assert_int_equal(rename(below("lock"), path), 0);
    assert_destroyed_with_warnings(file, 0);
    assert_file(path, "precious");
    assert_null(disk.locks);
}

static void an_unreadable_file_is_read_once_it_is_readable(void **state) {
    (void)state;
    tms_disk_file_t *file = create_saved();
    struct stat found;
    uid_t user = geteuid();
    if (user == 0) { /* root may read anything: become a user who may not */
        assert_int_equal(chmod(base, 0755), 0);
        assert_int_equal(chmod(below("d"), 0755), 0);
        assert_int_equal(chown(file->path, OTHER_USER, OTHER_USER), 0);
        assert_int_equal(seteuid(OTHER_USER), 0);
    }
    int closed = chmod(file->path, 0);
    tms_status_t refused = load(file);
    int os_error = error.os_error;
    int opened = chmod(file->path, 0600);
    tms_status_t read = load(file);
    if (user == 0) assert_int_equal(seteuid(0), 0);
    assert_int_equal(closed + opened, 0);
    assert_int_equal(refused, TMS_BACKUP_IO);
    assert_int_equal(os_error, EACCES);
    assert_int_equal(read, TMS_OK);
    assert_memory_equal(got, pattern, BYTES);
    if (user == 0) assert_int_equal(chown(file->path, 0, 0), 0);
    assert_int_equal(stat(file->path, &found), 0);
    assert_int_equal(found.st_mode & 07777, 0600);
    tms_disk_file_destroy(&disk, file);
}

static void transfers_are_of_whole_blocks(void **state) {
    (void)state;
    tms_disk_file_t *file = create_saved();
    assert_int_equal(tms_disk_file_write(file, pattern, MIB, 5, &context, &error), TMS_INVALID_ARGUMENT);
    assert_int_equal(tms_disk_file_write(file, pattern, 5, 0, &context, &error), TMS_INVALID_ARGUMENT);
    assert_int_equal(tms_disk_file_read(file, got, MIB, 3 * MIB, &context, &error), TMS_INVALID_ARGUMENT);
    assert_int_equal(tms_disk_file_read(file, got, MIB, UINT64_MAX - MIB + 1, &context, &error), TMS_INVALID_ARGUMENT);
    assert_loads(file);
    tms_disk_file_destroy(&disk, file);
}

/* ---- failures of the system ---- */

/* A new file or lock file whose stat fails is removed at once, or later if the removal fails as well. */
static void test_a_new_file_whose_stat_fails(void **state) {
    (void)state;
    tms_disk_file_t *first = create_saved();
    for (int refused = 0; refused < 2; refused++) {
        looks_allowed = looks_refused = 1; /* the directory, and not the file */
        unlinks_refused = refused;
        assert_create_fails(BYTES, TMS_BACKUP_IO, EIO);
        assert_string_equal(error.call, "fstatfs");
        assert_entries(below("d"), 1 + (unsigned)refused, 1);
    }
    tms_disk_file_t *second = create_saved();
    assert_entries(below("d"), 2, 1);
    assert_loads(first);
    assert_loads(second);
    tms_disk_file_destroy(&disk, first);
    tms_disk_file_destroy(&disk, second);
    assert_entries(below("d"), 0, 0);
}

static void test_a_new_lock_file_whose_stat_fails(void **state) {
    (void)state;
    for (int refused = 0; refused < 2; refused++) {
        looks_allowed = 2; /* the directory, twice */
        looks_refused = 1;
        unlinks_refused = refused;
        assert_create_fails(BYTES, TMS_BACKUP_IO, EIO);
        assert_string_equal(error.call, "fstatfs");
        assert_int_equal(count_entries(below("d"), ""), refused); /* by the name that no clean-up looks for */
        assert_int_equal(count_entries(below("d"), ".new"), refused);
        assert_int_equal(disk.refuses, refused); /* it is not left to the next process that cleans up */
    }
    tms_disk_file_t *file = create_saved();
    assert_entries(below("d"), 1, 1);
    assert_loads(file);
    tms_disk_file_destroy(&disk, file);
    assert_entries(below("d"), 0, 0);
}

int main(void) {
#define DISK_TEST(test) cmocka_unit_test_setup_teardown(test, begin, release)
    const struct CMUnitTest tests[] = {
        DISK_TEST(test_a_new_file_whose_stat_fails),
        DISK_TEST(test_a_new_lock_file_whose_stat_fails),
        DISK_TEST(a_removed_directory_loses_its_files_and_is_recreated),
        DISK_TEST(replacing_the_directory_changes_no_file),
        DISK_TEST(a_link_of_another_user_is_not_followed),
        DISK_TEST(a_directory_that_others_can_change_is_reported),
        DISK_TEST(a_link_of_root_is_followed_by_others),
        DISK_TEST(a_changed_byte_is_never_returned),
        DISK_TEST(a_truncated_file_is_refused_and_recreated),
        DISK_TEST(an_unwritten_file_is_no_backup),
        DISK_TEST(a_file_that_replaced_ours_is_left_alone),
        DISK_TEST(a_lock_file_that_replaced_ours_is_left_alone),
        DISK_TEST(an_unreadable_file_is_read_once_it_is_readable),
        DISK_TEST(transfers_are_of_whole_blocks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
