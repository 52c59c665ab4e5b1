/* Internal to the disk backups: the directory on disk. Used only by backup/disk/disk.c and backup/disk/transfer.c, under the
 * lock of its tms_disk_directory_t, on any thread.
 *
 * The directory is opened once for each lock file. All files in it are addressed relative to that descriptor, so moving or
 * replacing the directory does not redirect them. */
#ifndef TMS_BACKUP_DISK_DIRECTORY_H
#define TMS_BACKUP_DISK_DIRECTORY_H

#include <sys/stat.h>

#include "backup/disk/types.h"
#include "base/private_directory.h"

/* A copy of `path` without trailing slashes, made absolute if the working directory is known. NULL: out of memory. */
char *tms_disk_absolute_path(const char *path);

/* Sets the error of a failed system call, with advice if another directory can help. `path` is NULL or in the file system of
 * the call, whose free space the message has if there is too little. */
tms_status_t tms_disk_fail(tms_error_t *error, const tms_error_context_t *context, const char *call, int os_error,
                           const char *path);

/* Opens the directory (base/private_directory.h), which other processes may use too. Creates it (0700) if it is missing. Its
 * parents must exist, so that a misspelled path is an error. */
tms_status_t tms_disk_open_directory(const char *path, tms_directory_t *found, const tms_error_context_t *context,
                                     tms_error_t *error);

/* Opens a name in a directory without following links. A created file has mode 0600. Returns -1 and sets errno on
 * failure. */
int tms_disk_open_at(int directory, const char *name, int flags);

/* Returns 0 if the file system of `fd` has room for `bytes`, else errno. *call is set if the query itself failed. */
int tms_disk_check_free_space(int fd, uint64_t bytes, const char **call);

/* Fills *identity. Returns NULL, or the name of the failed call with errno set. */
const char *tms_disk_identify(int fd, tms_disk_identity_t *identity);
/* Whether `found` is a regular file of this user with this identity. */
bool tms_disk_is_same(const struct stat *found, const tms_disk_identity_t *identity);
/* Unlinks a regular file of this user, and only the one with `identity` unless that is NULL. On failure returns false and
 * sets errno: ESTALE if another file has the name, EPERM if it is not a file of this user, else the error of the system. */
bool tms_disk_unlink(int directory, const char *name, const tms_disk_identity_t *identity);

/* Creates and locks this process's lock file in the directory. The lock takes ownership of the descriptor. After a failure
 * *lock is set only if the file could not be removed again and remains to be removed. */
tms_status_t tms_disk_lock_create(const char *path, int directory, const tms_log_t *log, tms_disk_lock_t **lock,
                                  const tms_error_context_t *context, tms_error_t *error);
/* Unlinks the lock file. Returns false if that failed. */
bool tms_disk_lock_remove(tms_disk_lock_t *lock);
/* Closes the descriptors, which unlocks the file, and frees the lock. */
void tms_disk_lock_forget(tms_disk_lock_t *lock);

/* Removes lock and backup files of dead processes of this lock domain (backup/disk/domain.h). Leaves unknown files and files
 * that cannot be removed. */
void tms_disk_remove_dead(int directory, const tms_log_t *log);

#endif
