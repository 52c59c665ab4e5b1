/* Inside of the disk backups: the directory on disk. Used by backup/disk/disk.c and backup/disk/transfer.c alone, under the
 * lock of its tms_disk_directory_t.
 *
 * The directory is opened once for each lock file, and everything below it is named relative to that descriptor, so that
 * moving or replacing the directory does not change which files are meant. */
#ifndef TMS_BACKUP_DISK_DIRECTORY_H
#define TMS_BACKUP_DISK_DIRECTORY_H

#include <sys/stat.h>

#include "backup/disk/state.h"

/* A copy of `path`, absolute where the working directory is known, without slashes at its end; NULL: out of memory. */
char *tms_disk_absolute_path(const char *path);

/* Creates the directory (0700) if it is missing. Those above it must be there: a misspelled path is an error. */
tms_status_t tms_disk_make_directory(const char *path, const tms_error_context_t *context, tms_error_t *error);
/* A descriptor of the directory, made if it is missing. A symbolic link is followed only if it is this user's or root's. */
tms_status_t tms_disk_open_directory(const char *path, int *directory, const tms_error_context_t *context,
                                     tms_error_t *error);

/* Opens a name in a directory, never through a link; a file that it makes is 0600. -1 and errno. */
int tms_disk_open_at(int directory, const char *name, int flags);

/* 0, or EFBIG where a file may not grow to `end`: the system would not only refuse, it would send SIGXFSZ. */
int tms_disk_check_size_limit(uint64_t end);
/* Whether the file system of `fd` has room for `bytes`; 0 or errno. *call is set where the question itself fails. */
int tms_disk_check_free_space(int fd, uint64_t bytes, const char **call);

/* NULL; or the name of the call that failed, and errno. */
const char *tms_disk_identify(int fd, tms_disk_identity_t *identity);
/* Whether it is a regular file of this user, and the one that was identified. */
bool tms_disk_is_same(const struct stat *found, const tms_disk_identity_t *identity);
/* Unlinks a regular file of this user, and only the one with that identity where it is not NULL. False and errno: ESTALE
 * where another file has that name, EPERM where it is not one of this user, or what the system says. */
bool tms_disk_unlink(int directory, const char *name, const tms_disk_identity_t *identity);

/* Makes and locks this process's lock file in the directory, whose descriptor is the lock's from then on. After a failure
 * *lock is set only if the system refuses to take the file back, which then remains to be removed. */
tms_status_t tms_disk_lock_create(const char *path, int directory, const tms_log_t *log, tms_disk_lock_t **lock,
                                  const tms_error_context_t *context, tms_error_t *error);
/* Unlinks it. False: the system refuses. */
bool tms_disk_lock_remove(tms_disk_lock_t *lock);
/* Closes its descriptors, and so unlocks it. */
void tms_disk_lock_forget(tms_disk_lock_t *lock);

/* Removes lock and backup files of dead processes of this lock domain (backup/disk/domain.h). What cannot be removed or
 * recognised is left alone. */
void tms_disk_remove_dead(int directory, const tms_log_t *log);

#endif
