/* Inside of the disk backups: the directory on disk. Used by backup_disk.c alone, under the lock of its
 * tms_disk_directory_t.
 */
#ifndef TMS_BACKUP_DISK_DIRECTORY_H
#define TMS_BACKUP_DISK_DIRECTORY_H

#include "backup_disk.h"

/* A copy of `path`, absolute where the working directory is known, without slashes at its end; NULL: out of memory. */
char *tms_disk_absolute_path(const char *path);

/* Creates the directory and those above it (0700) where they are missing. */
tms_status_t tms_disk_make_directory(const char *path, const tms_error_context_t *context, tms_error_t *error);

/* Makes and locks this process's lock file in the directory. */
tms_status_t tms_disk_lock_create(const char *path, const tms_log_t *log, tms_disk_lock_t **lock,
                                  const tms_error_context_t *context, tms_error_t *error);
/* Unlinks and closes it. */
void tms_disk_lock_destroy(tms_disk_lock_t *lock);

/* Removes lock and backup files whose process is dead. What cannot be removed or recognised is left alone. */
void tms_disk_remove_dead(const char *path, const tms_log_t *log);

/* Unlinks a regular file of this user; false and errno where there is none or it is not one. */
bool tms_disk_unlink(int directory, const char *name);

#endif
