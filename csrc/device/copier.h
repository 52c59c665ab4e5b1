/* A copier: a stream on one device for the copies of one call.
 *
 * Its device's context is current between open and close. Used by one thread. Where the call can be cancelled, copies go
 * in chunks, of which at most two are in flight.
 *
 * A copier knows no store. A store that copies to or from host memory that may be freed has it held (tms_copier_hold). One
 * that moves contents on to a place that the driver cannot copy to adds a relay. Both outlive the copier where the device
 * cannot be waited for: they then wait in the quarantine. */
#ifndef TMS_COPIER_H
#define TMS_COPIER_H

#include "base/log.h"
#include "base/quarantine.h"
#include "device/device.h"
#include "device/wait.h"

/* How much is queued before it is asked again whether the call is cancelled. At most twice this much is in flight then. */
#define TMS_COPY_CHUNK_BYTES ((uint64_t)256 << 20)

enum { TMS_COPIER_EVENTS = 2 };

/* Parts of segments are gathered, and queued by one driver call once there are so many of them, or so many bytes: enough for
 * the calls to cost little, too few for the bus to wait (docs/performance.md). */
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

/* What the copiers of a process share. Constant while there is one. */
typedef struct tms_copying {
    tms_devices_t *devices;
    tms_log_t *log;
    tms_quarantine_t *quarantine; /* for what cannot be given back */
    uint64_t chunk_bytes;         /* TMS_COPY_CHUNK_BYTES; tests use less */
} tms_copying_t;

struct tms_copier_relay_table;

/* What a store adds to a copier: the first member of a struct of the store's, on the heap, which keeps the state of the
 * store's copies under way in this copier. */
typedef struct tms_copier_relay {
    const struct tms_copier_relay_table *table;
    struct tms_copier_relay *next; /* of the same copier */
} tms_copier_relay_t;

/* `wait` and `close` are called on the copier's thread; all three under its device's context and without any lock. */
typedef struct tms_copier_relay_table {
    /* Waits until every copy that the store has begun is done, or is queued in the copier's stream. A failure is the call's;
     * only `close` and `release` come after it. */
    tms_status_t (*wait)(tms_copier_relay_t *relay, tms_error_t *error);
    /* Once, also after a failure: nothing of it is under way afterwards but what is in the stream. It cannot use the copier
     * any more. */
    void (*close)(tms_copier_relay_t *relay);
    /* Once, after close: the device has stopped copying. Frees the relay; what cannot be freed is the relay's to put into
     * the quarantine. `wait`: the call's, or NULL where a later call does this, on any thread. */
    void (*release)(tms_copier_relay_t *relay, const tms_driver_table_t *driver, const tms_wait_t *wait);
} tms_copier_relay_table_t;

typedef struct tms_copier {
    const tms_copying_t *copying;
    const tms_driver_table_t *driver;
    int device;
    tms_wait_t *wait;       /* of the call; NULL: not interruptible, and every copy is one driver call */
    _Atomic uint64_t *done; /* NULL, or counts the bytes that are certain to have been copied */
    /* NULL, or called instead of waiting for a chunk, as often as there is *more to do. A failure is the copy's. */
    tms_status_t (*on_idle)(void *context, bool *more, tms_error_t *error);
    void *on_idle_context;
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
    struct tms_copier_holdings *held; /* copier.c */
} tms_copier_t;

/* `wait` may be NULL. */
tms_status_t tms_copier_open(tms_copier_t *copier, const tms_copying_t *copying, int device, tms_wait_t *wait,
                             const tms_error_context_t *context, tms_error_t *error);
/* Before the first copy into host memory: has release(held) called once the copies are known to be done, whatever becomes of
 * the call; perhaps on another thread, under the device's context, and without any lock. TMS_OUT_OF_HOST_MEMORY: it will not
 * be called. */
tms_status_t tms_copier_hold(tms_copier_t *copier, void *held, void (*release)(void *held),
                             const tms_error_context_t *context, tms_error_t *error);
/* The relay with this table, or NULL. A copier has at most one of each. */
tms_copier_relay_t *tms_copier_find_relay(const tms_copier_t *copier, const tms_copier_relay_table_t *table);
/* From now on the copier's, which waits for it, closes and releases it. `table` is set. */
void tms_copier_add_relay(tms_copier_t *copier, tms_copier_relay_t *relay);
/* Queues a copy. TMS_INTERRUPTED between chunks. After any failure what was queued may still be under way until the copier
 * is closed. */
tms_status_t tms_copier_to_host(tms_copier_t *copier, void *host, CUdeviceptr address, uint64_t bytes,
                                const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_copier_to_device(tms_copier_t *copier, CUdeviceptr address, const void *host, uint64_t bytes,
                                  const tms_error_context_t *context, tms_error_t *error);
/* Before the first part of a segment: fails if its memory is gone. A single copy of an address without memory is
 * refused; the driver (580) does not survive one among several at once. */
tms_status_t tms_copier_begin_parts(const tms_copier_t *copier, CUdeviceptr segment, const tms_error_context_t *context,
                                    tms_error_t *error);
/* A copy as above of a part of a segment, queued by tms_copier_queue_all at the latest. */
tms_status_t tms_copier_part_to_host(tms_copier_t *copier, void *host, CUdeviceptr address, uint64_t bytes,
                                     const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_copier_part_to_device(tms_copier_t *copier, CUdeviceptr address, const void *host, uint64_t bytes,
                                       const tms_error_context_t *context, tms_error_t *error);
/* Everything begun is in the stream afterwards, or done: what is gathered, and what the relays have under way. */
tms_status_t tms_copier_queue_all(tms_copier_t *copier, tms_error_t *error);
/* Queues zeros; later copies of this copier come after them. */
tms_status_t tms_copier_zero(tms_copier_t *copier, CUdeviceptr address, uint64_t bytes, const tms_error_context_t *context,
                             tms_error_t *error);
/* The same, and waits for all of it. A backup is valid, or may be discarded, only after this has succeeded. */
tms_status_t tms_copier_wait(tms_copier_t *copier, const tms_error_context_t *context, tms_error_t *error);
/* Waits for what a failed call has left in flight. False: the device may still be copying, and could not be waited for. Then
 * device memory that the copier copied from or to must stay mapped, and host memory that it copies from must stay as it is;
 * host memory that it copies to (tms_copier_hold, relays) waits in the quarantine. A device that is lost copies nothing any
 * more. Accepts one that was never opened. */
bool tms_copier_close(tms_copier_t *copier);

#endif
