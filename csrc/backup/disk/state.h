/* What the files of backup/disk share: the directory, its lock files and the backup files in it. backup/disk/disk.h says
 * what they are and has the calls. */
#ifndef TMS_BACKUP_DISK_STATE_H
#define TMS_BACKUP_DISK_STATE_H

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
    _Atomic uint64_t total; /* bytes of all files */
    bool has_indirect;      /* a file system has refused to go past the page cache: */
    dev_t indirect;         /* the last one that did */
    _Atomic bool warned_no_uring;
    bool no_direct, no_uring;     /* for tests: as if the system refused */
    bool refuses;                 /* the system has refused to remove something, which is tried again */
    tms_quarantine_t *quarantine; /* NULL: none */
    struct tms_host_store *host;  /* NULL, or whose limits and counts files of a file system in memory are part of */
    uint64_t staging_bytes;       /* of the staging buffers of one copier, together; TMS_DISK_BACKUP_CHUNK_MB */
    _Atomic bool warned_in_memory;
    tms_quarantined_t refused; /* one for all of it */
    bool in_quarantine;        /* `refused` is there */
} tms_disk_directory_t;

#endif
