/* The types of the disk store: the directory, its lock files and its backup files. backup/disk/disk.h describes them and
 * declares the calls. */
#ifndef TMS_BACKUP_DISK_TYPES_H
#define TMS_BACKUP_DISK_TYPES_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "backup/disk/checksum.h"
#include "base/log.h"
#include "base/quarantine.h"
#include "base/status.h"

struct tms_host_store;

/* Contents are checked in blocks of this size; transfers begin at a multiple of it. */
#define TMS_DISK_BLOCK_BYTES ((uint64_t)512 << 10)

/* The identity of a file, independent of its name. */
typedef struct tms_disk_identity {
    dev_t device;
    ino_t number;
    bool known;     /* false: inode numbers may change on this file system */
    bool in_memory; /* the file system has no disk and no direct I/O */
} tms_disk_identity_t;

typedef struct tms_disk_file {
    struct tms_disk_file *previous, *next; /* in the list of the process's files; under the directory's lock */
    struct tms_disk_directory *directory;
    struct tms_disk_lock *owner_lock; /* NULL: the file was removed (exit) or belongs to the parent (fork) */
    uint64_t bytes;
    uint64_t claimed_bytes; /* host memory claimed for it, on a file system in memory; under the directory's lock */
    tms_checksum_t *checksum_of;
    uint32_t *checksums; /* one checksum for each block */
    tms_disk_identity_t identity;
    bool abandoned;   /* destroyed, but could not be removed */
    const char *name; /* in its directory; the end of `path` */
    char path[];      /* absolute, for messages */
} tms_disk_file_t;

/* The lock file of this process in one directory; removed with its last backup file there. */
typedef struct tms_disk_lock {
    struct tms_disk_lock *next;
    tms_disk_identity_t place; /* identity of the directory */
    int directory;             /* descriptor of the directory */
    tms_disk_identity_t identity;
    int fd;
    unsigned files;
    const char *name;   /* "tms-<domain>-<pid>-<random>"; the end of `prefix` */
    const char *suffix; /* the lock file's name is `name` followed by this */
    char prefix[];      /* "<directory>/tms-<domain>-<pid>-<random>" */
} tms_disk_lock_t;

typedef struct tms_disk_directory {
    pthread_mutex_t lock;
    const tms_log_t *log;
    char *path;             /* directory of the next file; created at first use if missing */
    tms_disk_file_t *files; /* all files of this process, in any directory, including those that could not be removed */
    tms_disk_lock_t *locks;
    unsigned next_number;
    _Atomic uint64_t total; /* bytes of all files */
    bool has_indirect;      /* a file system has rejected direct I/O */
    dev_t indirect;         /* device of the last file system that has rejected it */
    _Atomic bool warned_no_uring;
    bool no_direct, no_uring;     /* for tests: disable direct I/O and io_uring */
    bool refuses;                 /* a file could not be removed and is to be retried */
    tms_quarantine_t *quarantine; /* NULL: none */
    struct tms_host_store *host;  /* NULL, or the store that counts files on a file system in memory */
    uint64_t staging_bytes;       /* total size of the staging buffers of one copier; TMS_DISK_BACKUP_CHUNK_MB */
    _Atomic bool warned_in_memory;
    _Atomic bool warned_shared;
    tms_quarantined_t refused; /* one node for all files */
    bool in_quarantine;        /* `refused` is in the quarantine */
} tms_disk_directory_t;

#endif
