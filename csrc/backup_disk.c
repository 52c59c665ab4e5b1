#include "backup_disk.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "backup_disk_directory.h"

enum {
    FILE_MODE = 0600,
    NUMBER_BYTES = 32,                /* "-<number>.backup" and its NUL */
    RESERVE_STEP_BYTES = 64 << 20,    /* at once: an interrupted step is begun again, so it must not take long */
    TRANSFER_MOST_BYTES = 1024 << 20, /* at once: the system takes at most a little less than 2 GiB */
};

tms_status_t tms_disk_init(tms_disk_directory_t *directory, const char *path, const tms_log_t *log, _Atomic uint64_t *total,
                           tms_error_t *error) {
    const tms_error_context_t context = {.operation = "start", .device = TMS_NO_DEVICE};
    char *absolute = tms_disk_absolute_path(path);
    if (!absolute) return tms_error_set_os(error, &context, "malloc", ENOMEM, path);
    *directory = (tms_disk_directory_t){.log = log, .path = absolute, .total = total};
    pthread_mutex_init(&directory->lock, NULL);
    return TMS_OK;
}

/* Whether a lock file lies in the directory `path`. */
static bool lies_in(const tms_disk_lock_t *lock, const char *path) {
    size_t length = strlen(path);
    return strncmp(lock->prefix, path, length) == 0 && strrchr(lock->prefix, '/') == lock->prefix + length;
}

/* This process's lock in the directory `path`, made if need be, and with it the directory. Under directory->lock. */
static tms_status_t acquire_lock(tms_disk_directory_t *directory, const char *path, tms_disk_lock_t **lock,
                                 const tms_error_context_t *context, tms_error_t *error) {
    tms_disk_lock_t *found = directory->locks;
    while (found && !lies_in(found, path)) found = found->next;
    if (!found) {
        tms_status_t status = tms_disk_make_directory(path, context, error);
        if (status == TMS_OK) status = tms_disk_lock_create(path, directory->log, &found, context, error);
        if (status != TMS_OK) return status;
        tms_disk_remove_dead(path, directory->log);
        found->next = directory->locks;
        directory->locks = found;
    }
    found->files++;
    *lock = found;
    return TMS_OK;
}

/* Under directory->lock. */
static void drop_lock(tms_disk_directory_t *directory, tms_disk_lock_t *lock) {
    if (--lock->files > 0) return;
    tms_disk_lock_t **link = &directory->locks;
    while (*link != lock) link = &(*link)->next;
    *link = lock->next;
    tms_disk_lock_destroy(lock);
}

tms_status_t tms_disk_set_directory(tms_disk_directory_t *directory, const char *path, tms_error_t *error) {
    const tms_error_context_t context = {.operation = "set_disk_backup_dir", .device = TMS_NO_DEVICE};
    if (!path || !*path) {
        return tms_error_set(error, TMS_INVALID_ARGUMENT, &context, "the directory must be a non-empty path");
    }
    char *absolute = tms_disk_absolute_path(path);
    if (!absolute) return tms_error_set_os(error, &context, "malloc", ENOMEM, path);

    pthread_mutex_lock(&directory->lock);
    tms_disk_lock_t *lock = NULL;
    tms_status_t status = acquire_lock(directory, absolute, &lock, &context, error);
    if (status == TMS_OK) {
        drop_lock(directory, lock); /* having it was the test */
        char *former = directory->path;
        directory->path = absolute;
        absolute = former;
    }
    pthread_mutex_unlock(&directory->lock);
    free(absolute);
    return status;
}

/* Whether the file system has room for `bytes`; 0 or errno. */
static int check_free_space(int fd, uint64_t bytes) {
    struct statvfs space;
    if (fstatvfs(fd, &space) != 0) return errno;
    uint64_t blocks = bytes / space.f_frsize + (bytes % space.f_frsize != 0);
    return blocks > space.f_bavail ? ENOSPC : 0;
}

