#include "backup/disk/directory.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "backup/disk/domain.h"
#include "base/random.h"
#include "device/lock_file.h"

enum {
    DIRECTORY_MODE = 0700,
    FILE_MODE = 0600,
    HEXADECIMAL = 16,
    DECIMAL = 10,
    NAME_BYTES = 80,    /* "tms-<domain>-<pid>-<random>.unlocked" and its NUL */
    RANDOM_DIGITS = 16, /* of 64 bits in hexadecimal */
    NAME_ATTEMPTS = 8,
    NEW_SECONDS = 60 /* age after which a lock file without its final name is stale; renaming takes microseconds */
};

#define NAME_START      "tms-"
#define NEW_SUFFIX      ".new"
#define LOCK_SUFFIX     ".lock"
#define UNLOCKED_SUFFIX ".unlocked"
#define BACKUP_SUFFIX   ".backup"

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

int tms_disk_open_at(int directory, const char *name, int flags) {
    return tms_open_at(directory, name, flags | O_NOFOLLOW, FILE_MODE);
}

/* Returns the beginning of the advice about the directory of the backups, or NULL if another directory would not help. */
static const char *advice_of(int os_error) {
    switch (os_error) {
    case ENOSPC:
    case EDQUOT: return " Check the free space of the directory of the backups, or choose";
    case EACCES:
    case EPERM:
    case EROFS: return " Check the permissions of the directory of the backups, or choose";
    case ENOTDIR:
    case ELOOP: return " That is no directory for backups: choose";
    default: return NULL;
    }
}

tms_status_t tms_disk_fail(tms_error_t *error, const tms_error_context_t *context, const char *call, int os_error,
                           const char *path) {
    tms_status_t status = tms_error_set_os(error, context, call, os_error, path);
    if (status != TMS_BACKUP_IO) return status;
    if (os_error == ENOSPC) tms_error_append_free_space(error, path);
    const char *advice = advice_of(os_error);
    if (advice) tms_error_append(error, "%s another with set_disk_backup_dir() or TMS_DISK_BACKUP_DIR.", advice);
    return status;
}

tms_status_t tms_disk_open_directory(const char *path, tms_directory_t *found, const tms_error_context_t *context,
                                     tms_error_t *error) {
    const tms_directory_choice_t choice = {.configured = path, .exact = true, .walk = {.mode = DIRECTORY_MODE}};
    tms_directory_failure_t failure;
    if (tms_directory_open(&choice, found, &failure)) return TMS_OK;
    if (failure.os_error != ENOENT) return tms_disk_fail(error, context, failure.call, failure.os_error, path);
    tms_error_set(error, TMS_BACKUP_IO, context,
                  "'%s' has no parent directory (%s failed with errno %d). Only the last directory of a path is created, so "
                  "that a misspelled path is noticed: create its parent directories first",
                  path, failure.call, failure.os_error);
    if (!error) return TMS_BACKUP_IO;
    error->os_error = failure.os_error;
    snprintf(error->call, sizeof(error->call), "%s", failure.call);
    return TMS_BACKUP_IO;
}

int tms_disk_check_free_space(int fd, uint64_t bytes, const char **call) {
    struct statvfs space;
    while (fstatvfs(fd, &space) != 0) {
        if (errno == EINTR) continue;
        *call = "fstatvfs";
        return errno;
    }
    if (space.f_frsize == 0) return 0; /* the file system does not report it */
    uint64_t blocks = bytes / space.f_frsize + (bytes % space.f_frsize != 0);
    return blocks > space.f_bavail ? ENOSPC : 0;
}

const char *tms_disk_identify(int fd, tms_disk_identity_t *identity) {
    struct stat found;
    struct statfs system;
    if (fstat(fd, &found) != 0) return "fstat";
    if (fstatfs(fd, &system) != 0) return "fstatfs";
    uint64_t type = (uint64_t)system.f_type;
    /* A file system in user space may change a file's inode number at any time. */
    *identity = (tms_disk_identity_t){.device = found.st_dev,
                                      .number = found.st_ino,
                                      .known = type != FUSE_SUPER_MAGIC,
                                      .in_memory = type == TMPFS_MAGIC || type == RAMFS_MAGIC};
    return NULL;
}

bool tms_disk_is_same(const struct stat *found, const tms_disk_identity_t *identity) {
    if (!S_ISREG(found->st_mode) || found->st_uid != geteuid()) return false;
    return !identity->known || (found->st_dev == identity->device && found->st_ino == identity->number);
}

/* Locks a new lock file. Returns NULL, or the name of the failed call with errno set: EWOULDBLOCK if the clean-up of another
 * process, whose clock is far ahead, has removed the file or is about to. *locked is false if the file system has no
 * locks. */
