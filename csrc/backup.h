/* Where the contents of a segment go while it is paused: one interface, three stores.
 *
 * A backup belongs to its segment and is handled only by the thread that owns the segment in a transition; host buffers are
 * reference-counted because a zero-copy view may outlive them there. No lock is held during any of these calls.
 *
 * Life: plan (what this pause keeps, and where; host memory is asked for, a file is made, or nothing has changed) -> save
 * (contents are in it, once the copier has waited) -> commit -> load (contents are on the device again, once the copier has
 * waited) -> discard. cancel undoes plan. `saved` says whether it holds contents, and `held` what they are.
 *
 * A retained backup holds those of an earlier pause. A pause writes over it, so that its memory keeps its address from pause
 * to pause. One that fails before the commit leaves it as it was where nothing has been copied into it yet; else it has no
 * contents until the next pause, since they are in part those of either pause, but its memory stays where it is. */
#ifndef TMS_BACKUP_H
#define TMS_BACKUP_H

#include "backup_disk.h"
#include "copier.h"
#include "device.h"
#include "host_store.h"
#include "wait.h"

/* A part of a segment that is kept, `offset` from its start, and where it lies in the backup, which has no gaps. */
typedef struct tms_extent {
    uint64_t offset, packed, bytes;
} tms_extent_t;

/* What is kept of a segment. */
typedef struct tms_backup_content {
    tms_backup_kind_t kind; /* where */
    uint64_t bytes;         /* in all */
    tms_extent_t *extents;  /* sorted; NULL: everything, or nothing where `bytes` is 0 */
    size_t extent_count;
} tms_backup_content_t;

typedef struct tms_backup {
    tms_backup_kind_t kind;       /* as the region said */
    tms_host_policy_t policy;     /* as the region said; TMS_HOST_DEFAULT */
    uint64_t bytes;               /* of the segment's contents: the size that was asked for */
    bool saved;                   /* holds the contents of a pause */
    bool fresh_file;              /* `file` was made by the pause under way */
    tms_backup_content_t held;    /* if saved */
    tms_backup_content_t planned; /* by the pause under way */
    tms_host_buffer_t *host;      /* our reference, or NULL */
    tms_host_buffer_t *fresh;     /* the planned one, where `host` will not do */
    tms_disk_file_t *file;        /* made at a pause to disk; kept until the segment is freed if `kind` is DISK */
} tms_backup_t;

/* What all stores need; lives in the saver. */
typedef struct tms_backup_stores {
    tms_devices_t *devices;
    const tms_log_t *log;
    tms_quarantine_t *quarantine; /* for what cannot be given back */
    uint64_t chunk_bytes;         /* disk staging buffers of a copier, together */
    uint64_t copy_chunk_bytes;    /* TMS_COPY_CHUNK_BYTES; tests use less */
    tms_host_store_t host;        /* has its own lock */
    tms_disk_directory_t disk;    /* has its own lock */
    _Atomic uint64_t disk_bytes;
} tms_backup_stores_t;

/* What one pause wants of the backup of one segment. */
typedef struct tms_backup_wish {
    tms_backup_kind_t kind;       /* this time */
    tms_host_policy_t policy;     /* for host memory that is made; not TMS_HOST_DEFAULT */
    int device;                   /* that the host memory is for */
    const void *group;            /* tms_host_request_t.group */
    uint64_t address;             /* of the segment */
    const tms_live_t *live;       /* NULL: everything is */
    struct tms_host_batch *batch; /* asked for host memory */
    tms_wait_t *wait;
} tms_backup_wish_t;

/* A backup that still has memory or a file that will do is used again. */
tms_status_t tms_backup_plan(tms_backup_t *backup, tms_backup_stores_t *stores, const tms_backup_wish_t *wish,
                             const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_backup_save(tms_backup_t *backup, tms_copier_t *copier, CUdeviceptr address,
                             const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_backup_load(tms_backup_t *backup, tms_copier_t *copier, CUdeviceptr address,
                             const tms_error_context_t *context, tms_error_t *error);
/* The pause under way failed: takes away what plan made, and the contents of what save has written to. Its batch has ended.
 */
void tms_backup_cancel(tms_backup_t *backup, tms_backup_stores_t *stores);
/* The pause under way has succeeded: the planned contents count from now on. */
void tms_backup_commit(tms_backup_t *backup, tms_backup_stores_t *stores);
/* After a resume: contents are no longer needed, but for TMS_HOST_RETAIN. `policy` is not TMS_HOST_DEFAULT. */
void tms_backup_discard(tms_backup_t *backup, tms_backup_stores_t *stores, tms_host_policy_t policy);
/* The segment is freed: everything goes. */
void tms_backup_destroy(tms_backup_t *backup, tms_backup_stores_t *stores);

/* The parts that `content` is of, in their order. `whole` is room for the only one, where that is everything. */
static inline const tms_extent_t *tms_backup_extents(const tms_backup_content_t *content, tms_extent_t *whole,
                                                     size_t *count) {
    *whole = (tms_extent_t){.offset = 0, .packed = 0, .bytes = content->bytes};
    *count = content->extents ? content->extent_count : content->bytes > 0;
    return content->extents ? content->extents : whole;
}
/* Where the copy of `bytes` at `offset` of the segment lies, if all of it is in host memory; else NULL. */
void *tms_backup_find(const tms_backup_t *backup, uint64_t offset, uint64_t bytes);
/* Whether a resume with `zero` has something to zero. */
static inline bool tms_backup_lacks_contents(const tms_backup_t *backup) {
    return !backup->saved || backup->held.bytes < backup->bytes;
}

#endif
