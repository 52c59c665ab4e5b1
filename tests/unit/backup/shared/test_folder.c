/* Guards backup/shared/folder.c and key.c: which folders and keys are refused, what is made, what is removed, and that a
 * holder that another process removes while it is made is made again. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <sys/file.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/vfs.h>

#include "backup/shared/folder.h"
#include "backup/shared/key.h"
#include "captured_stderr.h"
#include "own_process.h"
#include "support/shared_faults.h"
#include "support/shared_fixture.h"

enum { OTHER_USER = 12345, HEADER_BYTES = 24 };

static int make_plain(void **state) {
    inject_nothing();
    return make(state);
}

static bool is_locked(const char *path) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    bool locked = flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    close(fd);
    return locked;
}

/* ---- opening ---- */

static void a_new_folder(void **state) {
    (void)state;
    tms_shared_folder_t *folder = open_folder();
    assert_int_equal(mode_of(root), 0700);
    assert_int_equal(mode_of(below("objects")), 0700);
    assert_int_equal(mode_of(below("holders")), 0700);
    assert_int_equal(mode_of(below("key")), 0400);
    assert_int_equal(links_of(below("key")), 1);
    assert_int_equal(count_names(root), 3);
    assert_int_equal(count_names(below("objects")), 0);
    assert_int_equal(count_names(below("holders")), 1);
    assert_int_equal(strlen(folder->holder_name), TMS_SHARED_HOLDER_DIGITS);
    assert_int_equal(count_names(holder_path(folder, "")), 1);
    assert_true(is_locked(holder_path(folder, "lock")));
    assert_string_equal(folder->path, root);
    const int descriptors[] = {folder->root, folder->objects, folder->holder, folder->lock};
    for (size_t i = 0; i < 4; i++) assert_int_equal(fcntl(descriptors[i], F_GETFD), FD_CLOEXEC);
    close_folder(folder);
    assert_nothing_left();
    assert_true(exists(below("key")));
}

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

/* Opens the usual folder as a user that has no other process. */
static void open_as_new_user(void) {
    char wanted[64];
    tms_shared_folder_t folder;
    if (geteuid() != 0) _exit(SKIPPED);
    uid_t user = 1000000 + (uid_t)getpid();
    CHECK(setuid(user) == 0);
    snprintf(wanted, sizeof wanted, "/dev/shm/torch_memory_saver-store-%lu", (unsigned long)user);
    const char *const unset[] = {NULL, ""};
    for (size_t i = 0; i < 2; i++) {
        CHECK(tms_shared_folder_open(&folder, unset[i], &quiet, &context, &error) == TMS_OK);
        CHECK(strcmp(folder.path, wanted) == 0);
        CHECK(tms_shared_folder_is_current(&folder, unset[i]));
        tms_shared_folder_close(&folder, &quiet);
    }
    snprintf(root, sizeof root, "%s", wanted);
    CHECK(unlink(below("key")) == 0 && rmdir(below("objects")) == 0 && rmdir(below("holders")) == 0 && rmdir(wanted) == 0);
    _exit(0);
}

static void the_usual_folder_is_of_the_user(void **state) {
    (void)state;
    assert_exits(open_as_new_user);
}

static void a_folder_that_others_can_write_to(void **state) {
    (void)state;
    assert_int_equal(mkdir(root, 0700), 0);
    const mode_t modes[] = {0720, 0702, 0777};
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(chmod(root, modes[i]), 0);
        assert_refused(root, "no other user can write to it");
    }
    assert_int_equal(count_names(root), 0);
    assert_int_equal(chmod(root, 0755), 0);
    close_folder(open_folder());
}

static void a_folder_that_is_a_link(void **state) {
    (void)state;
    char target[TEMPORARY_BYTES + 8];
    snprintf(target, sizeof target, "%s/target", base);
    assert_int_equal(mkdir(target, 0700), 0);
    assert_int_equal(symlink(target, root), 0);
    assert_refused(root, "openat failed");
    assert_int_equal(count_names(target), 0);
}

static void a_folder_of_another_user(void **state) {
    (void)state;
    if (geteuid() != 0) skip();
    assert_int_equal(mkdir(root, 0700), 0);
    assert_int_equal(chown(root, OTHER_USER, OTHER_USER), 0);
    assert_refused(root, "the check that it is this user's");
    assert_int_equal(count_names(root), 0);
}

