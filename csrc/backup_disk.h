/* Backup files: one file a segment, in a directory that several processes may share.
 *
 * backup_disk.c has the files; backup_disk_directory.c the directory, its lock file and the removal of dead processes'
 * files. A file is opened for each transfer, so that thousands of them need no descriptors.
 *
 * Names are "tms-<pid>-<random>-<number>.backup"; beside them a process that has any keeps "tms-<pid>-<random>.lock", open
 * and flock'ed. The kernel drops that lock however the process ends, so the next process that uses the directory recognises
 * what a dead one left (a lock file that can be locked) and removes it with its backups; processes in other PID namespaces
 * are told apart the same way. Files are 0600, made with O_EXCL and O_NOFOLLOW; only regular files of the same user are ever
 * removed. All files of the process go at exit (process.h) and never in a forked child. Where the file system has no flock,
 * backups work and files of killed processes stay; one that several machines share must honour flock between them.
 *
 * Lock: the directory has its own mutex, a leaf, held across creating and unlinking but never across reading or writing. */
#ifndef TMS_BACKUP_DISK_H
#define TMS_BACKUP_DISK_H

#include <pthread.h>
#include <stdatomic.h>

#include "log.h"
#include "status.h"

typedef struct tms_disk_file {
    struct tms_disk_file *previous, *next; /* of the process's files; under the directory's lock */
    uint64_t bytes;
    struct tms_disk_lock *owner_lock; /* NULL: the file is gone (exit) or the parent's (fork) */
    char path[];                      /* absolute */
} tms_disk_file_t;

/* The lock file of this process in one directory; goes with its last backup file there. */
typedef struct tms_disk_lock {
    struct tms_disk_lock *next;
    int fd;
    unsigned files;
    char prefix[]; /* "<directory>/tms-<pid>-<random>" */
} tms_disk_lock_t;

typedef struct tms_disk_directory {
    pthread_mutex_t lock;
    const tms_log_t *log;
    char *path;             /* where the next file is made; created if needed, at first use */
    tms_disk_file_t *files; /* all of this process, in any directory */
    tms_disk_lock_t *locks;
    unsigned next_number;
    _Atomic uint64_t *total; /* bytes of all files */
} tms_disk_directory_t;

/* `path` is copied. Touches no file. */
tms_status_t tms_disk_init(tms_disk_directory_t *directory, const char *path, const tms_log_t *log, _Atomic uint64_t *total,
                           tms_error_t *error);
/* Creates the directory if needed (0700), checks that files can be made in it, removes what dead processes left there. On
 * failure the former directory stays in force. */
tms_status_t tms_disk_set_directory(tms_disk_directory_t *directory, const char *path, tms_error_t *error);
/* A new file with `bytes` of space reserved on the disk. Where the file system cannot reserve, its free space is compared
 * with `bytes`, and a disk that fills up meanwhile is found by the write. TMS_BACKUP_IO, TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_disk_file_create(tms_disk_directory_t *directory, uint64_t bytes, tms_disk_file_t **file,
                                  const tms_error_context_t *context, tms_error_t *error);
/* Whole transfers of `bytes` at `offset`; TMS_BACKUP_IO with errno, or for a file that has become too short. */
tms_status_t tms_disk_file_write(tms_disk_file_t *file, const void *data, uint64_t bytes, uint64_t offset,
                                 const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_disk_file_read(tms_disk_file_t *file, void *data, uint64_t bytes, uint64_t offset,
                                const tms_error_context_t *context, tms_error_t *error);
void tms_disk_file_destroy(tms_disk_directory_t *directory, tms_disk_file_t *file); /* unlinks; NULL is fine */
/* For tests: removes everything and forgets the directory. Destroy the files first. */
void tms_disk_release(tms_disk_directory_t *directory);
/* At exit: unlinks everything. The structs stay with whoever made the files, for tms_disk_file_destroy. Afterwards the
 * directory can be used again. */
void tms_disk_remove_all(tms_disk_directory_t *directory);
/* In a forked child: forgets the parent's files without touching them and closes the inherited lock descriptors' copies. */
void tms_disk_after_fork_in_child(tms_disk_directory_t *directory);

#endif
