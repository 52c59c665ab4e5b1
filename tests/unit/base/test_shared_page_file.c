/* Guards shared_page_file.c: what the file is, who may open it, what a reader takes for a page, and that nothing is left
 * behind by a failure. */
#include "base/shared_page_file.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "own_process.h"
#include "temporary.h"

static char base[TEMPORARY_BYTES], directory[TEMPORARY_BYTES + 8];
enum { REQUEST = false }; /* The call makes a request, and does not withdraw one. */

static int make(void **state) {
    (void)state;
    if (!make_temporary_directory(base, "page")) return -1;
    snprintf(directory, sizeof directory, "%s/pages", base);
    return 0;
}

static int release(void **state) {
    (void)state;
    return remove_temporary_directory(base);
}

static tms_shared_page_file_t made_file(void) {
    tms_shared_page_file_t file;
    tms_directory_failure_t failure;
    assert_true(tms_shared_page_file_create(&file, directory, &failure));
    return file;
}

static void the_file_is_private_whole_and_locked(void **state) {
    (void)state;
    struct stat found;
    tms_shared_page_file_t file = made_file();
    assert_int_equal(stat(directory, &found), 0);
    assert_int_equal(found.st_mode & 07777, 0700);
    assert_int_equal(stat(file.path, &found), 0);
    assert_int_equal(found.st_mode & 07777, 0600);
    assert_int_equal(found.st_size, TMS_SHARED_PAGE_BYTES);
    assert_true(found.st_blocks * 512 >= TMS_SHARED_PAGE_BYTES); /* reserved: no write can find the file system full */
    assert_int_equal(fcntl(file.fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    int other = open(file.path, O_RDWR);
    assert_int_equal(flock(other, LOCK_SH | LOCK_NB), -1);
    tms_shared_page_file_unlink(&file);
    assert_int_equal(access(file.path, F_OK), -1);
    tms_shared_page_file_close(&file);
    assert_int_equal(flock(other, LOCK_SH | LOCK_NB), 0);
    close(other);
}

static void two_files_of_one_process_have_two_names(void **state) {
    (void)state;
    tms_shared_page_file_t first = made_file(), second = made_file();
    assert_string_not_equal(first.path, second.path);
    tms_shared_page_file_close(&first);
    tms_shared_page_file_close(&second);
}

static unsigned count_files(void) {
    char command[TEMPORARY_BYTES + 64];
    unsigned count = 0;
    snprintf(command, sizeof command, "ls '%s' | wc -l", directory);
    FILE *output = popen(command, "r");
    assert_non_null(output);
    assert_int_equal(fscanf(output, "%u", &count), 1);
    pclose(output);
    return count;
}

static void a_failure_names_the_call_and_leaves_nothing(void **state) {
    (void)state;
    tms_shared_page_file_t file;
    tms_directory_failure_t failure;
    struct rlimit limit, small = {.rlim_cur = 4096, .rlim_max = RLIM_INFINITY};

    assert_false(tms_shared_page_file_create(&file, "relative/path", &failure));
    assert_int_equal(failure.os_error, EINVAL);
    assert_null(file.words);
    assert_false(tms_shared_page_file_create(&file, "/proc/no/such/directory", &failure));
    assert_string_equal(failure.call, "mkdirat");

    tms_shared_page_file_t whole = made_file();
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    small.rlim_max = limit.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    assert_false(tms_shared_page_file_create(&file, directory, &failure)); /* no SIGXFSZ */
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    assert_int_equal(failure.os_error, EFBIG);
    assert_int_equal(count_files(), 1);
    tms_shared_page_file_close(&whole);
}

/* Sets the words that tell a page of this format. */
static void mark(tms_shared_page_file_t *file, uint64_t magic, uint64_t format) {
    atomic_store(&file->words[TMS_SHARED_WORD(magic)], magic);
    atomic_store(&file->words[TMS_SHARED_WORD(format)], format);
}

static void a_reader_takes_only_whole_pages_of_its_format(void **state) {
    (void)state;
    tms_shared_page_contents_t copy;
    tms_shared_page_file_t file = made_file();
    assert_int_equal(tms_shared_page_file_read(file.fd, &copy), TMS_SHARED_PAGE_FOREIGN); /* not described yet */
    mark(&file, TMS_SHARED_PAGE_MAGIC, TMS_SHARED_PAGE_FORMAT + 1);
    assert_int_equal(tms_shared_page_file_read(file.fd, &copy), TMS_SHARED_PAGE_FOREIGN);
    assert_int_equal(copy.format, TMS_SHARED_PAGE_FORMAT + 1);
    mark(&file, TMS_SHARED_PAGE_MAGIC, TMS_SHARED_PAGE_FORMAT);
    assert_int_equal(tms_shared_page_file_read(file.fd, &copy), TMS_SHARED_PAGE_READ);
    atomic_store(&file.words[TMS_SHARED_WORD(sequence)], 7); /* its process died, or is stopped, in the middle of a write */
    assert_int_equal(tms_shared_page_file_read(file.fd, &copy), TMS_SHARED_PAGE_BUSY);
    assert_int_equal(ftruncate(file.fd, TMS_SHARED_PAGE_BYTES - 1), 0); /* no access beyond the end */
    assert_int_equal(tms_shared_page_file_read(file.fd, &copy), TMS_SHARED_PAGE_FOREIGN);
    assert_false(tms_shared_page_file_request(file.fd, TMS_SHARED_PAGE_SNAPSHOT, REQUEST));
    tms_shared_page_file_close(&file);
    assert_int_equal(tms_shared_page_file_read(-1, &copy), TMS_SHARED_PAGE_FAILED);
}

static void requests_have_words_of_their_own(void **state) {
    (void)state;
    tms_shared_page_file_t file = made_file();
    tms_shared_word_t *requests = &file.words[TMS_SHARED_WORD(requests)];
    int other = open(file.path, O_RDWR), reader = open(file.path, O_RDONLY);
    assert_true(tms_shared_page_file_request(other, TMS_SHARED_PAGE_EVENTS, false));
    assert_true(tms_shared_page_file_request(other, TMS_SHARED_PAGE_SNAPSHOT, false));
    assert_int_equal(atomic_load(&requests[TMS_SHARED_PAGE_EVENTS]), 1);
    assert_int_equal(atomic_load(&requests[TMS_SHARED_PAGE_SNAPSHOT]), 1);
    assert_true(tms_shared_page_file_request(other, TMS_SHARED_PAGE_SNAPSHOT, true));
    assert_int_equal(atomic_load(&requests[TMS_SHARED_PAGE_EVENTS]), 1);
    assert_int_equal(atomic_load(&requests[TMS_SHARED_PAGE_SNAPSHOT]), 0);
    assert_false(tms_shared_page_file_request(reader, TMS_SHARED_PAGE_SNAPSHOT, false));
    close(other);
    close(reader);
    tms_shared_page_file_close(&file);
}

/* Truncates a file and makes it long again, until the parent ends it. */
static const char *truncated_path;
static void truncate_again_and_again(void) {
    int fd = open(truncated_path, O_RDWR);
    const uint64_t words[] = {TMS_SHARED_PAGE_MAGIC, TMS_SHARED_PAGE_FORMAT, 1};
    for (;;) {
        if (ftruncate(fd, 0) != 0 || ftruncate(fd, TMS_SHARED_PAGE_BYTES) != 0) _exit(1);
        if (pwrite(fd, words, sizeof words, 0) < 0) _exit(1);
    }
}

static void a_file_that_is_truncated_kills_no_reader(void **state) {
    enum { READS = 2000, EVERY_KIND = 7 };
    (void)state;
    unsigned seen = 0;
    tms_shared_page_contents_t copy;
    tms_shared_page_file_t file = made_file();
    truncated_path = file.path;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) truncate_again_and_again();
    int reader = open(file.path, O_RDWR);
    for (int i = 0; i < READS; i++) {
        tms_shared_page_reading_t reading = tms_shared_page_file_read(reader, &copy);
        assert_int_not_equal(reading, TMS_SHARED_PAGE_FAILED);
        seen |= 1U << reading;
        (void)tms_shared_page_file_request(reader, TMS_SHARED_PAGE_EVENTS, false);
    }
    assert_int_equal(seen & ~(unsigned)EVERY_KIND, 0);
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, NULL, 0), child);
    close(reader);
    tms_shared_page_file_close(&file);
}