/* A folder of root is trusted elsewhere, but its files are root's. */
static void open_roots(void) {
    tms_shared_folder_t folder;
    CHECK(setuid(OTHER_USER) == 0);
    CHECK(tms_shared_folder_open(&folder, root, &quiet, &context, &error) == TMS_BACKUP_IO);
    CHECK(strstr(error.message, "the check that it is this user's") && strstr(error.message, root));
    _exit(0);
}

static void a_folder_of_root(void **state) {
    (void)state;
    if (geteuid() != 0) skip();
    assert_int_equal(chmod(base, 0755), 0);
    assert_int_equal(mkdir(root, 0755), 0);
    assert_exits(open_roots);
    assert_int_equal(count_names(root), 0);
}

static void a_folder_that_is_not_in_memory(void **state) {
    (void)state;
    char path[64];
    struct statfs system;
    snprintf(path, sizeof path, "/proc/%d/task", (int)getpid());
    assert_refused(path, "is not on tmpfs");
    assert_non_null(strstr(error.message, "TMS_SHARED_DIR"));
    assert_int_equal(statfs("/dev/shm", &system), 0);
}

static void paths_that_are_not_there(void **state) {
    (void)state;
    char path[TEMPORARY_BYTES + 16];
    assert_refused("relative/folder", "not absolute");
    snprintf(path, sizeof path, "%s/missing/store", base);
    assert_refused(path, "mkdirat failed");
    snprintf(path, sizeof path, "%s/missing", base);
    assert_false(exists(path));
    put_file(root, "text", 0600);
    assert_refused(root, "openat failed");
}

static void is_current(void **state) {
    (void)state;
    char moved[TEMPORARY_BYTES + 16], other[TEMPORARY_BYTES + 16], slashes[TEMPORARY_BYTES + 16];
    snprintf(moved, sizeof moved, "%s/moved", base);
    snprintf(other, sizeof other, "%s/other", base);
    snprintf(slashes, sizeof slashes, "%s//", root);
    tms_shared_folder_t *folder = open_folder();
    assert_true(tms_shared_folder_is_current(folder, root));
    assert_true(tms_shared_folder_is_current(folder, slashes));
    assert_false(tms_shared_folder_is_current(folder, other));
    assert_int_equal(rename(root, moved), 0);
    assert_false(tms_shared_folder_is_current(folder, root));
    assert_int_equal(mkdir(root, 0700), 0);
    assert_false(tms_shared_folder_is_current(folder, root));
    assert_int_equal(rmdir(root), 0);
    assert_int_equal(symlink(moved, root), 0);
    assert_false(tms_shared_folder_is_current(folder, root));
    assert_int_equal(unlink(root), 0);
    assert_int_equal(rename(moved, root), 0);
    assert_true(tms_shared_folder_is_current(folder, root));
    assert_int_equal(rename(below("objects"), below("old")), 0);
    assert_int_equal(mkdir(below("objects"), 0700), 0);
    assert_false(tms_shared_folder_is_current(folder, root));
    assert_int_equal(rmdir(below("objects")), 0);
    assert_int_equal(rename(below("old"), below("objects")), 0);
    assert_true(tms_shared_folder_is_current(folder, root));
    assert_int_equal(unlink(holder_path(folder, "lock")), 0);
    assert_false(tms_shared_folder_is_current(folder, root));
    close_folder(folder);
    assert_nothing_left();
    tms_shared_folder_t closed = {.root = -1, .objects = -1, .holder = -1, .lock = -1};
    assert_false(tms_shared_folder_is_current(&closed, root));
}

static void a_folder_that_is_not_open_is_closed(void **state) {
    (void)state;
    /* The other descriptors are those of another file. */
    int file = open("/dev/null", O_RDONLY | O_CLOEXEC);
    assert_true(file >= 0);
    tms_shared_folder_t folder = {.root = -1, .objects = file, .holder = file, .lock = file};
    tms_shared_folder_close(&folder, &quiet);
    assert_int_equal(fcntl(file, F_GETFD), FD_CLOEXEC);
    folder = (tms_shared_folder_t){.root = -1, .objects = file, .holder = file, .lock = file};
    tms_shared_folder_after_fork_in_child(&folder);
    assert_int_equal(fcntl(file, F_GETFD), FD_CLOEXEC);
    tms_shared_folder_close(&folder, &quiet);
    assert_int_equal(folder.root, -1);
    close(file);
}

