/* Shared by the tests of disk backups in a hostile environment, in addition to disk_fixture.h. */
#ifndef TMS_TESTS_DISK_HOSTILE_FIXTURE_H
#define TMS_TESTS_DISK_HOSTILE_FIXTURE_H

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "captured_stderr.h"
#include "disk_fixture.h"

enum { BYTES = 3 * 1024 * 1024 + 100, OTHER_USER = 12345 };
static char pattern[BYTES], got[BYTES];
static int unlinks_allowed, unlinks_refused; /* this many succeed, then this many fail */

int unlinkat(int directory, const char *name, int flags) {
    if (unlinks_allowed > 0) {
        unlinks_allowed--;
    } else if (unlinks_refused > 0) {
        unlinks_refused--;
        errno = EIO;
        return -1;
    }
    return (int)syscall(SYS_unlinkat, directory, name, flags);
}

static int looks_allowed, looks_refused; /* at file systems */

int fstatfs(int fd, struct statfs *found) {
    if (looks_allowed > 0) {
        looks_allowed--;
    } else if (looks_refused > 0) {
        looks_refused--;
        errno = EIO;
        return -1;
    }
    return (int)syscall(SYS_fstatfs, fd, found);
}

static int begin(void **state) {
    unlinks_allowed = unlinks_refused = looks_allowed = looks_refused = 0;
    for (int i = 0; i < BYTES; i++) pattern[i] = (char)(i * 7 + (i >> 9));
    if (make(state) != 0) return -1;
    return tms_disk_set_directory(&disk, below("d"), &error) == TMS_OK ? 0 : -1;
}

static tms_status_t save(tms_disk_file_t *file) { return tms_disk_file_write(file, pattern, BYTES, 0, &context, &error); }

static tms_status_t load(tms_disk_file_t *file) {
    memset(got, 0, BYTES);
    return tms_disk_file_read(file, got, BYTES, 0, &context, &error);
}

static tms_disk_file_t *create_saved(void) {
    tms_disk_file_t *file = create(BYTES);
    if (save(file) != TMS_OK) fail_msg("%s", error.message);
    return file;
}

/* A destroy whose warnings are counted. */
static void assert_destroyed_with_warnings(tms_disk_file_t *file, int lines) {
    char output[4096];
    captured_stderr_t captured = capture_begin();
    tms_disk_file_destroy(&disk, file);
    capture_end(captured, output, sizeof(output));
    assert_int_equal(count_lines(output), lines);
}

#endif
