#include "backup_disk_directory.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    DIRECTORY_MODE = 0700,
    FILE_MODE = 0600,
    NAME_BYTES = 64,    /* "tms-<pid>-<random>.lock" and its NUL */
    RANDOM_DIGITS = 16, /* of 64 bits in hexadecimal */
    NAME_ATTEMPTS = 8
};

#define NAME_START    "tms-"
#define LOCK_SUFFIX   ".lock"
#define BACKUP_SUFFIX ".backup"

char *tms_disk_absolute_path(const char *path) {
    char *directory = path[0] == '/' ? NULL : getcwd(NULL, 0);
    size_t bytes = (directory ? strlen(directory) + 1 : 0) + strlen(path) + 1;
    char *absolute = malloc(bytes);
    if (absolute) {
        snprintf(absolute, bytes, "%s%s%s", directory ? directory : "", directory ? "/" : "", path);
        for (size_t end = strlen(absolute); end > 1 && absolute[end - 1] == '/'; end--) absolute[end - 1] = '\0';
    }
    free(directory);
    return absolute;
}

tms_status_t tms_disk_make_directory(const char *path, const tms_error_context_t *context, tms_error_t *error) {
    struct stat found;
    if (stat(path, &found) == 0 && S_ISDIR(found.st_mode)) return TMS_OK;

    tms_status_t status = TMS_OK;
    char *partial = strdup(path);
    if (!partial) return tms_error_set_os(error, context, "strdup", ENOMEM, path);
    for (char *cursor = partial + 1;; cursor++) {
        char end = *cursor;
        if (end != '/' && end != '\0') continue;
        *cursor = '\0';
        /* What exists is let be, also where it may not be written to: the last mkdir, or the lock file, will tell. */
        int os_error = mkdir(partial, DIRECTORY_MODE) == 0 ? 0 : errno;
        if (os_error != 0 && stat(partial, &found) != 0) {
            status = tms_error_set_os(error, context, "mkdir", os_error, partial);
            break;
        }
        *cursor = end;
        if (end == '\0') break;
    }
    free(partial);
    return status;
}

static uint64_t random_number(void) {
    uint64_t number = 0;
    if (getrandom(&number, sizeof(number), GRND_NONBLOCK) == (ssize_t)sizeof(number)) return number;
    /* Early in the boot. O_EXCL keeps names apart; being random only makes collisions rare. */
    struct timespec now = {0, 0};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return ((uint64_t)now.tv_sec << 32) ^ (uint64_t)now.tv_nsec ^ (uint64_t)(uintptr_t)&number;
}

/* Locks a lock file just made. False: another process's clean-up got in between, and the file is or will be gone. */
static bool lock_new_file(int fd, const char *path, const tms_log_t *log) {
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno == EWOULDBLOCK) return false;
        tms_log_write(log, TMS_LOG_INFO, "flock of '%s' failed (%s): if this process is killed, its backup files stay", path,
                      strerror(errno));
        return true;
    }
    struct stat ours;
    return fstat(fd, &ours) == 0 && ours.st_nlink > 0;
}

tms_status_t tms_disk_lock_create(const char *path, const tms_log_t *log, tms_disk_lock_t **lock,
                                  const tms_error_context_t *context, tms_error_t *error) {
    size_t path_bytes = strlen(path) + 1, prefix_bytes = path_bytes + NAME_BYTES;
    tms_disk_lock_t *made = calloc(1, sizeof(*made) + prefix_bytes);
    char *name = malloc(prefix_bytes);
    int os_error = ENOMEM, attempts = 0;
    if (!made || !name) goto fail;

    do {
        snprintf(made->prefix, prefix_bytes, "%s/" NAME_START "%ld-%0*" PRIx64, path, (long)getpid(), RANDOM_DIGITS,
                 random_number());
        snprintf(name, prefix_bytes, "%s" LOCK_SUFFIX, made->prefix);
        made->fd = open(name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, FILE_MODE);
        os_error = made->fd < 0 ? errno : EWOULDBLOCK;
        if (made->fd >= 0 && lock_new_file(made->fd, name, log)) {
            free(name);
            *lock = made;
            return TMS_OK;
        }
        if (made->fd >= 0) {
            unlink(name);
            close(made->fd);
        }
    } while ((os_error == EEXIST || os_error == EWOULDBLOCK) && ++attempts < NAME_ATTEMPTS);

fail:
    free(name);
    free(made);
    return tms_error_set_os(error, context, "open", os_error, path);
}