/* Gives an empty file `bytes` of space. 0 or errno, with the name of the call. */
static int reserve_space(int fd, uint64_t bytes, const char **call) {
    *call = "fallocate";
    if (bytes > (uint64_t)INT64_MAX) return EFBIG;
    /* Asked first, because a reservation that cannot succeed would fill the disk for everybody else until it fails. */
    int os_error = check_free_space(fd, bytes);
    for (uint64_t offset = 0; os_error == 0 && offset < bytes;) {
        uint64_t step = bytes - offset < RESERVE_STEP_BYTES ? bytes - offset : RESERVE_STEP_BYTES;
        if (fallocate(fd, 0, (off_t)offset, (off_t)step) == 0) {
            offset += step;
        } else if (errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL) {
            /* The file system cannot reserve (NFS before 4.2, some FUSE). Writing zeros would do it for certain, but doubles
             * the work of every first backup; a disk that others fill in the meantime is found when the contents are
             * written, which is before anything is unmapped. */
            *call = "ftruncate";
            return ftruncate(fd, (off_t)bytes) == 0 ? 0 : errno;
        } else if (errno != EINTR) {
            os_error = errno;
        }
    }
    return os_error;
}

/* Makes the empty file and enters it in the list. Under directory->lock. */
static tms_status_t create_entry(tms_disk_directory_t *directory, tms_disk_file_t **file, int *fd,
                                 const tms_error_context_t *context, tms_error_t *error) {
    tms_disk_lock_t *lock = NULL;
    tms_status_t status = acquire_lock(directory, directory->path, &lock, context, error);
    if (status != TMS_OK) return status;

    size_t path_bytes = strlen(lock->prefix) + NUMBER_BYTES;
    tms_disk_file_t *made = calloc(1, sizeof(*made) + path_bytes);
    if (!made) {
        status = tms_error_set_os(error, context, "calloc", ENOMEM, directory->path);
        goto drop;
    }
    snprintf(made->path, path_bytes, "%s-%u.backup", lock->prefix, directory->next_number++);
    *fd = open(made->path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, FILE_MODE);
    if (*fd < 0) {
        status = tms_error_set_os(error, context, "open", errno, made->path);
        goto release;
    }
    made->owner_lock = lock;
    made->next = directory->files;
    if (made->next) made->next->previous = made;
    directory->files = made;
    *file = made;
    return TMS_OK;

release:
    free(made);
drop:
    drop_lock(directory, lock);
    return status;
}

tms_status_t tms_disk_file_create(tms_disk_directory_t *directory, uint64_t bytes, tms_disk_file_t **file,
                                  const tms_error_context_t *context, tms_error_t *error) {
    tms_disk_file_t *made = NULL;
    int fd = -1;
    pthread_mutex_lock(&directory->lock);
    tms_status_t status = create_entry(directory, &made, &fd, context, error);
    pthread_mutex_unlock(&directory->lock);
    if (!made) return status;

    /* Without the lock: a file system in memory clears every page here. */
    const char *call = NULL;
    int os_error = reserve_space(fd, bytes, &call);
    if (close(fd) != 0 && os_error == 0 && errno != EINTR) {
        os_error = errno;
        call = "close";
    }
    if (os_error != 0) {
        status = tms_error_set_os(error, context, call, os_error, made->path);
        tms_disk_file_destroy(directory, made);
        return status;
    }
    /* Under the lock again, because at exit the file may have been removed meanwhile and must not be counted. */
    pthread_mutex_lock(&directory->lock);
    if (made->owner_lock) {
        made->bytes = bytes;
        atomic_fetch_add(directory->total, bytes);
    }
    pthread_mutex_unlock(&directory->lock);
    *file = made;
    return TMS_OK;
}

