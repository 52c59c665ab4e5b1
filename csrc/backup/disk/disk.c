#include "backup/disk/disk.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backup/disk/directory.h"
#include "backup/host/store.h"
#include "base/size_limit.h"

enum {
    NUMBER_BYTES = 32,             /* "-<number>.backup" and its NUL */
    RESERVE_STEP_BYTES = 64 << 20, /* per step: an interrupted step is restarted, so it must be short */
};

tms_status_t tms_disk_init(tms_disk_directory_t *directory, const char *path, const tms_log_t *log, tms_error_t *error) {
    const tms_error_context_t context = {.operation = "start", .device = TMS_NO_DEVICE};
    char *absolute = tms_disk_absolute_path(path);
    if (!absolute) return tms_error_set_os(error, &context, "malloc", ENOMEM, path);
    *directory = (tms_disk_directory_t){.log = log, .path = absolute};
    pthread_mutex_init(&directory->lock, NULL);
    return TMS_OK;
}

/* ---- files that could not be removed ---- */

/* Removes a file from the list; its struct stays. */
static void unlist(tms_disk_directory_t *directory, tms_disk_file_t *file) {
    *(file->previous ? &file->previous->next : &directory->files) = file->next;
    if (file->next) file->next->previous = file->previous;
    file->previous = file->next = NULL;
    atomic_fetch_sub(&directory->total, file->bytes);
    if (file->claimed_bytes > 0) tms_host_store_disclaim(directory->host, file->claimed_bytes);
    file->claimed_bytes = 0;
    file->owner_lock->files--;
    file->owner_lock = NULL;
}

static void free_file(tms_disk_file_t *file) {
    free(file->checksums);
    free(file);
}

/* Removes a file, unless it is gone or replaced. False: the system failed to remove it, and the file stays listed. */
static bool remove_entry(tms_disk_directory_t *directory, tms_disk_file_t *file) {
    if (!tms_disk_unlink(file->owner_lock->directory, file->name, &file->identity) && errno != ENOENT) {
        bool replaced = errno == ESTALE;
        if (replaced || !file->abandoned)
            tms_log_write(directory->log, TMS_LOG_WARNING, "the backup file '%s' was not removed: %s", file->path,
                          replaced ? "it was replaced by another file, which is left unchanged" : TMS_OS_TEXT(errno));
        if (!replaced) return false;
    }
    unlist(directory, file);
    return true;
}

/* Removes the lock files that no backup needs any more. Returns whether some could not be removed. */
static bool drop_unused_locks(tms_disk_directory_t *directory) {
    bool refused = false;
    for (tms_disk_lock_t **link = &directory->locks; *link;) {
        tms_disk_lock_t *lock = *link;
        bool unused = lock->files == 0;
        if (unused && tms_disk_lock_remove(lock)) {
            *link = lock->next;
            tms_disk_lock_forget(lock);
        } else {
            refused |= unused;
            link = &lock->next;
        }
    }
    return refused;
}

static void retry_refused(tms_disk_directory_t *directory) {
    if (!directory->refuses) return;
    bool refused = false;
    for (tms_disk_file_t *file = directory->files, *next; file; file = next) {
        next = file->next;
        if (!file->abandoned) continue;
        if (remove_entry(directory, file))
            free_file(file);
        else
            refused = true;
    }
    directory->refuses = drop_unused_locks(directory) || refused;
}

static tms_disk_directory_t *directory_of(tms_quarantined_t *node) {
    return (tms_disk_directory_t *)((char *)node - offsetof(tms_disk_directory_t, refused));
}

static tms_quarantine_mask_t retry_in_quarantine(tms_quarantined_t *node) {
    tms_disk_directory_t *directory = directory_of(node);
    pthread_mutex_lock(&directory->lock);
    retry_refused(directory);
    directory->in_quarantine = directory->refuses;
    tms_quarantine_mask_t held = directory->in_quarantine ? TMS_QUARANTINE_BIT(OTHER) : 0;
    pthread_mutex_unlock(&directory->lock);
    return held;
}

