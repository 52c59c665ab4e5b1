/* Guards backup/shared/key.c: which keys are refused, and that all processes have the first one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <sys/resource.h>

#include "backup/shared/key.h"
#include "own_process.h"
#include "support/folder_fixture.h"

enum { OTHER_USER = 12345, HEADER_BYTES = 24 };

static void all_of_the_key_is_random_and_the_same_for_all(void **state) {
    (void)state;
    tms_shared_folder_t *first = open_folder(), *second = open_folder();
    assert_memory_equal(first->key, second->key, sizeof *first->key);
    assert_string_not_equal(first->holder_name, second->holder_name);
    const unsigned char *bytes = (const unsigned char *)first->key;
    for (size_t i = 0; i + 16 <= sizeof *first->key; i += 16) {
        static const char zeros[16];
        assert_memory_not_equal(bytes + i, zeros, 16);
    }
    tms_shared_key_t *before = malloc(sizeof *before);
    assert_non_null(before);
    memcpy(before, first->key, sizeof *before);
    close_folder(first);
    close_folder(second);
    first = open_folder(); /* the key stays although no process uses the folder */
    assert_memory_equal(first->key, before, sizeof *before);
    close_folder(first);
    assert_int_equal(unlink(below("key")), 0);
    first = open_folder();
    assert_memory_not_equal(first->key, before, sizeof *before);
    close_folder(first);
    free(before);
}

/* Changes the file of the key, and gives it its mode again. */
static void change_key(off_t offset, const void *data, size_t bytes, off_t length) {
    assert_int_equal(chmod(below("key"), 0600), 0);
    int fd = open(below("key"), O_WRONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    if (bytes > 0) assert_int_equal(pwrite(fd, data, bytes, offset), bytes);
    if (length >= 0) assert_int_equal(ftruncate(fd, length), 0);
    close(fd);
    assert_int_equal(chmod(below("key"), 0400), 0);
}

static void assert_key_refused(const char *text) {
    struct stat before, after;
    assert_int_equal(lstat(below("key"), &before), 0);
    assert_refused(root, text);
    assert_non_null(strstr(error.message, below("key")));
    assert_int_equal(lstat(below("key"), &after), 0);
    assert_int_equal(before.st_ino, after.st_ino);
    assert_int_equal(before.st_size, after.st_size);
    assert_int_equal(count_names(below("holders")), 0);
}

static void damaged_and_foreign_keys(void **state) {
    (void)state;
    const off_t whole = HEADER_BYTES + sizeof(tms_shared_key_t);
    const uint32_t format = TMS_SHARED_FORMAT + 1, right = TMS_SHARED_FORMAT, bytes = 5, rightly = sizeof(tms_shared_key_t);
    char byte;
    close_folder(open_folder());
    int fd = open(below("key"), O_RDONLY | O_CLOEXEC);
    assert_int_equal(lseek(fd, 0, SEEK_END), whole);
    assert_int_equal(pread(fd, &byte, 1, whole - 1), 1);
    close(fd);
    change_key(8, &format, sizeof format, -1);
    assert_key_refused("has format 2, and this release needs format 1");
    assert_non_null(strstr(error.message, "TMS_SHARED_DIR"));
    change_key(8, &right, sizeof right, -1);
    change_key(12, &bytes, sizeof bytes, -1);
    assert_key_refused("bytes instead of");
    change_key(12, &rightly, sizeof rightly, whole + 1);
    assert_key_refused("bytes instead of");
    change_key(0, NULL, 0, whole);
    close_folder(open_folder());
    byte ^= 1;
    change_key(whole - 1, &byte, 1, -1);
    assert_key_refused("is damaged");
    change_key(0, NULL, 0, whole - 1);
    assert_key_refused("bytes instead of");
    change_key(0, "TMSSTORX", 8, -1);
    assert_key_refused("is no key of this package");
    change_key(0, "TMSSTORE", 8, HEADER_BYTES - 1);
    assert_key_refused("is no key of this package");
    change_key(0, NULL, 0, 0);
    assert_key_refused("is no key of this package");
}

static void files_that_cannot_be_a_key(void **state) {
    (void)state;
    close_folder(open_folder());
    assert_int_equal(chmod(below("key"), 0440), 0);
    assert_key_refused("is no file that only this user can use");
    assert_int_equal(chmod(below("key"), 0400), 0);
    assert_int_equal(rename(below("key"), below("true key")), 0);
    assert_int_equal(symlink("true key", below("key")), 0);
    assert_key_refused("openat failed");
    assert_int_equal(unlink(below("key")), 0);
    assert_int_equal(mkfifo(below("key"), 0600), 0); /* its other end is never opened */
    assert_key_refused("is no file that only this user can use");
    assert_int_equal(unlink(below("key")), 0);
    assert_int_equal(mkdir(below("key"), 0700), 0);
    assert_key_refused("is no file that only this user can use");
    assert_int_equal(rmdir(below("key")), 0);
    if (geteuid() != 0) return;
    assert_int_equal(rename(below("true key"), below("key")), 0);
    assert_int_equal(chown(below("key"), OTHER_USER, OTHER_USER), 0);
    assert_key_refused("is no file that only this user can use");
}

/* The default action of SIGXFSZ would end the child. */
static void open_with_a_limit(void) {
    struct rlimit limit = {.rlim_cur = 1000, .rlim_max = 1000};
    tms_shared_folder_t folder;
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    CHECK(tms_shared_folder_open(&folder, root, &quiet, &context, &error) == TMS_BACKUP_IO);
    CHECK(error.os_error == EFBIG && strstr(error.message, "RLIMIT_FSIZE") && strstr(error.message, below("key")));
    _exit(0);
}

static void a_key_beyond_the_limit_for_files(void **state) {
    (void)state;
    assert_exits(open_with_a_limit);
    assert_false(exists(below("key")));
    assert_nothing_left();
}

/* Another process makes the key while this one writes its own. */
static tms_shared_folder_t *other;
static void open_other(void) { other = open_folder(); }

static void a_key_that_comes_first(void **state) {
    (void)state;
    fault.before[CALL_linkat] = open_other;
    tms_shared_folder_t *folder = open_folder();
    assert_non_null(other);
    assert_memory_equal(folder->key, other->key, sizeof *folder->key);
    assert_int_equal(links_of(below("key")), 1);
    close_folder(folder);
    close_folder(other);
    assert_nothing_left();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        FOLDER_TEST(all_of_the_key_is_random_and_the_same_for_all),
        FOLDER_TEST(damaged_and_foreign_keys),
        FOLDER_TEST(files_that_cannot_be_a_key),
        FOLDER_TEST(a_key_beyond_the_limit_for_files),
        FOLDER_TEST(a_key_that_comes_first),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
