/* Backup files: one file a segment, in a directory that several processes may share.
 *
 * backup/disk/disk.c has the files; backup/disk/transfer.c their contents, which backup/disk/copy.c moves;
 * backup/disk/directory.c the directory, its lock file and the removal of dead processes' files. A file is opened while it
 * is transferred only, so that thousands of them need no descriptors.
 *
 * Contents go past the page cache (O_DIRECT) where the file system takes that, which costs no memory and is as fast as the
 * disk; where it does not, they go through it.
 *
 * Names are "tms-<domain>-<pid>-<random>-<number>.backup"; beside them a process that has any keeps a lock file,
 * "tms-<domain>-<pid>-<random>.lock", open and flock'ed. The kernel drops that lock however the process ends, so the next
 * process of the same lock domain (backup/disk/domain.h) that uses the directory recognises what a dead one left (a lock
 * file that can be locked, of a process that does not run) and removes it with its backups. What processes of other domains
 * left stays: their locks may not be seen here. A lock file is made with the suffix ".new" and gets its name when it is
 * locked, because the clean-up of another process finds it by that name. Where the file system has no locks it becomes
 * ".unlocked", which no clean-up looks at: backups work, and the files of a killed process stay.
 *
 * Files are 0600, made with O_EXCL and O_NOFOLLOW, and looked up relative to the directory as it was opened. A file is
 * written to and removed only if it is still the one that was made (device and inode), and what is read must have the
 * checksum of what was written. Of dead processes only regular files of the same user are removed. All files of the process
 * go at exit (process.h) and never in a forked child.
 *
 * Files of a file system in memory (tmpfs, as /tmp often is) are host memory: they are claimed from the host store before
 * they get their space, and count as its own (backup/host/store.h).
 *
 * What the system refuses to remove is quarantined, and tried again by later calls and whenever a file is made.
 *
 * Lock: the directory has its own mutex, a leaf but for the quarantine's, held across opening, creating and unlinking but
 * never across reading or writing. */
#ifndef TMS_BACKUP_DISK_H
#define TMS_BACKUP_DISK_H

#include "backup/disk/state.h"
#include "device/wait.h"

/* `path` is copied. Touches no file. `quarantine` and `host` are none, and `staging_bytes` is 0; they may be set before the
 * first use. */
tms_status_t tms_disk_init(tms_disk_directory_t *directory, const char *path, const tms_log_t *log, tms_error_t *error);
/* Creates the directory if needed (0700), checks that files can be made in it, removes what dead processes left there. On
 * failure the former directory stays in force. */
tms_status_t tms_disk_set_directory(tms_disk_directory_t *directory, const char *path, tms_error_t *error);
/* A new file with `bytes` of space reserved on the disk. Where the file system cannot reserve, its free space is compared
 * with `bytes`, and a disk that fills up later is noticed by the write. TMS_BACKUP_IO, TMS_OUT_OF_HOST_MEMORY; what `wait`
 * says, which may be NULL. */
tms_status_t tms_disk_file_create(tms_disk_directory_t *directory, uint64_t bytes, tms_disk_file_t **file, tms_wait_t *wait,
                                  const tms_error_context_t *context, tms_error_t *error);
/* Whether it is still there, the one that was made, and has its size: whether another backup can be written to it. */
bool tms_disk_file_is_usable(tms_disk_file_t *file);
/* Whole transfers of `bytes` at `offset` in the calling thread; `offset` is a multiple of TMS_DISK_BLOCK_BYTES, `bytes` too,
 * or up to the end of the file.
 * TMS_BACKUP_IO with errno, or for a file that was replaced, changed or truncated. */
tms_status_t tms_disk_file_write(tms_disk_file_t *file, const void *data, uint64_t bytes, uint64_t offset,
                                 const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_disk_file_read(tms_disk_file_t *file, void *data, uint64_t bytes, uint64_t offset,
                                const tms_error_context_t *context, tms_error_t *error);
void tms_disk_file_destroy(tms_disk_directory_t *directory, tms_disk_file_t *file); /* unlinks; NULL is fine */
/* For tests: removes everything and forgets the directory. Destroy the files, and release the quarantine, first. */
void tms_disk_release(tms_disk_directory_t *directory);
/* At exit: unlinks everything. The structs stay with their owners, for tms_disk_file_destroy. Afterwards the
 * directory can be used again. */
void tms_disk_remove_all(tms_disk_directory_t *directory);
/* In a forked child: forgets the parent's files, leaves them on the disk, and closes the inherited lock descriptors' copies.
 */
void tms_disk_after_fork_in_child(tms_disk_directory_t *directory);

#endif
