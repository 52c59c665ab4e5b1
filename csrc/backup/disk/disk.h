/* Backup files: one for each segment, in a directory that several processes may share.
 *
 * backup/disk/disk.c has the files; backup/disk/transfer.c their contents, which backup/disk/copy.c moves;
 * backup/disk/directory.c the directory, its lock file and the removal of dead processes' files. A file is open only during
 * a transfer, so that thousands of files need no descriptors.
 *
 * Contents bypass the page cache (O_DIRECT) if the file system supports that, which costs no memory and is as fast as the
 * disk. On other file systems, contents pass through the page cache.
 *
 * Names are "tms-<domain>-<pid>-<random>-<number>.backup". A process with backup files keeps a lock file,
 * "tms-<domain>-<pid>-<random>.lock", open and locked with flock. The kernel releases that lock when the process ends, in
 * any way. So the next process of the same lock domain (backup/disk/domain.h) that uses the directory recognises the lock
 * file of a dead process (it can be locked, and the process does not run) and removes it with its backups. Files of other
 * domains stay, because their locks may be invisible here. A lock file is created with the suffix ".new" and renamed once it
 * is locked, because the clean-up of other processes finds it by its final name. If the file system has no locks, it becomes
 * ".unlocked", which every clean-up ignores: backups work, and the files of a killed process stay.
 *
 * Files have mode 0600, are created with O_EXCL and O_NOFOLLOW, and are addressed relative to the opened directory. A file
 * is written or removed only if it is still the same file (device and inode), and data that is read must have the checksum
 * of the data written. The clean-up removes only regular files of the same user. All files of the process are removed at
 * exit (process.h), never in a forked child.
 *
 * Files on a file system in memory (tmpfs, often /tmp) are host memory: they are claimed from the host store before space is
 * reserved, and count as its own (backup/host/store.h).
 *
 * Files that cannot be removed are quarantined. Later calls and each creation of a file retry the removal.
 *
 * Lock: the directory has its own mutex, a leaf except for the quarantine's. It is held across opening, creating and
 * unlinking, never across reading or writing. Any thread. */
#ifndef TMS_BACKUP_DISK_H
#define TMS_BACKUP_DISK_H

#include "backup/disk/types.h"
#include "device/wait.h"

/* Copies `path` and accesses no file. `quarantine` and `host` are NULL and `staging_bytes` is 0; they may be set before the
 * first use. */
tms_status_t tms_disk_init(tms_disk_directory_t *directory, const char *path, const tms_log_t *log, tms_error_t *error);
/* Creates the directory if missing (0700), checks that files can be created in it, and removes files of dead processes
 * there. On failure the former directory stays in force. */
tms_status_t tms_disk_set_directory(tms_disk_directory_t *directory, const char *path, tms_error_t *error);
/* Creates a file with `bytes` of space reserved on the disk. If the file system cannot reserve, its free space is checked,
 * and a disk that fills up later fails the write. `wait` may be NULL. TMS_BACKUP_IO, TMS_OUT_OF_HOST_MEMORY;
 * TMS_INTERRUPTED if `wait` was cancelled. */
tms_status_t tms_disk_file_create(tms_disk_directory_t *directory, uint64_t bytes, tms_disk_file_t **file, tms_wait_t *wait,
                                  const tms_error_context_t *context, tms_error_t *error);
/* Whether the file still exists, is the same file, and has its size, so that another backup can be written to it. */
bool tms_disk_file_is_usable(tms_disk_file_t *file);
/* Transfer `bytes` at `offset` on the calling thread. `offset` is a multiple of TMS_DISK_BLOCK_BYTES, and so is `bytes`,
 * unless the range ends with the file. TMS_BACKUP_IO with errno, or for a file that was replaced, changed or truncated. */
tms_status_t tms_disk_file_write(tms_disk_file_t *file, const void *data, uint64_t bytes, uint64_t offset,
                                 const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_disk_file_read(tms_disk_file_t *file, void *data, uint64_t bytes, uint64_t offset,
                                const tms_error_context_t *context, tms_error_t *error);
void tms_disk_file_destroy(tms_disk_directory_t *directory, tms_disk_file_t *file); /* unlinks the file; accepts NULL */
/* For tests: removes everything and forgets the directory. Destroy the files, and release the quarantine, first. */
void tms_disk_release(tms_disk_directory_t *directory);
/* At exit: unlinks everything. The structs stay with their owners, for tms_disk_file_destroy. Afterwards the
 * directory can be used again. */
void tms_disk_remove_all(tms_disk_directory_t *directory);
/* In a forked child: forgets the parent's files, leaves them on the disk, and closes the inherited lock descriptors. */
void tms_disk_after_fork_in_child(tms_disk_directory_t *directory);

#endif
