/* A copier: a stream on one device for the copies of one call.
 *
 * Its device's context is current between open and close. Used by one thread. Where the call can be told to stop, copies go
 * in chunks, of which at most two are in flight. */
#ifndef TMS_COPIER_H
#define TMS_COPIER_H

#include "device.h"
#include "wait.h"

/* How much is queued between two looks at whether the call is to stop. At most twice this much is in flight then. */
#define TMS_COPY_CHUNK_BYTES ((uint64_t)256 << 20)

enum { TMS_COPIER_EVENTS = 2 };

/* Parts of segments are gathered, and queued by one driver call once there are so many of them, or so many bytes: enough for
 * the calls to cost nothing (an H200 takes 113 ms to queue 7129 copies one by one, 5 in dozens), too few for the bus to
 * wait. */
enum { TMS_GATHERED_COPIES = 64 };
#define TMS_GATHERED_BYTES ((uint64_t)16 << 20)

typedef struct tms_gathered {
    size_t count;
    uint64_t bytes;
    bool to_host;
    tms_error_context_t context; /* of the first; all have its tag */
    CUdeviceptr targets[TMS_GATHERED_COPIES], sources[TMS_GATHERED_COPIES];
    size_t sizes[TMS_GATHERED_COPIES];
} tms_gathered_t;

struct tms_backup_stores;

typedef struct tms_copier {
    struct tms_backup_stores *stores;
    const tms_driver_table_t *driver;
    int device;
    tms_wait_t *wait;       /* of the call; NULL: not interruptible, and every copy is one driver call */
    _Atomic uint64_t *done; /* NULL, or counts the bytes that are certain to have been copied */
    /* NULL, or done instead of waiting for a chunk, as often as there is *more to do. A failure is the copy's. */
    tms_status_t (*meanwhile)(void *context, bool *more, tms_error_t *error);
    void *meanwhile_context;
    CUstream stream;
    CUevent events[TMS_COPIER_EVENTS];  /* behind the last two chunks; made when the first chunk is full */
    uint64_t behind[TMS_COPIER_EVENTS]; /* bytes that the event is behind, if it is in the stream and not waited for yet;
                                           else 0 */
    int next;                           /* of events */
    uint64_t queued;                    /* bytes behind the event recorded last, with those that are gathered */
    tms_gathered_t gathered;            /* not queued yet */
    uint64_t begun;                     /* copies to host memory that may have written there, or will once queued */
    bool open;
    bool idle;                        /* what was queued has been waited for */
    struct tms_disk_pipe *disk;       /* backup_disk_copy.c; made at the first disk copy */
    struct tms_copier_holdings *held; /* copier.c */
} tms_copier_t;

/* `wait` may be NULL. */
tms_status_t tms_copier_open(tms_copier_t *copier, struct tms_backup_stores *stores, int device, tms_wait_t *wait,
                             const tms_error_context_t *context, tms_error_t *error);
/* Before the first copy into host memory: keeps a reference to it until the copies are known to be done, whatever becomes of
 * the call. */
tms_status_t tms_copier_hold(tms_copier_t *copier, tms_host_buffer_t *buffer, const tms_error_context_t *context,
                             tms_error_t *error);
/* Queues a copy. TMS_INTERRUPTED between chunks. After any failure what was queued may still be under way until the copier
 * is closed. */
tms_status_t tms_copier_to_host(tms_copier_t *copier, void *host, CUdeviceptr address, uint64_t bytes,
                                const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_copier_to_device(tms_copier_t *copier, CUdeviceptr address, const void *host, uint64_t bytes,
                                  const tms_error_context_t *context, tms_error_t *error);
/* Before the first part of a segment: fails if somebody took its memory. A single copy of an address without memory is
 * refused; the driver (580) does not survive one among several at once. */
tms_status_t tms_copier_begin_parts(const tms_copier_t *copier, CUdeviceptr segment, const tms_error_context_t *context,
                                    tms_error_t *error);
/* A copy as above of a part of a segment, queued by tms_copier_flush at the latest. */
tms_status_t tms_copier_part_to_host(tms_copier_t *copier, void *host, CUdeviceptr address, uint64_t bytes,
                                     const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_copier_part_to_device(tms_copier_t *copier, CUdeviceptr address, const void *host, uint64_t bytes,
                                       const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_copier_flush(tms_copier_t *copier, tms_error_t *error);
/* Queues zeros; later copies of this copier come after them. */
tms_status_t tms_copier_zero(tms_copier_t *copier, CUdeviceptr address, uint64_t bytes, const tms_error_context_t *context,
                             tms_error_t *error);
/* Flushes, and waits for everything queued. A backup is valid, or may be let go, only after this has succeeded. */
tms_status_t tms_copier_wait(tms_copier_t *copier, const tms_error_context_t *context, tms_error_t *error);
/* Waits for what a failed call has left in flight. False: the device may still be copying, and could not be waited for. Then
 * device memory that the copier copied from or to must stay mapped, and host memory that it copies from must stay as it is;
 * host memory that it copies to (tms_copier_hold) waits in the quarantine. A device that is lost copies nothing any more.
 * Accepts one that was never opened. */
bool tms_copier_close(tms_copier_t *copier);

#endif
