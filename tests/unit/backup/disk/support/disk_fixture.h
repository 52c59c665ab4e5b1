/* Shared by the tests of disk backups: a directory and a tms_disk_directory_t for each test, and system calls that can be
 * made to fail. Included once in a program, after cmocka.h: it defines fallocate, flock, stat, renameat, pwrite and pread,
 * which replace the C library's. */
#ifndef TMS_TESTS_DISK_FIXTURE_H
#define TMS_TESTS_DISK_FIXTURE_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "backup/disk/disk.h"
#include "backup/disk/types.h"

#define MIB          ((uint64_t)1 << 20)
#define MAX_RESERVED (256 * MIB)
enum { PATH_BYTES = 512 };

static const tms_error_context_t context = {.operation = "pause", .device = 0, .bytes = MIB, .tag = "weights"};
static char base[PATH_BYTES];
static tms_log_t log_under_test;
static tms_disk_directory_t disk;
static tms_error_t error;

/* Injected failures: the errno that each call fails with, 0 for none; transfers move at most `transfer_most` bytes. */
static struct {
    int fallocate_error, flock_error, renameat_error, pwrite_error;
    int flock_interruptions;   /* EINTR this often before a lock is passed on */
    int stat_error;            /* of /proc/self/ns/pid */
    bool local_locks;          /* every lock can be acquired although another process holds it */
    int interruptions;         /* EINTR this often before a call is passed on */
    unsigned vanishing_locks;  /* lock files removed by "another process" before they are locked */
    void (*before_lock)(void); /* what "another process" does before a file is locked */
    size_t transfer_most;
    _Atomic uint64_t reserved; /* bytes requested of fallocate so far */
} fault;

static inline bool interrupted(void) {
    if (fault.interruptions == 0) return false;
    fault.interruptions--;
    errno = EINTR;
    return true;
}

static inline int refuse(int number) {
    errno = number;
    return -1;
}

static inline size_t limited(size_t bytes) {
    return fault.transfer_most && bytes > fault.transfer_most ? fault.transfer_most : bytes;
}

int fallocate(int fd, int mode, off_t offset, off_t bytes) {
    if (interrupted()) return -1;
    if (fault.fallocate_error) return refuse(fault.fallocate_error);
    fault.reserved += (uint64_t)bytes;
    if (fault.reserved > MAX_RESERVED) return refuse(ENOSPC); /* no test may fill the disk of its machine */
    return (int)syscall(SYS_fallocate, fd, mode, offset, bytes);
}

int flock(int fd, int operation) {
    if (fault.vanishing_locks > 0) {
        char link[64], path[2 * PATH_BYTES];
        snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
        ssize_t length = readlink(link, path, sizeof(path) - 1);
        fault.vanishing_locks--;
        if (length > 0) path[length] = '\0';
        if (length > 0) unlink(path);
    }
    if (fault.before_lock) fault.before_lock();
    if (fault.flock_interruptions > 0) {
        fault.flock_interruptions--;
        return refuse(EINTR);
    }
    if (fault.flock_error) return refuse(fault.flock_error);
    if (fault.local_locks) return 0;
    return (int)syscall(SYS_flock, fd, operation);
}

int stat(const char *path, struct stat *found) {
    if (fault.stat_error && strcmp(path, "/proc/self/ns/pid") == 0) return refuse(fault.stat_error);
    return fstatat(AT_FDCWD, path, found, 0);
}

int renameat(int from_directory, const char *from, int to_directory, const char *to) {
    if (fault.renameat_error) return refuse(fault.renameat_error);
    return (int)syscall(SYS_renameat2, from_directory, from, to_directory, to, 0);
}

ssize_t pwrite(int fd, const void *data, size_t bytes, off_t offset) {
    if (interrupted()) return -1;
    if (fault.pwrite_error) return refuse(fault.pwrite_error);
    return syscall(SYS_pwrite64, fd, data, limited(bytes), offset);
}

ssize_t pread(int fd, void *data, size_t bytes, off_t offset) {
    return interrupted() ? -1 : syscall(SYS_pread64, fd, data, limited(bytes), offset);
}

/* A path below the test's directory, in one of a few buffers. */
static inline const char *below(const char *name) {
    static char paths[4][2 * PATH_BYTES];
    static unsigned next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof(paths[0]), "%s/%s", base, name);
    return path;
}

static inline unsigned count_entries(const char *path, const char *ending) {
    unsigned count = 0;
    DIR *stream = opendir(path);
    for (const struct dirent *entry; stream && (entry = readdir(stream));) {
        size_t length = strlen(entry->d_name), end = strlen(ending);
        count += entry->d_name[0] != '.' && length >= end && strcmp(entry->d_name + length - end, ending) == 0;
    }
    if (stream) closedir(stream);
    return count;
}

static inline void assert_entries(const char *path, unsigned backups, unsigned locks) {
    assert_int_equal(count_entries(path, ".backup"), backups);
    assert_int_equal(count_entries(path, ".lock"), locks);
    assert_int_equal(count_entries(path, ".new"), 0);
}

static inline bool exists(const char *path) {
    struct stat found;
    return lstat(path, &found) == 0;
}

static inline void put_file(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static inline void assert_file(const char *path, const char *text) {
    char found[64] = "";
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    size_t length = fread(found, 1, sizeof(found) - 1, file);
    fclose(file);
    assert_int_equal(length, strlen(text));
    assert_string_equal(found, text);
}

static inline int make(void **state) {
    (void)state;
    const char *parent = getenv("TMPDIR");
    memset(&fault, 0, sizeof(fault));
    tms_log_init(&log_under_test, TMS_LOG_WARNING);
    snprintf(base, sizeof(base), "%.200s/tms-test-disk-XXXXXX", parent && *parent ? parent : "/tmp");
    if (!mkdtemp(base)) return -1;
    return tms_disk_init(&disk, base, &log_under_test, &error) == TMS_OK ? 0 : -1;
}

/* The reserved bytes must equal those of the listed files: tms_disk_release would set the sum to 0. */
static inline bool is_balanced(void) {
    uint64_t listed = 0;
    for (const tms_disk_file_t *file = disk.files; file; file = file->next) listed += file->bytes;
    return atomic_load(&disk.total) == listed;
}

static inline int release(void **state) {
    (void)state;
    char command[2 * PATH_BYTES];
    memset(&fault, 0, sizeof(fault));
    bool balanced = is_balanced();
    tms_disk_remove_all(&disk);
    balanced = balanced && is_balanced();
    tms_disk_release(&disk);
    snprintf(command, sizeof(command), "rm -rf '%s'", base);
    return system(command) == 0 && balanced ? 0 : -1;
}

static inline tms_disk_file_t *create(uint64_t bytes) {
    tms_disk_file_t *file = NULL;
    if (tms_disk_file_create(&disk, bytes, &file, NULL, &context, &error) != TMS_OK) fail_msg("%s", error.message);
    return file;
}

static inline void assert_create_fails(uint64_t bytes, tms_status_t status, int os_error) {
    tms_disk_file_t *file = (tms_disk_file_t *)&disk;
    assert_int_equal(tms_disk_file_create(&disk, bytes, &file, NULL, &context, &error), status);
    assert_ptr_equal(file, &disk);
    assert_int_equal(error.status, status);
    if (os_error) assert_int_equal(error.os_error, os_error);
    assert_string_equal(error.operation, "pause");
    assert_string_equal(error.tag, "weights");
}

#endif