/* ---- keys ---- */

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

/* ---- the clean-up ---- */

static void make_dead_holder(const char *name, unsigned number) {
    char path[64];
    snprintf(path, sizeof path, "holders/%s", name);
    assert_int_equal(mkdir(below(path), 0700), 0);
    snprintf(path, sizeof path, "holders/%s/lock", name);
    put_file(below(path), "", 0600);
    if (number == 0) return;
    snprintf(path, sizeof path, "holders/%s/%s", name, name_of(number).text);
    if (link(object_path(number, ""), below(path)) != 0) {
        put_file(object_path(number, ""), "contents", 0400);
        assert_int_equal(link(object_path(number, ""), below(path)), 0);
    }
}

static void what_dead_processes_left_is_removed(void **state) {
    (void)state;
    tms_shared_folder_t *folder = open_folder();
    bool written;
    assert_true(get_object(folder, 1, &written));
    make_dead_holder("0123456789abcdef", 1); /* the other holder links it, too */
    make_dead_holder("0123456789abcdee", 2);
    make_dead_holder(".0123456789abcded", 0);
    put_file(object_path(3, ""), "not linked", 0400);
    put_file(object_path(4, ".part"), "half", 0600);
    put_file(object_path(5, ".part"), "finished, but for the name", 0400);
    assert_int_equal(link(object_path(5, ".part"), object_path(5, "")), 0);
    assert_int_equal(mkdir(below("holders/.0123456789abcdea"), 0700), 0);
    tms_shared_folder_clean(folder, &quiet);
    assert_int_equal(count_names(below("holders")), 1);
    assert_int_equal(count_names(below("objects")), 1);
    assert_int_equal(links_of(object_path(1, "")), 2);
    close_folder(folder);
    assert_nothing_left();
}

static void without_a_dead_process_objects_are_not_looked_at(void **state) {
    (void)state;
    tms_shared_folder_t *folder = open_folder(), *second = open_folder();
    put_file(object_path(3, ""), "not linked", 0400);
    put_file(object_path(4, ".part"), "half", 0600);
    tms_shared_folder_clean(folder, &quiet);
    assert_int_equal(count_names(below("objects")), 2);
    assert_int_equal(count_names(below("holders")), 2);
    close_folder(second);
    assert_int_equal(mkdir(below("holders/.0123456789abcdea"), 0700), 0); /* killed before it had a lock */
    tms_shared_folder_clean(folder, &quiet);
    assert_int_equal(count_names(below("objects")), 0);
    assert_int_equal(count_names(below("holders")), 1);
    close_folder(folder);
}

static void what_living_processes_have_stays(void **state) {
    (void)state;
    tms_shared_folder_t *folder = open_folder();
    make_dead_holder("0123456789abcdee", 0);
    make_dead_holder("0123456789abcdef", 2);
    make_dead_holder(".0123456789abcdec", 0);
    put_file(object_path(4, ".part"), "half", 0600);
    put_file(object_path(5, ""), "published", 0400);
    assert_int_equal(mkdir(below("names"), 0700), 0);
    assert_int_equal(mkdir(below("names/model"), 0700), 0);
    assert_int_equal(link(object_path(5, ""), below("names/model/object")), 0);
    put_file(below("names/model/manifest.json"), "{}", 0400);
    const char *const locked[] = {below("holders/0123456789abcdef/lock"), below("holders/.0123456789abcdec/lock"),
                                  object_path(4, ".part")};
    int fds[3];
    for (size_t i = 0; i < 3; i++) {
        fds[i] = open(locked[i], O_RDWR | O_CLOEXEC);
        assert_int_equal(flock(fds[i], LOCK_EX | LOCK_NB), 0);
    }
    tms_shared_folder_clean(folder, &quiet);
    assert_int_equal(count_names(below("holders")), 3);
    assert_int_equal(count_names(below("objects")), 3);
    assert_int_equal(links_of(object_path(2, "")), 2);
    for (size_t i = 0; i < 3; i++) close(fds[i]);
    tms_shared_folder_clean(folder, &quiet);
    assert_int_equal(count_names(below("holders")), 1);
    assert_int_equal(count_names(below("objects")), 1);
    assert_int_equal(links_of(object_path(5, "")), 2);
    close_folder(folder);
}