static void keep_refused(tms_disk_directory_t *directory) {
    directory->refuses = true;
    if (!directory->quarantine || directory->in_quarantine) return;
    directory->in_quarantine = true;
    directory->refused.retry = retry_in_quarantine;
    directory->refused.holds = TMS_QUARANTINE_BIT(OTHER);
    tms_quarantine_add(directory->quarantine, &directory->refused);
}

/* ---- locks ---- */

static bool is_place_of(const tms_disk_lock_t *lock, const tms_disk_identity_t *place) {
    return lock->place.device == place->device && lock->place.number == place->number;
}

/* This process's lock in the directory `path`. Creates the lock and the directory if missing. The path is resolved each
 * time, because the directory may have been removed or moved. */
static tms_status_t acquire_lock(tms_disk_directory_t *directory, const char *path, tms_disk_lock_t **lock,
                                 const tms_error_context_t *context, tms_error_t *error) {
    tms_directory_t opened;
    tms_disk_identity_t place;
    tms_status_t status = tms_disk_open_directory(path, &opened, context, error);
    if (status != TMS_OK) return status;
    const int fd = opened.fd;
    if (opened.shared)
        tms_log_once(
            directory->log, &directory->warned_shared, TMS_LOG_WARNING,
            "the directory of backup files '%s' is shared with other users: %s failed. They cannot read or change a "
            "backup, but they can remove it. TMS_DISK_BACKUP_DIR or set_disk_backup_dir() chooses another directory.",
            path, opened.shared);
    const char *failed = tms_disk_identify(fd, &place);
    if (failed) {
        status = tms_disk_fail(error, context, failed, errno, path);
        close(fd);
        return status;
    }
    tms_disk_lock_t *found = directory->locks;
    while (found && !is_place_of(found, &place)) found = found->next;
    if (found) {
        close(fd);
    } else {
        status = tms_disk_lock_create(path, fd, directory->log, &found, context, error);
        if (found) {
            found->next = directory->locks;
            directory->locks = found;
        }
        if (status != TMS_OK) {
            if (found)
                keep_refused(directory);
            else
                close(fd);
            return status;
        }
        tms_disk_remove_dead(fd, directory->log);
    }
    found->files++;
    *lock = found;
    return TMS_OK;
}

static void drop_lock(tms_disk_directory_t *directory, tms_disk_lock_t *lock) {
    lock->files--;
    if (drop_unused_locks(directory)) keep_refused(directory);
}

/* ---- files ---- */

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
    if (lock) {
        drop_lock(directory, lock); /* acquiring it was the test */
        char *former = directory->path;
        directory->path = absolute;
        absolute = former;
    }
    pthread_mutex_unlock(&directory->lock);
    free(absolute);
    return status;
}

/* Reserves the space of one step. Returns 0 or errno. */
static int reserve_step(int fd, uint64_t offset, uint64_t bytes) {
    while (fallocate(fd, 0, (off_t)offset, (off_t)bytes) != 0) {
        if (errno != EINTR) return errno;
    }
    return 0;
}

static int set_size(int fd, uint64_t bytes) {
    while (ftruncate(fd, (off_t)bytes) != 0) {
        if (errno != EINTR) return errno;
    }
    return 0;
}

/* Reserves `bytes` of space for an empty file. */
static tms_status_t reserve_space(int fd, uint64_t bytes, const char *path, tms_wait_t *wait,
                                  const tms_error_context_t *context, tms_error_t *error) {
    const char *call = "fallocate";
    int os_error = tms_size_limit_check(bytes);
    /* Checked first, because a reservation that cannot succeed would fill the disk for other programs until it fails. */
    if (os_error == 0) os_error = tms_disk_check_free_space(fd, bytes, &call);
    for (uint64_t offset = 0; os_error == 0 && offset < bytes; offset += RESERVE_STEP_BYTES) {
        tms_status_t status = tms_wait_check(wait, context, error);
        if (status != TMS_OK) return status;
        os_error = reserve_step(fd, offset, bytes - offset < RESERVE_STEP_BYTES ? bytes - offset : RESERVE_STEP_BYTES);
        if (os_error == EOPNOTSUPP || os_error == ENOSYS || os_error == EINVAL) {
            /* The file system cannot reserve (NFS before 4.2, some FUSE). Writing zeros would, but doubles the work of every
             * first backup. A disk that fills up later fails the write of the contents, before anything is unmapped. */
            call = "ftruncate";
            os_error = set_size(fd, bytes);
            break;
        }
    }
    return os_error == 0 ? TMS_OK : tms_disk_fail(error, context, call, os_error, path);
}

