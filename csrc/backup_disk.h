/* Backup files: one file a segment, in a directory that several processes may share.
 *
 * backup_disk.c has the files; backup_disk_transfer.c their contents, which backup_disk_copy.c moves;
 * backup_disk_directory.c the directory, its lock file and the removal of dead processes' files. A file is opened while it
 * is transferred only, so that thousands of them need no descriptors.
 *
 * Contents go past the page cache (O_DIRECT) where the file system takes that, which costs no memory and is as fast as the
 * disk; where it does not, they go through it.
 *
 * Names are "tms-<domain>-<pid>-<random>-<number>.backup"; beside them a process that has any keeps a lock file,
 * "tms-<domain>-<pid>-<random>.lock", open and flock'ed. The kernel drops that lock however the process ends, so the next
 * process of the same lock domain (disk_domain.h) that uses the directory recognises what a dead one left (a lock file that
 * can be locked, of a process that does not run) and removes it with its backups. What processes of other domains left
 * stays: their locks may not be seen here. A lock file is made with the suffix ".new" and gets its name when it is locked,
 * because the clean-up of another process finds it by that name. Where the file system has no locks it becomes ".unlocked",
 * which no clean-up looks at: backups work, and the files of a killed process stay.
 *
 * Files are 0600, made with O_EXCL and O_NOFOLLOW, and looked up relative to the directory as it was opened. A file is
 * written to and removed only if it is still the one that was made (device and inode), and what is read must have the
 * checksum of what was written. Of dead processes only regular files of the same user are removed. All files of the process
 * go at exit (process.h) and never in a forked child.
 *
 * Files of a file system in memory (tmpfs, as /tmp often is) are host memory: they are claimed from the host store before
 * they get their space, and count as its own (host_store.h).
 *
 * What the system refuses to remove is kept aside and tried again: by the quarantine, if there is one, and whenever a file
 * is made.
 *
 * Lock: the directory has its own mutex, a leaf but for the quarantine's, held across opening, creating and unlinking but
 * never across reading or writing. */
#ifndef TMS_BACKUP_DISK_H
#define TMS_BACKUP_DISK_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "checksum.h"
#include "log.h"
#include "quarantine.h"
#include "status.h"
#include "wait.h"

struct tms_host_store;

/* Contents are checked in blocks of this size; transfers begin at a multiple of it. */
#define TMS_DISK_BLOCK_BYTES ((uint64_t)512 << 10)

/* Which file of its file system it is, whatever its name. */
typedef struct tms_disk_identity {
    dev_t device;
    ino_t number;
    bool known;     /* false: the file system does not keep the numbers of its files */
    bool in_memory; /* the file system has no disk, and nothing can go past the page cache */
} tms_disk_identity_t;

typedef struct tms_disk_file {
    struct tms_disk_file *previous, *next; /* of the process's files; under the directory's lock */
    struct tms_disk_directory *directory;
    struct tms_disk_lock *owner_lock; /* NULL: the file is gone (exit) or the parent's (fork) */
    uint64_t bytes;
    uint64_t claimed_bytes; /* of host memory, where the file system is in memory; under the directory's lock */
    tms_checksum_t *checksum_of;
    uint32_t *checksums; /* of each block */
    tms_disk_identity_t identity;
    bool abandoned;   /* destroyed, but the system refused to remove it */
    const char *name; /* in its directory; the end of `path` */
    char path[];      /* absolute, for messages */
} tms_disk_file_t;

/* The lock file of this process in one directory; goes with its last backup file there. */
typedef struct tms_disk_lock {
    struct tms_disk_lock *next;
    tms_disk_identity_t place; /* of the directory */
    int directory;             /* descriptor of it */
    tms_disk_identity_t identity;
    int fd;
    unsigned files;
    const char *name;   /* "tms-<domain>-<pid>-<random>"; the end of `prefix` */
    const char *suffix; /* of the file, whose name is `name` and this */
    char prefix[];      /* "<directory>/tms-<domain>-<pid>-<random>" */
} tms_disk_lock_t;

typedef struct tms_disk_directory {
    pthread_mutex_t lock;
    const tms_log_t *log;
    char *path;             /* where the next file is made; created if needed, at first use */
    tms_disk_file_t *files; /* all of this process, in any directory, and those that could not be removed */
    tms_disk_lock_t *locks;
    unsigned next_number;
    _Atomic uint64_t *total; /* bytes of all files */
    bool has_indirect;       /* a file system has refused to go past the page cache: */
    dev_t indirect;          /* the last one that did */
    _Atomic bool said_no_uring;
    bool no_direct, no_uring;     /* for tests: as if the system refused */
    bool refuses;                 /* the system has refused to remove something, which is tried again */
    tms_quarantine_t *quarantine; /* NULL: none */
    struct tms_host_store *host;  /* NULL, or whose limits and counts files of a file system in memory are part of */
    _Atomic bool said_in_memory;
    tms_quarantined_t refused; /* one for all of it */
    bool in_quarantine;        /* `refused` is there */
} tms_disk_directory_t;

/* `path` is copied. Touches no file. `quarantine` and `host` are none, and may be set before the first use. */
tms_status_t tms_disk_init(tms_disk_directory_t *directory, const char *path, const tms_log_t *log, _Atomic uint64_t *total,
                           tms_error_t *error);
/* Creates the directory if needed (0700), checks that files can be made in it, removes what dead processes left there. On
 * failure the former directory stays in force. */
tms_status_t tms_disk_set_directory(tms_disk_directory_t *directory, const char *path, tms_error_t *error);
/* A new file with `bytes` of space reserved on the disk. Where the file system cannot reserve, its free space is compared
 * with `bytes`, and a disk that fills up meanwhile is found by the write. TMS_BACKUP_IO, TMS_OUT_OF_HOST_MEMORY; what `wait`
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
/* At exit: unlinks everything. The structs stay with whoever made the files, for tms_disk_file_destroy. Afterwards the
 * directory can be used again. */
void tms_disk_remove_all(tms_disk_directory_t *directory);
/* In a forked child: forgets the parent's files without touching them and closes the inherited lock descriptors' copies. */
void tms_disk_after_fork_in_child(tms_disk_directory_t *directory);

#endif