static const char *lock_new_file(int fd, const char *path, bool *locked, const tms_log_t *log) {
    int os_error = tms_lock_file_try(fd);
    *locked = os_error == 0;
    errno = os_error;
    if (os_error == EWOULDBLOCK) return "flock";
    if (os_error != 0) {
        tms_log_write(log, TMS_LOG_INFO,
                      "flock of '%s" NEW_SUFFIX "' failed (%s): if this process is killed, its backup files stay until they "
                      "are removed by hand",
                      path, TMS_OS_TEXT(os_error));
        return NULL;
    }
    struct stat ours;
    if (fstat(fd, &ours) != 0) return "fstat";
    errno = EWOULDBLOCK;
    return ours.st_nlink > 0 ? NULL : "flock";
}

static void write_name(const tms_disk_lock_t *lock, const char *suffix, char name[NAME_BYTES]) {
    snprintf(name, NAME_BYTES, "%s%s", lock->name, suffix);
}

/* Renames a lock file to its final name: ".lock", by which the clean-up of other processes finds it, or ".unlocked", which
 * every clean-up ignores. Returns NULL, or the name of the failed call with errno set. */
static const char *publish(tms_disk_lock_t *lock, bool locked) {
    char new_name[NAME_BYTES], name[NAME_BYTES];
    const char *suffix = locked ? LOCK_SUFFIX : UNLOCKED_SUFFIX;
    write_name(lock, NEW_SUFFIX, new_name);
    write_name(lock, suffix, name);
    if (renameat(lock->directory, new_name, lock->directory, name) != 0) return "renameat";
    lock->suffix = suffix;
    return NULL;
}

/* Makes one attempt to create a lock file with a new name. Returns NULL, or the name of the failed call with errno set.
 * After a failure lock->fd is -1, unless the file could not be removed again. */
static const char *make_lock_file(tms_disk_lock_t *lock, const char *path, size_t prefix_bytes, const tms_log_t *log) {
    char name[NAME_BYTES];
    bool locked = false;
    snprintf(lock->prefix, prefix_bytes, "%s/" NAME_START "%0*" PRIx64 "-%ld-%0*" PRIx64, path, TMS_DISK_DOMAIN_DIGITS,
             tms_disk_domain(), (long)getpid(), RANDOM_DIGITS, tms_random_number());
    lock->name = lock->prefix + strlen(path) + 1;
    lock->suffix = NEW_SUFFIX;
    write_name(lock, lock->suffix, name);
    lock->fd = tms_disk_open_at(lock->directory, name, O_RDWR | O_CREAT | O_EXCL);
    if (lock->fd < 0) return "openat";
    const char *failed = tms_disk_identify(lock->fd, &lock->identity);
    if (!failed) failed = lock_new_file(lock->fd, lock->prefix, &locked, log);
    if (!failed) failed = publish(lock, locked);
    if (!failed) return NULL;
    int os_error = errno;
    if (unlinkat(lock->directory, name, 0) == 0 || errno == ENOENT) {
        close(lock->fd);
        lock->fd = -1;
    }
    errno = os_error;
    return failed;
}

tms_status_t tms_disk_lock_create(const char *path, int directory, const tms_log_t *log, tms_disk_lock_t **lock,
                                  const tms_error_context_t *context, tms_error_t *error) {
    size_t prefix_bytes = strlen(path) + 1 + NAME_BYTES;
    tms_disk_lock_t *made = calloc(1, sizeof(*made) + prefix_bytes);
    if (!made) return tms_error_set_os(error, context, "calloc", ENOMEM, path);
    made->directory = directory;
    made->fd = -1;
    const char *failed = tms_disk_identify(directory, &made->place);
    if (!failed) {
        int attempts = 0;
        do failed = make_lock_file(made, path, prefix_bytes, log);
        while (failed && made->fd < 0 && (errno == EEXIST || errno == EWOULDBLOCK) && ++attempts < NAME_ATTEMPTS);
    }
    tms_status_t status = failed ? tms_disk_fail(error, context, failed, errno, path) : TMS_OK;
    if (failed) made->place = (tms_disk_identity_t){.known = false}; /* not a lock, only a file to be removed */
    if (made->fd >= 0)
        *lock = made;
    else
        free(made);
    return status;
}

bool tms_disk_lock_remove(tms_disk_lock_t *lock) {
    char name[NAME_BYTES];
    write_name(lock, lock->suffix, name);
    return tms_disk_unlink(lock->directory, name, &lock->identity) || errno == ENOENT || errno == ESTALE;
}

void tms_disk_lock_forget(tms_disk_lock_t *lock) {
    close(lock->fd);
    close(lock->directory);
    free(lock);
}

static bool is_own_file(const struct stat *found) { return S_ISREG(found->st_mode) && found->st_uid == geteuid(); }

bool tms_disk_unlink(int directory, const char *name, const tms_disk_identity_t *identity) {
    struct stat found;
    if (fstatat(directory, name, &found, AT_SYMLINK_NOFOLLOW) != 0) return false;
    if (identity ? !tms_disk_is_same(&found, identity) : !is_own_file(&found)) {
        errno = identity ? ESTALE : EPERM;
        return false;
    }
    return unlinkat(directory, name, 0) == 0;
}

/* Skips exactly `digits` hexadecimal digits. Returns NULL if there are fewer or more. */
static const char *skip_digits(const char *cursor, int digits) {
    for (int i = 0; i < digits; i++) {
        if (!isxdigit((unsigned char)cursor[i])) return NULL;
    }
    return isxdigit((unsigned char)cursor[digits]) ? NULL : cursor + digits;
}