/* A user has removed a lock, so the holder cannot show any more whether its process lives. */
static void a_holder_that_lost_its_lock(void **state) {
    (void)state;
    tms_shared_folder_t *folder = open_folder();
    make_dead_holder("0123456789abcdef", 2);
    assert_int_equal(unlink(below("holders/0123456789abcdef/lock")), 0);
    tms_shared_folder_clean(folder, &quiet);
    assert_int_equal(count_names(below("holders")), 1);
    assert_int_equal(count_names(below("objects")), 0);
    close_folder(folder);
}

static void what_cannot_be_removed_is_logged(void **state) {
    (void)state;
    char text[4096];
    tms_log_t log;
    tms_log_init(&log, TMS_LOG_WARNING);
    tms_shared_folder_t *folder = open_folder();
    make_dead_holder("0123456789abcdef", 1);
    for (unsigned i = 0; i < 8; i++) { /* The list has some of them before the object, and some after it. */
        char name[64];
        snprintf(name, sizeof name, "holders/0123456789abcdef/directory%u", i);
        assert_int_equal(mkdir(below(name), 0700), 0);
        snprintf(name, sizeof name, "holders/0123456789abcdef/directory%u/in it", i); /* no publisher makes such a one */
        assert_int_equal(mkdir(below(name), 0700), 0);
        if (i % 2) continue;
        snprintf(name, sizeof name, "holders/0123456789abcdef/%s", name_of(i + 2).text);
        put_file(below(name), "", 0600);
    }
    put_file(below("holders/file"), "of somebody else", 0600);
    captured_stderr_t captured = capture_begin();
    tms_shared_folder_clean(folder, &log);
    capture_end(captured, text, sizeof text);
    assert_int_equal(count_lines(text), 1);
    assert_non_null(strstr(text, below("holders/0123456789abcdef")));
    assert_true(exists(below("holders/0123456789abcdef/lock"))); /* so it is tried again */
    assert_int_equal(count_names(below("holders/0123456789abcdef")), 9);
    assert_int_equal(count_names(below("objects")), 0);
    assert_true(exists(below("holders/file")));
    for (unsigned i = 0; i < 8; i++) {
        char name[64];
        snprintf(name, sizeof name, "holders/0123456789abcdef/directory%u/in it", i);
        assert_int_equal(rmdir(below(name)), 0); /* the rest goes with the holder */
    }
    captured = capture_begin();
    tms_shared_folder_clean(folder, &log);
    capture_end(captured, text, sizeof text);
    assert_int_equal(count_lines(text), 0);
    assert_false(exists(below("holders/0123456789abcdef")));
    close_folder(folder);
}

static void objects_that_cannot_be_listed(void **state) {
    (void)state;
    char text[4096];
    tms_log_t log;
    tms_log_init(&log, TMS_LOG_WARNING);
    tms_shared_folder_t *folder = open_folder();
    make_dead_holder("0123456789abcdef", 1);
    put_file(object_path(4, ".part"), "half", 0600);
    captured_stderr_t captured = capture_begin();
    inject(CALL_openat, EMFILE, 0, 1);
    tms_shared_folder_clean(folder, &log);
    inject_nothing();
    capture_end(captured, text, sizeof text);
    assert_int_equal(count_lines(text), 1);
    assert_non_null(strstr(text, root));
    assert_int_equal(count_names(below("holders")), 2); /* so the next clean-up looks for the objects, too */
    tms_shared_folder_clean(folder, &log);
    assert_int_equal(count_names(below("holders")), 1);
    assert_int_equal(count_names(below("objects")), 0);
    close_folder(folder);
}

static void closing_removes_the_objects_that_nobody_else_has(void **state) {
    (void)state;
    bool written;
    tms_shared_folder_t *folder = open_folder(), *second = open_folder();
    for (unsigned i = 1; i <= 3; i++) assert_true(get_object(folder, i, &written));
    assert_true(get_object(second, 2, &written));
    assert_false(written);
    close_folder(folder);
    assert_int_equal(count_names(below("objects")), 1);
    assert_int_equal(links_of(object_path(2, "")), 2);
    close_folder(second);
    assert_nothing_left();
}

