#include "device/lock_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    FILE_MODE = 0600,
    INTERRUPTED_ATTEMPTS = 100, /* of flock; a file system that interrupts all of them counts as one without locks */
    OTHERS = 077,               /* permissions that a file must not have */
    NOT_OPEN = -1
};

bool tms_lock_fail(tms_lock_failure_t *failure, const char *call, int os_error) {
    failure->call = call;
    failure->os_error = os_error;
    return false;
}

tms_directory_choice_t tms_lock_directory(const char *configured) { return tms_private_directory(configured, "/tmp"); }

int tms_lock_directory_open(const char *configured, tms_lock_failure_t *failure) {
    const tms_directory_choice_t directory = tms_lock_directory(configured);
    tms_directory_failure_t failed;
    int fd = tms_private_directory_open(&directory, failure->path, &failed);
    if (fd < 0) tms_lock_fail(failure, failed.call, failed.os_error);
    return fd < 0 ? NOT_OPEN : fd;
}

void tms_lock_append_name(tms_lock_failure_t *failure, const char *name) {
    size_t length = strlen(failure->path);
    snprintf(failure->path + length, sizeof(failure->path) - length, "/%s", name);
}

static bool check(int fd, tms_lock_failure_t *failure) {
    struct stat found;
    if (fstat(fd, &found) != 0) return tms_lock_fail(failure, "fstat", errno);
    if (!S_ISREG(found.st_mode) || found.st_uid != geteuid())
        return tms_lock_fail(failure, "the check that it is a regular file of this user's", EPERM);
    /* Another user who can read the file could lock it. */
    if ((found.st_mode & OTHERS) && fchmod(fd, FILE_MODE) != 0) return tms_lock_fail(failure, "fchmod", errno);
    return true;
}

int tms_lock_file_open(int directory, const char *name, int flags, tms_lock_failure_t *failure) {
    /* O_NONBLOCK: opening a FIFO must not wait for its other end. */
    int fd = openat(directory, name, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | flags, FILE_MODE);
    if (fd < 0) {
        tms_lock_fail(failure, "openat", errno);
        return NOT_OPEN;
    }
    if (check(fd, failure)) return fd;
    close(fd);
    return NOT_OPEN;
}

int tms_lock_file_try(int fd) {
    for (int attempt = 1; flock(fd, LOCK_EX | LOCK_NB) != 0; attempt++) {
        if (errno != EINTR || attempt == INTERRUPTED_ATTEMPTS) return errno;
    }
    return 0;
}

bool tms_lock_file_find_current(int fd, bool *current, tms_lock_failure_t *failure) {
    struct stat held, named;
    if (fstat(fd, &held) != 0) return tms_lock_fail(failure, "fstat", errno);
    bool found = fstatat(AT_FDCWD, failure->path, &named, AT_SYMLINK_NOFOLLOW) == 0;
    if (!found && errno != ENOENT && errno != ENOTDIR) return tms_lock_fail(failure, "fstatat", errno);
    *current = found && named.st_dev == held.st_dev && named.st_ino == held.st_ino;
    return true;
}

tms_lock_record_t tms_lock_record_read(int fd) {
    char text[TMS_LOCK_RECORD_BYTES + 1], end = 0;
    tms_lock_record_t record = {0};
    ssize_t length = pread(fd, text, TMS_LOCK_RECORD_BYTES, 0);
    if (length <= 0) return record;
    text[length] = '\0';
    if (sscanf(text, "%ld %lld%c", &record.process, &record.since, &end) != 3 || end != '\n' || record.process <= 0)
        record.process = 0;
    return record;
}

int tms_lock_record_write(char text[TMS_LOCK_RECORD_BYTES]) {
    struct timespec now = {0};
    clock_gettime(CLOCK_REALTIME, &now);
    return snprintf(text, TMS_LOCK_RECORD_BYTES, "%ld %lld\n", (long)getpid(), (long long)now.tv_sec);
}