/* Returns the length of "tms-<domain>-<pid>-<random>" at the beginning of a name, or 0. */
static size_t prefix_length(const char *name) {
    if (strncmp(name, NAME_START, strlen(NAME_START)) != 0) return 0;
    const char *cursor = skip_digits(name + strlen(NAME_START), TMS_DISK_DOMAIN_DIGITS);
    if (!cursor || *cursor++ != '-') return 0;
    const char *pid = cursor;
    while (isdigit((unsigned char)*cursor)) cursor++;
    if (cursor == pid || *cursor++ != '-') return 0;
    cursor = skip_digits(cursor, RANDOM_DIGITS);
    return cursor ? (size_t)(cursor - name) : 0;
}

/* Whether a name of that form belongs to this lock domain, so that its lock shows whether its process is dead. */
static bool is_of_domain(const char *name, uint64_t domain) {
    return domain != 0 && strtoull(name + strlen(NAME_START), NULL, HEXADECIMAL) == domain;
}

/* Whether a name of that form belongs to another running process. Its lock can still be acquired if two mounts of one
 * directory on this machine have separate locks. */
static bool is_of_running_process(const char *name) {
    long process = strtol(name + strlen(NAME_START) + TMS_DISK_DOMAIN_DIGITS + 1, NULL, DECIMAL);
    return process != (long)getpid() && tms_disk_domain_runs(process);
}

/* Whether a name is "<prefix><suffix>". */
static bool is_name_with(const char *name, const char *suffix) {
    size_t length = prefix_length(name);
    return length && strcmp(name + length, suffix) == 0;
}

/* Whether a file is an old lock file that never got its final name, because its process was killed. A newer file may be
 * about to be locked. */
static bool is_left_over(int directory, const char *name) {
    struct stat found;
    return is_name_with(name, NEW_SUFFIX) && fstatat(directory, name, &found, AT_SYMLINK_NOFOLLOW) == 0 &&
           time(NULL) - found.st_mtime > NEW_SECONDS;
}

/* Whether a name is "<prefix>-<number>.backup". */
static bool is_backup_name(const char *name, const char *prefix, size_t length) {
    if (prefix_length(name) != length || strncmp(name, prefix, length) != 0 || name[length] != '-') return false;
    const char *cursor = name + length + 1;
    if (!isdigit((unsigned char)*cursor)) return false;
    while (isdigit((unsigned char)*cursor)) cursor++;
    return strcmp(cursor, BACKUP_SUFFIX) == 0;
}

/* Opens and locks a lock file, which succeeds if its process is dead. Returns its descriptor, or -1. */
static int seize_lock(int directory, const char *name) {
    struct stat found;
    /* O_RDWR: NFS requires it for a lock. O_NONBLOCK: the name may be a FIFO or a device. */
    int fd = tms_disk_open_at(directory, name, O_RDWR | O_NONBLOCK);
    if (fd < 0) return -1;
    if (fstat(fd, &found) == 0 && is_own_file(&found) && tms_lock_file_try(fd) == 0) return fd;
    close(fd);
    return -1;
}

/* Opens a new stream over a directory, with its own position. */
static DIR *list_directory(int directory) {
    int fd = tms_open_at(directory, ".", O_RDONLY | O_DIRECTORY, 0);
    DIR *stream = fd < 0 ? NULL : fdopendir(fd);
    if (fd >= 0 && !stream) close(fd);
    return stream;
}

/* Removes the backup files that belong to a lock file. */
static void remove_backups(int directory, const char *lock_name, const tms_log_t *log) {
    size_t length = prefix_length(lock_name);
    DIR *stream = list_directory(directory);
    if (!stream) return;
    for (const struct dirent *entry; (entry = readdir(stream));) {
        if (!is_backup_name(entry->d_name, lock_name, length)) continue;
        bool removed = tms_disk_unlink(directory, entry->d_name, NULL);
        tms_log_write(log, removed ? TMS_LOG_INFO : TMS_LOG_WARNING, "the backup file '%s' of a dead process was %s",
                      entry->d_name, removed ? "removed" : "not removed");
    }
    closedir(stream);
}

void tms_disk_remove_dead(int directory, const tms_log_t *log) {
    uint64_t domain = tms_disk_domain();
    DIR *stream = list_directory(directory);
    if (!stream) return;
    for (const struct dirent *entry; (entry = readdir(stream));) {
        if (!is_name_with(entry->d_name, LOCK_SUFFIX) && !is_left_over(directory, entry->d_name)) continue;
        if (!is_of_domain(entry->d_name, domain) || is_of_running_process(entry->d_name)) continue;
        int fd = seize_lock(directory, entry->d_name);
        if (fd < 0) continue;
        /* The lock file is removed last, so that the next clean-up can finish an interrupted one. */
        remove_backups(directory, entry->d_name, log);
        (void)tms_disk_unlink(directory, entry->d_name, NULL);
        close(fd);
    }
    closedir(stream);
}