static void a_folder_that_was_deleted_is_closed(void **state) {
    (void)state;
    char command[TEMPORARY_BYTES + 16];
    bool written;
    tms_shared_folder_t *folder = open_folder();
    assert_true(get_object(folder, 1, &written));
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    assert_int_equal(system(command), 0);
    assert_false(tms_shared_folder_is_current(folder, root));
    tms_shared_folder_clean(folder, &quiet);
    close_folder(folder);
    assert_false(exists(root));
    close_folder(open_folder());
}

/* ---- another process cleans up while a holder is made ---- */

static tms_shared_folder_t *cleaner;
static unsigned clean_ups;
static void clean_beside(void) {
    tms_shared_folder_clean(cleaner, &quiet);
    clean_ups++;
}

static void assert_survives_a_clean_up(void (**hook)(void), unsigned holders) {
    cleaner = open_folder();
    clean_ups = 0;
    *hook = clean_beside;
    fault.count[CALL_renameat] = fault.count[CALL_flock] = fault.count[CALL_mkdirat] = 0;
    tms_shared_folder_t *folder = open_folder();
    assert_int_equal(clean_ups, 1);
    assert_int_equal(fault.count[CALL_mkdirat], 2 + holders); /* with `objects` and `holders` */
    assert_int_equal(fault.count[CALL_renameat], 1);
    assert_true(is_locked(holder_path(folder, "lock")));
    assert_int_equal(count_names(below("holders")), 2);
    tms_shared_folder_clean(cleaner, &quiet);
    assert_int_equal(count_names(below("holders")), 2);
    close_folder(folder);
    close_folder(cleaner);
    assert_nothing_left();
}

/* The third directory that is made is the holder. */
static void after_second_mkdir(void) { fault.after[CALL_mkdirat] = clean_beside; }
static void after_first_mkdir(void) { fault.after[CALL_mkdirat] = after_second_mkdir; }

static void a_clean_up_before_there_is_a_lock(void **state) {
    (void)state;
    cleaner = open_folder();
    clean_ups = 0;
    fault.count[CALL_mkdirat] = 0;
    fault.after[CALL_mkdirat] = after_first_mkdir;
    tms_shared_folder_t *folder = open_folder();
    assert_int_equal(clean_ups, 1);
    assert_int_equal(fault.count[CALL_mkdirat], 4);
    assert_int_equal(count_names(below("holders")), 2);
    assert_true(is_locked(holder_path(folder, "lock")));
    close_folder(folder);
    close_folder(cleaner);
    assert_nothing_left();
}

static void a_clean_up_before_the_lock_is_taken(void **state) {
    (void)state;
    assert_survives_a_clean_up(&fault.before[CALL_flock], 2);
}

static void a_clean_up_after_the_lock_is_taken(void **state) {
    (void)state;
    assert_survives_a_clean_up(&fault.after[CALL_flock], 1);
}

static void a_clean_up_before_the_holder_has_its_name(void **state) {
    (void)state;
    assert_survives_a_clean_up(&fault.before[CALL_renameat], 1);
}

/* The directory was listed and has no lock yet; then it is finished. */
static tms_shared_folder_t *finished;
static char unfinished[TEMPORARY_BYTES + 64];
static int finished_lock;
static void finish_holder(void) {
    char path[TEMPORARY_BYTES + 96];
    snprintf(path, sizeof path, "%s/lock", unfinished);
    finished_lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    assert_true(finished_lock >= 0);
    assert_int_equal(syscall(SYS_flock, finished_lock, LOCK_EX | LOCK_NB), 0);
}

static void a_lock_that_is_made_while_the_holder_is_looked_at(void **state) {
    (void)state;
    finished = open_folder();
    snprintf(unfinished, sizeof unfinished, "%s", below("holders/.0123456789abcdef"));
    assert_int_equal(mkdir(unfinished, 0700), 0);
    fault.before[CALL_unlinkat] = finish_holder; /* the clean-up has found no lock, and removes the directory */
    tms_shared_folder_clean(finished, &quiet);
    assert_true(exists(below("holders/.0123456789abcdef/lock")));
    close(finished_lock);
    tms_shared_folder_clean(finished, &quiet);
    assert_false(exists(unfinished));
    close_folder(finished);
}