/* Creates the empty file `made` and adds it to the list. Returns NULL, or the name of the failed call with errno set. After
 * a failure the file is on the list unless *fd is -1. */
static const char *enter_file(tms_disk_directory_t *directory, tms_disk_lock_t *lock, tms_disk_file_t *made,
                              size_t path_bytes, int *fd) {
    snprintf(made->path, path_bytes, "%s-%u.backup", lock->prefix, directory->next_number++);
    made->name = made->path + (lock->name - lock->prefix);
    *fd = tms_disk_open_at(lock->directory, made->name, O_RDWR | O_CREAT | O_EXCL);
    if (*fd < 0) return "openat";
    made->directory = directory;
    made->checksum_of = tms_checksum_choose();
    made->owner_lock = lock;
    made->next = directory->files;
    if (made->next) made->next->previous = made;
    directory->files = made;
    return tms_disk_identify(*fd, &made->identity);
}

/* Under directory->lock. */
static void discard(tms_disk_directory_t *directory, tms_disk_file_t *file) {
    bool removed = !file->owner_lock || remove_entry(directory, file);
    file->abandoned = !removed;
    if (drop_unused_locks(directory) || !removed) keep_refused(directory);
    if (removed) free_file(file);
}

/* Under directory->lock. */
static tms_status_t create_entry(tms_disk_directory_t *directory, tms_disk_file_t **file, int *fd,
                                 const tms_error_context_t *context, tms_error_t *error) {
    tms_disk_lock_t *lock = NULL;
    retry_refused(directory);
    tms_status_t status = acquire_lock(directory, directory->path, &lock, context, error);
    if (!lock) return status;

    size_t path_bytes = strlen(lock->prefix) + NUMBER_BYTES;
    tms_disk_file_t *made = calloc(1, sizeof(*made) + path_bytes);
    const char *failed = made ? enter_file(directory, lock, made, path_bytes, fd) : "calloc";
    if (!failed) {
        *file = made;
        return TMS_OK;
    }
    status = tms_disk_fail(error, context, failed, made ? errno : ENOMEM, made ? made->path : directory->path);
    if (made && *fd >= 0) {
        close(*fd);
        discard(directory, made);
    } else {
        free(made);
        drop_lock(directory, lock);
    }
    return status;
}

/* Claims host memory for a file on a file system in memory. *claimed is the number of bytes, which the file does not record
 * yet. */
static tms_status_t claim_memory(tms_disk_directory_t *directory, const tms_disk_file_t *file, uint64_t bytes,
                                 uint64_t *claimed, const tms_error_context_t *context, tms_error_t *error) {
    if (!file->identity.in_memory || !directory->host || bytes == 0) return TMS_OK;
    tms_log_once(directory->log, &directory->warned_in_memory, TMS_LOG_WARNING,
                 "the backup file '%s' is in memory (tmpfs): disk backups there use host memory, and count against its "
                 "limits. TMS_DISK_BACKUP_DIR or set_disk_backup_dir() chooses a directory on a disk.",
                 file->path);
    tms_error_context_t here = *context;
    here.bytes = bytes;
    tms_status_t status = tms_host_store_claim(directory->host, bytes, &here, error);
    if (status == TMS_OK)
        *claimed = bytes;
    else
        tms_error_append(error,
                         " The backup file '%s' is in memory (tmpfs): TMS_DISK_BACKUP_DIR or set_disk_backup_dir() chooses "
                         "a directory on a disk.",
                         file->path);
    return status;
}

