/* Where the contents of a segment go while it is paused: one interface, three stores.
 *
 * A backup belongs to its segment and is handled only by the thread that owns the segment in a transition; host buffers are
 * reference-counted because a zero-copy view may outlive them there. No lock is held during any of these calls.
 *
 * Life: prepare (space is there, or nothing has changed) -> save (contents are in it, once the copier has waited) -> commit
 * -> load (contents are on the device again, once the copier has waited) -> discard. cancel undoes prepare. `saved` says
 * whether it holds contents. */
#ifndef TMS_BACKUP_H
#define TMS_BACKUP_H

#include "backup_disk.h"
#include "backup_host.h"
#include "device.h"
#include "wait.h"

/* How much is queued between two looks at whether the call is to stop. At most twice this much is in flight then. */
#define TMS_COPY_CHUNK_BYTES ((uint64_t)256 << 20)

enum { TMS_COPIER_EVENTS = 2 };

typedef struct tms_backup {
    tms_backup_kind_t kind;
    bool saved;              /* holds the contents of the last pause */
    bool fresh;              /* its space was made by the pause under way: cancel takes it away again */
    uint64_t bytes;          /* of the contents: the size that was asked for */
    tms_host_buffer_t *host; /* PINNED, MMAP: our reference, or NULL */
    tms_disk_file_t *file;   /* DISK: made at the first pause, kept until the segment is freed */
} tms_backup_t;

/* What all stores need; lives in the saver. */
typedef struct tms_backup_stores {
    tms_devices_t *devices;
    const tms_log_t *log;
    tms_quarantine_t *quarantine; /* for what cannot be given back */
    uint64_t chunk_bytes;         /* disk staging buffer */
    uint64_t copy_chunk_bytes;    /* TMS_COPY_CHUNK_BYTES; tests use less */
    tms_disk_directory_t disk;    /* has its own lock */
    _Atomic uint64_t host_bytes;
    _Atomic uint64_t disk_bytes;
} tms_backup_stores_t;

/* A stream on one device for the copies of one call. Its device's context is current between open and close. */
typedef struct tms_copier {
    tms_backup_stores_t *stores;
    const tms_driver_table_t *driver;
    int device;
    tms_wait_t *wait; /* of the call; NULL: not interruptible, and every copy is one driver call */
    CUstream stream;
    CUevent events[TMS_COPIER_EVENTS]; /* behind the last two chunks; made when the first chunk is full */
    bool recorded[TMS_COPIER_EVENTS];  /* in the stream, and not waited for yet */
    int next;                          /* of events */
    uint64_t queued;                   /* bytes behind the event recorded last */
    bool open;
    void *staging; /* pinned; made at the first disk copy */
    uint64_t staging_bytes;
    struct tms_copier_holdings *held; /* copier.c */
} tms_copier_t;

/* `wait` may be NULL. */
tms_status_t tms_copier_open(tms_copier_t *copier, tms_backup_stores_t *stores, int device, tms_wait_t *wait,
                             const tms_error_context_t *context, tms_error_t *error);
/* Queues a copy. Where the call is interruptible, in chunks, of which at most two are in flight; TMS_INTERRUPTED between
 * them. After any failure what was queued may still be under way until the copier is closed. */
tms_status_t tms_copier_to_host(tms_copier_t *copier, void *host, CUdeviceptr address, uint64_t bytes,
                                const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_copier_to_device(tms_copier_t *copier, CUdeviceptr address, const void *host, uint64_t bytes,
                                  const tms_error_context_t *context, tms_error_t *error);
/* Waits for everything queued. A backup is valid, or may be let go, only after this has succeeded. */
tms_status_t tms_copier_wait(tms_copier_t *copier, const tms_error_context_t *context, tms_error_t *error);
void tms_copier_close(tms_copier_t *copier); /* accepts one that was never opened */

/* Each acts by backup->kind; NONE does nothing. A backup that still holds memory (retained, or a file) is used again. */
tms_status_t tms_backup_prepare(tms_backup_t *backup, tms_backup_stores_t *stores, tms_wait_t *wait,
                                const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_backup_save(tms_backup_t *backup, tms_copier_t *copier, CUdeviceptr address,
                             const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_backup_load(tms_backup_t *backup, tms_copier_t *copier, CUdeviceptr address,
                             const tms_error_context_t *context, tms_error_t *error);
/* The pause under way failed: takes away what prepare made. */
void tms_backup_cancel(tms_backup_t *backup, tms_backup_stores_t *stores);
/* The pause under way has succeeded: the contents count from now on. */
void tms_backup_commit(tms_backup_t *backup);
/* After a resume: contents are no longer needed. Host memory goes unless `retain`; a file keeps its size. */
void tms_backup_discard(tms_backup_t *backup, bool retain);
/* The segment is freed: everything goes. */
void tms_backup_destroy(tms_backup_t *backup, tms_backup_stores_t *stores);

#endif
