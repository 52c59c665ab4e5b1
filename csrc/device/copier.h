/* A copier: a stream on one device for the copies of one call.
 *
 * Its device's context is current between open and close, except between step_out and step_in. Used by one thread; no lock.
 * If the call can be cancelled, copies are queued in chunks, of which at most two are in flight.
 *
 * A copier knows no store. A store registers host memory that must outlive the copies with tms_copier_hold. A store whose
 * medium the driver cannot access (files) adds a relay. If the device cannot be synchronized, both outlive the copier in the
 * quarantine. */
#ifndef TMS_COPIER_H
#define TMS_COPIER_H

#include "base/log.h"
#include "base/quarantine.h"
#include "device/device.h"
#include "device/wait.h"

/* The bytes queued between two checks for cancellation. At most twice as many are in flight. */
#define TMS_COPY_CHUNK_BYTES ((uint64_t)256 << 20)

enum { TMS_COPIER_EVENTS = 2 };

/* Parts of segments are gathered and queued by one driver call when this number of parts or bytes is reached: enough to make
 * the cost of the calls small, too few to leave the bus idle (docs/performance.md). */
enum { TMS_GATHERED_COPIES = 64 };
#define TMS_GATHERED_BYTES ((uint64_t)16 << 20)

typedef struct tms_gathered {
    size_t count;
    uint64_t bytes;
    bool to_host;
    tms_error_context_t context; /* context of the first copy; all copies have its tag */
    CUdeviceptr targets[TMS_GATHERED_COPIES], sources[TMS_GATHERED_COPIES];
    size_t sizes[TMS_GATHERED_COPIES];
} tms_gathered_t;

/* Shared by the copiers of a process. Constant while one exists. */
typedef struct tms_copying {
    tms_devices_t *devices;
    tms_log_t *log;
    tms_quarantine_t *quarantine; /* for resources that cannot be released */
    uint64_t chunk_bytes;         /* TMS_COPY_CHUNK_BYTES; tests use less */
} tms_copying_t;

struct tms_copier_relay_table;

/* An extension that a store adds to a copier: the first member of a heap-allocated struct with the state of the store's
 * copies in this copier. */
typedef struct tms_copier_relay {
    const struct tms_copier_relay_table *table;
    struct tms_copier_relay *next; /* of the same copier */
} tms_copier_relay_t;

/* `wait` and `close` are called on the copier's thread. All three are called in its device's context, with no lock held. */
typedef struct tms_copier_relay_table {
    /* Waits until every copy begun by the store is done or queued in the copier's stream. A failure fails the call; only
     * `close` and `release` are called after it. */
    tms_status_t (*wait)(tms_copier_relay_t *relay, tms_error_t *error);
    /* NULL, or called once, also after a failure. Afterwards only copies in the stream are in flight. It must not use the
     * copier. */
    void (*close)(tms_copier_relay_t *relay);
    /* Called once, after close, when the device has stopped copying. Frees the relay, and adds resources that cannot be
     * released to the quarantine. `wait` is the call's, or NULL if a later call does this, on any thread. */
    void (*release)(tms_copier_relay_t *relay, const tms_driver_table_t *driver, const tms_wait_t *wait);
} tms_copier_relay_table_t;

typedef struct tms_copier {
    const tms_copying_t *copying;
    const tms_driver_table_t *driver;
    int device;
    tms_wait_t *wait;       /* of the call; NULL: not interruptible, and every copy is one driver call */
    _Atomic uint64_t *done; /* NULL, or counts the bytes that have been copied */
    /* NULL, or called instead of waiting for a chunk, as long as it sets *more. A failure fails the copy. */
    tms_status_t (*on_idle)(void *context, bool *more, tms_error_t *error);
    void *on_idle_context;
    CUstream stream;
    CUevent events[TMS_COPIER_EVENTS];  /* recorded after the last two chunks; created when the first chunk is full */
    uint64_t behind[TMS_COPIER_EVENTS]; /* bytes that the event completes, if it is recorded and not waited for yet; else
                                           0 */
    int next;                           /* index of the next event */
    uint64_t queued;                    /* bytes after the last recorded event, including gathered ones */
    tms_gathered_t gathered;            /* not queued yet */
    uint64_t begun;                     /* number of copies to host memory that may have written there, or will once
                                           queued */
    bool open;
    bool outside;                     /* between step_out and step_in */
    bool idle;                        /* everything queued has completed */
    struct tms_copier_holdings *held; /* copier.c */
} tms_copier_t;