/* Called once the system counts the file's pages. Records the claim in the file, unless the file was removed at exit. */
static void settle_claim(tms_disk_directory_t *directory, tms_disk_file_t *file, uint64_t claimed) {
    if (claimed == 0) return;
    tms_host_store_claim_used(directory->host, claimed);
    pthread_mutex_lock(&directory->lock);
    if (file->owner_lock)
        file->claimed_bytes = claimed;
    else
        tms_host_store_disclaim(directory->host, claimed);
    pthread_mutex_unlock(&directory->lock);
}

tms_status_t tms_disk_file_create(tms_disk_directory_t *directory, uint64_t bytes, tms_disk_file_t **file, tms_wait_t *wait,
                                  const tms_error_context_t *context, tms_error_t *error) {
    tms_disk_file_t *made = NULL;
    uint64_t claimed = 0;
    int fd = -1;
    if (bytes > (uint64_t)INT64_MAX) return tms_disk_fail(error, context, "fallocate", EFBIG, NULL);
    pthread_mutex_lock(&directory->lock);
    tms_status_t status = create_entry(directory, &made, &fd, context, error);
    pthread_mutex_unlock(&directory->lock);
    if (!made) return status;

    /* Without the lock: a file system in memory zeroes every page here. */
    status = claim_memory(directory, made, bytes, &claimed, context, error);
    if (status == TMS_OK) status = reserve_space(fd, bytes, made->path, wait, context, error);
    settle_claim(directory, made, claimed);
    if (close(fd) != 0 && status == TMS_OK && errno != EINTR)
        status = tms_disk_fail(error, context, "close", errno, made->path);
    /* After the reservation: a size that does not fit on the disk may need more checksums than fit in memory. */
    if (status == TMS_OK) {
        made->checksums = calloc(bytes / TMS_DISK_BLOCK_BYTES + 1, sizeof(*made->checksums));
        if (!made->checksums) status = tms_error_set_os(error, context, "calloc", ENOMEM, made->path);
    }
    if (status != TMS_OK) {
        tms_disk_file_destroy(directory, made);
        return status;
    }
    /* Under the lock again: a file that was removed at exit must not be counted. */
    pthread_mutex_lock(&directory->lock);
    made->bytes = bytes;
    if (made->owner_lock) atomic_fetch_add(&directory->total, bytes);
    pthread_mutex_unlock(&directory->lock);
    *file = made;
    return TMS_OK;
}

void tms_disk_file_destroy(tms_disk_directory_t *directory, tms_disk_file_t *file) {
    if (!file) return;
    pthread_mutex_lock(&directory->lock);
    discard(directory, file);
    pthread_mutex_unlock(&directory->lock);
}

void tms_disk_remove_all(tms_disk_directory_t *directory) {
    pthread_mutex_lock(&directory->lock);
    for (tms_disk_file_t *file = directory->files, *next; file; file = next) {
        next = file->next;
        if (remove_entry(directory, file) && file->abandoned) free_file(file);
    }
    (void)drop_unused_locks(directory);
    pthread_mutex_unlock(&directory->lock);
}

/* Forgets the files and leaves them on the disk. */
static void forget_all(tms_disk_directory_t *directory) {
    for (tms_disk_file_t *file = directory->files, *next; file; file = next) {
        next = file->next;
        file->previous = file->next = NULL;
        file->owner_lock = NULL;
        if (file->abandoned) free_file(file);
    }
    directory->files = NULL;
    /* Closing a copy of a descriptor keeps the parent's lock; unlocking would release it. */
    while (directory->locks) {
        tms_disk_lock_t *lock = directory->locks;
        directory->locks = lock->next;
        tms_disk_lock_forget(lock);
    }
    atomic_store(&directory->total, 0);
    directory->refuses = directory->in_quarantine = false;
}

void tms_disk_release(tms_disk_directory_t *directory) {
    directory->quarantine = NULL;
    tms_disk_remove_all(directory);
    forget_all(directory);
    free(directory->path);
    directory->path = NULL;
    pthread_mutex_destroy(&directory->lock);
}

void tms_disk_after_fork_in_child(tms_disk_directory_t *directory) {
    pthread_mutex_init(&directory->lock, NULL);
    forget_all(directory);
}