void tms_disk_lock_destroy(tms_disk_lock_t *lock) {
    size_t bytes = strlen(lock->prefix) + sizeof(LOCK_SUFFIX);
    char *name = malloc(bytes);
    if (name) {
        snprintf(name, bytes, "%s" LOCK_SUFFIX, lock->prefix);
        tms_disk_unlink(AT_FDCWD, name);
    } /* else it stays, and the next process that uses the directory removes it */
    free(name);
    close(lock->fd);
    free(lock);
}

static bool is_own_file(const struct stat *found) { return S_ISREG(found->st_mode) && found->st_uid == geteuid(); }

bool tms_disk_unlink(int directory, const char *name) {
    struct stat found;
    if (fstatat(directory, name, &found, AT_SYMLINK_NOFOLLOW) != 0) return false;
    if (!is_own_file(&found)) {
        errno = EPERM;
        return false;
    }
    return unlinkat(directory, name, 0) == 0;
}

/* The number of characters of "tms-<pid>-<random>" that a name begins with, or 0. */
static size_t prefix_length(const char *name) {
    if (strncmp(name, NAME_START, strlen(NAME_START)) != 0) return 0;
    const char *cursor = name + strlen(NAME_START);
    const char *pid = cursor;
    while (isdigit((unsigned char)*cursor)) cursor++;
    if (cursor == pid || *cursor++ != '-') return 0;
    const char *digits = cursor;
    while (isxdigit((unsigned char)*cursor)) cursor++;
    return cursor - digits == RANDOM_DIGITS ? (size_t)(cursor - name) : 0;
}

static bool is_lock_name(const char *name) {
    size_t length = prefix_length(name);
    return length && strcmp(name + length, LOCK_SUFFIX) == 0;
}

/* "<prefix>-<number>.backup" */
static bool is_backup_name(const char *name, const char *prefix, size_t length) {
    if (prefix_length(name) != length || strncmp(name, prefix, length) != 0 || name[length] != '-') return false;
    const char *cursor = name + length + 1;
    if (!isdigit((unsigned char)*cursor)) return false;
    while (isdigit((unsigned char)*cursor)) cursor++;
    return strcmp(cursor, BACKUP_SUFFIX) == 0;
}

/* Opens a lock file and locks it, which is possible if its process is dead; else -1. */
static int seize_lock(int directory, const char *name) {
    struct stat found;
    /* For writing, which a lock over NFS needs; and so, on Linux, opening a FIFO does not wait either. */
    int fd = openat(directory, name, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return -1;
    if (fstat(fd, &found) == 0 && is_own_file(&found) && flock(fd, LOCK_EX | LOCK_NB) == 0) return fd;
    close(fd);
    return -1;
}

/* A second stream over the same directory: each must have its own position. */
static DIR *open_directory(int directory, const char *path) {
    int fd = openat(directory, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *stream = fd < 0 ? NULL : fdopendir(fd);
    if (fd >= 0 && !stream) close(fd);
    return stream;
}

/* Removes the backup files that belong to a lock file. */
static void remove_backups(int directory, const char *lock_name, const tms_log_t *log) {
    size_t length = prefix_length(lock_name);
    DIR *stream = open_directory(directory, ".");
    if (!stream) return;
    for (const struct dirent *entry; (entry = readdir(stream));) {
        if (!is_backup_name(entry->d_name, lock_name, length)) continue;
        bool removed = tms_disk_unlink(directory, entry->d_name);
        tms_log_write(log, removed ? TMS_LOG_INFO : TMS_LOG_WARNING, "the backup file '%s' of a dead process was %s",
                      entry->d_name, removed ? "removed" : "not removed");
    }
    closedir(stream);
}

void tms_disk_remove_dead(const char *path, const tms_log_t *log) {
    DIR *stream = open_directory(AT_FDCWD, path);
    if (!stream) return;
    int directory = dirfd(stream);
    for (const struct dirent *entry; (entry = readdir(stream));) {
        if (!is_lock_name(entry->d_name)) continue;
        int fd = seize_lock(directory, entry->d_name);
        if (fd < 0) continue;
        /* The lock file goes last: as long as it is there, whoever comes next can finish what was interrupted. */
        remove_backups(directory, entry->d_name, log);
        tms_disk_unlink(directory, entry->d_name);
        close(fd);
    }
    closedir(stream);
}