/* `wait` may be NULL. */
tms_status_t tms_copier_open(tms_copier_t *copier, const tms_copying_t *copying, int device, tms_wait_t *wait,
                             const tms_error_context_t *context, tms_error_t *error);
/* To be called before the first copy into host memory. The copier calls release(held) once all copies have completed, even
 * if the call fails: on any thread, in the device's context, with no lock held. After TMS_OUT_OF_HOST_MEMORY it is not
 * called. */
tms_status_t tms_copier_hold(tms_copier_t *copier, void *held, void (*release)(void *held),
                             const tms_error_context_t *context, tms_error_t *error);
/* Returns the relay with this table, or NULL. A copier has at most one relay with each table. */
tms_copier_relay_t *tms_copier_find_relay(const tms_copier_t *copier, const tms_copier_relay_table_t *table);
/* Passes ownership of the relay to the copier, which waits for it, closes it and releases it. `table` is set. */
void tms_copier_add_relay(tms_copier_t *copier, tms_copier_relay_t *relay);
/* Queues a copy. TMS_INTERRUPTED between chunks. After a failure queued copies may be in flight until the copier is
 * closed. */
tms_status_t tms_copier_to_host(tms_copier_t *copier, void *host, CUdeviceptr address, uint64_t bytes,
                                const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_copier_to_device(tms_copier_t *copier, CUdeviceptr address, const void *host, uint64_t bytes,
                                  const tms_error_context_t *context, tms_error_t *error);
/* To be called before the first part of a segment: fails if its memory is gone. The driver rejects a single copy of an
 * unmapped address, but crashes if a batch contains one (release 580). */
tms_status_t tms_copier_begin_parts(const tms_copier_t *copier, CUdeviceptr segment, const tms_error_context_t *context,
                                    tms_error_t *error);
/* Queue a copy of a part of a segment. Parts may be gathered; tms_copier_queue_all queues them at the latest. */
tms_status_t tms_copier_part_to_host(tms_copier_t *copier, void *host, CUdeviceptr address, uint64_t bytes,
                                     const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_copier_part_to_device(tms_copier_t *copier, CUdeviceptr address, const void *host, uint64_t bytes,
                                       const tms_error_context_t *context, tms_error_t *error);
/* Queues a copy on the device. The copies that come before it are queued already (tms_copier_queue_all). */
tms_status_t tms_copier_on_device(tms_copier_t *copier, CUdeviceptr target, CUdeviceptr source, uint64_t bytes,
                                  const tms_error_context_t *context, tms_error_t *error);
/* Queues the gathered copies and the copies of the relays. Afterwards every copy that was begun is done or in the stream. */
tms_status_t tms_copier_queue_all(tms_copier_t *copier, tms_error_t *error);
/* Queues a fill with one byte; later copies of this copier come after it. */
tms_status_t tms_copier_fill(tms_copier_t *copier, CUdeviceptr address, uint64_t bytes, unsigned char value,
                             const tms_error_context_t *context, tms_error_t *error);
/* Restores the context that was current before open. The stream's work continues. Until step_in only close may be
 * called. It may be called even if step_in fails: then the copies may still be running. */
void tms_copier_step_out(tms_copier_t *copier);
tms_status_t tms_copier_step_in(tms_copier_t *copier, const tms_error_context_t *context, tms_error_t *error);
/* Calls tms_copier_queue_all, and waits for everything queued. A backup is valid, or may be discarded, only after this has
 * succeeded. */
tms_status_t tms_copier_wait(tms_copier_t *copier, const tms_error_context_t *context, tms_error_t *error);
/* Waits for copies left in flight by a failed call. False: the device may still be copying and could not be synchronized.
 * Then the caller must keep the device memory mapped and the host memory that is read unchanged; host memory that is written
 * (tms_copier_hold, relays) is quarantined. A lost device copies nothing any more. Accepts a copier that was never
 * opened. */
bool tms_copier_close(tms_copier_t *copier);

#endif