/* Opens a backup file, and only that: not what somebody may have put in its place. -1 and errno. */
static int open_file(const tms_disk_file_t *file, int flags) {
    struct stat found;
    /* O_NONBLOCK: opening a FIFO would wait for its other end. */
    int fd = open(file->path, flags | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return -1;
    if (fstat(fd, &found) == 0 && S_ISREG(found.st_mode) && found.st_uid == geteuid()) return fd;
    close(fd);
    errno = EPERM;
    return -1;
}

static size_t transfer_part(uint64_t bytes) { return bytes < TRANSFER_MOST_BYTES ? (size_t)bytes : TRANSFER_MOST_BYTES; }

tms_status_t tms_disk_file_write(tms_disk_file_t *file, const void *data, uint64_t bytes, uint64_t offset,
                                 const tms_error_context_t *context, tms_error_t *error) {
    int fd = open_file(file, O_WRONLY);
    if (fd < 0) return tms_error_set_os(error, context, "open", errno, file->path);
    const char *cursor = data;
    int os_error = 0;
    while (bytes > 0 && os_error == 0) {
        ssize_t written = pwrite(fd, cursor, transfer_part(bytes), (off_t)offset);
        if (written > 0) {
            cursor += written;
            offset += (uint64_t)written;
            bytes -= (uint64_t)written;
        } else if (written == 0) {
            os_error = EIO; /* cannot happen to a regular file; must not loop for ever if it does */
        } else if (errno != EINTR) {
            os_error = errno;
        }
    }
    const char *call = "pwrite";
    if (close(fd) != 0 && os_error == 0 && errno != EINTR) {
        os_error = errno; /* network file systems report here that the disk is full */
        call = "close";
    }
    return os_error == 0 ? TMS_OK : tms_error_set_os(error, context, call, os_error, file->path);
}

tms_status_t tms_disk_file_read(tms_disk_file_t *file, void *data, uint64_t bytes, uint64_t offset,
                                const tms_error_context_t *context, tms_error_t *error) {
    int fd = open_file(file, O_RDONLY);
    if (fd < 0) return tms_error_set_os(error, context, "open", errno, file->path);
    tms_status_t status = TMS_OK;
    char *cursor = data;
    while (bytes > 0 && status == TMS_OK) {
        ssize_t got = pread(fd, cursor, transfer_part(bytes), (off_t)offset);
        if (got > 0) {
            cursor += got;
            offset += (uint64_t)got;
            bytes -= (uint64_t)got;
        } else if (got == 0) {
            status = tms_error_set(error, TMS_BACKUP_IO, context,
                                   "the backup file '%s' has become too short: %llu bytes "
                                   "from offset %llu on are missing",
                                   file->path, (unsigned long long)bytes, (unsigned long long)offset);
        } else if (errno != EINTR) {
            status = tms_error_set_os(error, context, "pread", errno, file->path);
        }
    }
    close(fd);
    return status;
}

/* Unlinks a file and takes it off the list; its struct stays. Under directory->lock. */
static void remove_entry(tms_disk_directory_t *directory, tms_disk_file_t *file) {
    if (!file->owner_lock) return;
    if (!tms_disk_unlink(AT_FDCWD, file->path) && errno != ENOENT) {
        tms_log_write(directory->log, TMS_LOG_WARNING, "the backup file '%s' was not removed: %s", file->path,
                      strerror(errno));
    }
    *(file->previous ? &file->previous->next : &directory->files) = file->next;
    if (file->next) file->next->previous = file->previous;
    file->previous = file->next = NULL;
    atomic_fetch_sub(directory->total, file->bytes);
    drop_lock(directory, file->owner_lock);
    file->owner_lock = NULL;
}

void tms_disk_file_destroy(tms_disk_directory_t *directory, tms_disk_file_t *file) {
    if (!file) return;
    pthread_mutex_lock(&directory->lock);
    remove_entry(directory, file);
    pthread_mutex_unlock(&directory->lock);
    free(file);
}

void tms_disk_remove_all(tms_disk_directory_t *directory) {
    pthread_mutex_lock(&directory->lock);
    while (directory->files) remove_entry(directory, directory->files);
    pthread_mutex_unlock(&directory->lock);
}

void tms_disk_release(tms_disk_directory_t *directory) {
    tms_disk_remove_all(directory);
    free(directory->path);
    directory->path = NULL;
    pthread_mutex_destroy(&directory->lock);
}

void tms_disk_after_fork_in_child(tms_disk_directory_t *directory) {
    pthread_mutex_init(&directory->lock, NULL);
    while (directory->files) {
        tms_disk_file_t *file = directory->files;
        directory->files = file->next;
        file->previous = file->next = NULL;
        file->owner_lock = NULL;
    }
    /* Closing a copy of the descriptor keeps the parent's lock; unlocking it would not. */
    while (directory->locks) {
        tms_disk_lock_t *lock = directory->locks;
        directory->locks = lock->next;
        close(lock->fd);
        free(lock);
    }
    atomic_store(directory->total, 0);
}