/* Two clean-ups at once: the second has opened the lock, and the first removes the holder. */
static void a_holder_that_is_removed_twice(void **state) {
    (void)state;
    cleaner = open_folder();
    tms_shared_folder_t *folder = open_folder();
    make_dead_holder("0123456789abcdef", 2);
    clean_ups = 0;
    fault.before[CALL_flock] = clean_beside;
    tms_shared_folder_clean(folder, &quiet);
    assert_int_equal(clean_ups, 1);
    assert_int_equal(count_names(below("holders")), 2);
    assert_int_equal(count_names(below("objects")), 0);
    close_folder(folder);
    close_folder(cleaner);
}

/* ---- failures ---- */

static void a_holder_that_is_never_made(void **state) {
    (void)state;
    tms_shared_folder_t folder;
    inject(CALL_flock, EWOULDBLOCK, 0, 1000);
    assert_int_equal(tms_shared_folder_open(&folder, root, &quiet, &context, &error), TMS_BACKUP_IO);
    assert_int_equal(error.os_error, EWOULDBLOCK);
    assert_true(fault.fired > 1 && fault.fired < 1000);
    inject_nothing();
    assert_nothing_left();
    inject(CALL_flock, EINTR, 0, 3);
    close_folder(open_folder());
    assert_int_equal(fault.fired, 3);
}

static void a_full_folder(void **state) {
    (void)state;
    tms_shared_folder_t folder;
    const call_t calls[] = {CALL_mkdirat, CALL_openat, CALL_pwrite, CALL_linkat};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        bool failed = true;
        for (unsigned nth = 0; failed; nth++) {
            inject(calls[i], ENOSPC, nth, 1);
            failed = tms_shared_folder_open(&folder, root, &quiet, &context, &error) != TMS_OK;
            assert_true(failed || fault.fired == 0);
            inject_nothing();
            if (!failed) tms_shared_folder_close(&folder, &quiet);
            if (!failed) break;
            assert_int_equal(error.status, TMS_BACKUP_IO);
            assert_int_equal(error.os_error, ENOSPC);
            assert_non_null(strstr(error.message, root));
            assert_non_null(strstr(error.message, "TMS_SHARED_DIR"));
            assert_non_null(strstr(error.message, "--shm-size"));
            assert_nothing_left();
            (void)unlink(below("key"));
        }
        (void)unlink(below("key"));
    }
}

int main(void) {
#define FOLDER_TEST(test) cmocka_unit_test_setup_teardown(test, make_plain, release)
    const struct CMUnitTest tests[] = {
        FOLDER_TEST(a_new_folder),
        FOLDER_TEST(all_of_the_key_is_random_and_the_same_for_all),
        FOLDER_TEST(the_usual_folder_is_of_the_user),
        FOLDER_TEST(a_folder_that_others_can_write_to),
        FOLDER_TEST(a_folder_that_is_a_link),
        FOLDER_TEST(a_folder_of_another_user),
        FOLDER_TEST(a_folder_of_root),
        FOLDER_TEST(a_folder_that_is_not_in_memory),
        FOLDER_TEST(paths_that_are_not_there),
        FOLDER_TEST(is_current),
        FOLDER_TEST(a_folder_that_is_not_open_is_closed),
        FOLDER_TEST(damaged_and_foreign_keys),
        FOLDER_TEST(files_that_cannot_be_a_key),
        FOLDER_TEST(a_key_beyond_the_limit_for_files),
        FOLDER_TEST(a_key_that_comes_first),
        FOLDER_TEST(what_dead_processes_left_is_removed),
        FOLDER_TEST(without_a_dead_process_objects_are_not_looked_at),
        FOLDER_TEST(what_living_processes_have_stays),
        FOLDER_TEST(a_holder_that_lost_its_lock),
        FOLDER_TEST(what_cannot_be_removed_is_logged),
        FOLDER_TEST(objects_that_cannot_be_listed),
        FOLDER_TEST(closing_removes_the_objects_that_nobody_else_has),
        FOLDER_TEST(a_folder_that_was_deleted_is_closed),
        FOLDER_TEST(a_clean_up_before_there_is_a_lock),
        FOLDER_TEST(a_clean_up_before_the_lock_is_taken),
        FOLDER_TEST(a_clean_up_after_the_lock_is_taken),
        FOLDER_TEST(a_clean_up_before_the_holder_has_its_name),
        FOLDER_TEST(a_lock_that_is_made_while_the_holder_is_looked_at),
        FOLDER_TEST(a_holder_that_is_removed_twice),
        FOLDER_TEST(a_holder_that_is_never_made),
        FOLDER_TEST(a_full_folder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