static void die_with_a_page(void) {
    tms_shared_page_file_t file;
    tms_directory_failure_t failure;
    if (!tms_shared_page_file_create(&file, directory, &failure)) _exit(1);
    raise(SIGKILL);
}

static void the_kernel_unlocks_the_file_of_a_killed_process(void **state) {
    (void)state;
    char path[TEMPORARY_BYTES * 2], command[TEMPORARY_BYTES * 2];
    (void)run_in_child(die_with_a_page);
    snprintf(command, sizeof command, "ls -d '%s'/tms-*.page", directory);
    FILE *output = popen(command, "r");
    assert_non_null(output);
    assert_int_equal(fscanf(output, "%511s", path), 1);
    pclose(output);
    int left = open(path, O_RDWR);
    assert_true(left >= 0);
    assert_int_equal(flock(left, LOCK_SH | LOCK_NB), 0);
    close(left);
}

int main(void) {
#define FILE_TEST(test) cmocka_unit_test_setup_teardown(test, make, release)
    const struct CMUnitTest tests[] = {
        FILE_TEST(the_file_is_private_whole_and_locked),
        FILE_TEST(two_files_of_one_process_have_two_names),
        FILE_TEST(a_failure_names_the_call_and_leaves_nothing),
        FILE_TEST(a_reader_takes_only_whole_pages_of_its_format),
        FILE_TEST(requests_have_words_of_their_own),
        FILE_TEST(a_file_that_is_truncated_kills_no_reader),
        FILE_TEST(the_kernel_unlocks_the_file_of_a_killed_process),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
