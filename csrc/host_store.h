/* The host store: the memory that backups are kept in. host_block.h has what its files share.
 *
 * Memory comes in blocks: one anonymous mapping each, aligned to huge pages, not inherited by a forked child, on the NUMA
 * node of its GPU where there are several. A block is divided into pieces of TMS_HOST_PIECE_BYTES, which are touched,
 * page-locked (cuMemHostRegister, PORTABLE, in the primary context of the block's device) and given back one by one. A
 * buffer is a contiguous range of a block, of any number of pieces or a part of one; a copy must not cross from one piece to
 * the next (the driver refuses a range that lies in two registrations). Where page-locking is refused the piece stays
 * ordinary memory: copies are slower, and one log line says so.
 *
 * A batch is all the memory that one pause needs: buffers are added, then it is started, and from then on its pieces become
 * usable in the order of adding while the caller copies into the first ones: several threads touch memory, and whoever waits
 * for a piece page-locks it.
 * Before each slab is touched the headroom is read again (host_limit.h), and a slab that would pass it fails the batch with
 * TMS_OUT_OF_HOST_MEMORY; whatever the batch made then goes when its buffers are dropped.
 *
 * Buffers are reference-counted, because a zero-copy view may outlive them. With the last reference a buffer's policy
 * decides about the pieces that no other buffer lies in: RELEASE gives them back to the system (PINNED: on a thread of the
 * store, soon; MMAP: by tms_host_store_release_now, or by that thread), POOL keeps them, page-locked, for any later buffer,
 * as long as the pool's limit allows. What cannot be given back goes to the quarantine. Giving page-locked memory back waits
 * for its device and keeps other threads from launching meanwhile (measured on an H200), so the thread gives back one piece
 * at a time.
 *
 * The pool: a new buffer goes first where there is room in the pool, behind the buffer that was placed there last for the
 * same device, else in the first gap that is large enough, of blocks of its own device before those of others: page-locked
 * memory is every device's. A gap may reach over several pieces of one block. Pieces of the pool are those that were given
 * to it idle, and all of what tms_host_store_reserve makes, also before they are usable: awaiting them waits for its thread.
 * No buffer is placed among the buffers of anybody else's block, because that would keep it from being given back. Idle
 * pieces, those in which nothing lies, count against the pool's limit; one that would pass it is given back, and so are the
 * last pieces of the newest blocks when the limit is lowered or host memory runs short.
 *
 * Locks: the store's `lock` is a leaf; it is not held during any system or driver call. Any thread. Threads of the store
 * block all signals, and none runs unless there is something to do. */
#ifndef TMS_HOST_STORE_H
#define TMS_HOST_STORE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "device.h"
#include "host_limit.h"
#include "quarantine.h"
#include "wait.h"

#define TMS_HOST_PIECE_BYTES ((uint64_t)64 << 20)

struct tms_host_block;
struct tms_host_batch;

typedef struct tms_host_store {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a piece became usable, a batch failed, something was given back, a thread ended */
    tms_devices_t *devices;
    const tms_log_t *log;
    tms_quarantine_t *quarantine;
    tms_host_limits_t limits;
    uint64_t piece_bytes; /* TMS_HOST_PIECE_BYTES; tests use less */
    int touching_threads; /* of a batch, at most; 0: one less than processors, up to 15, at least one */

    /* All under `lock`, but for the atomics. */
    struct tms_host_block *blocks;
    struct tms_host_piece *waiting, *last_waiting;   /* to be given back, in this order */
    struct tms_host_buffer *recent[TMS_MAX_DEVICES]; /* placed in the pool last, or NULL */
    uint64_t pool_limit_bytes;                       /* of idle memory that is kept */
    uint64_t planned_bytes;                          /* of batches under way: not allowed to be touched yet */
    uint64_t in_flight_bytes;                        /* allowed to be touched, in resident_bytes already, and not all done */
    uint64_t reserving_bytes;                        /* on its way into the pool */
    uint64_t leaving[2];                             /* pieces that are being given back now: [1] those of kind MMAP */
    uint64_t calls;                                  /* driver calls under way */
    uint64_t abandoned_calls;                        /* of them, those that no close waits for any more */
    int threads;                                     /* detached ones: releasing, retrying, reserving */
    bool checking;                                   /* a thread reads the headroom for what it wants to touch */
    bool releasing;                                  /* the thread that gives memory back is running */
    bool retrying;                                   /* the thread that tries what was refused again is */
    bool closing;                                    /* no driver call is to be begun any more */
    _Atomic uint64_t buffer_bytes;                   /* of all buffers, as they were asked for */
    _Atomic uint64_t
        resident_bytes; /* touched and not yet given back: buffers, pool, quarantine, what waits to be released; claims */
    _Atomic uint64_t pooled_bytes;                                     /* of them idle, kept for later */
    _Atomic bool said_not_locked, said_no_huge_pages, said_no_threads; /* one log line of each is enough */
} tms_host_store_t;

tms_status_t tms_host_store_init(tms_host_store_t *store, tms_devices_t *devices, const tms_log_t *log,
                                 tms_quarantine_t *quarantine, uint64_t cap_bytes, uint64_t pool_limit_bytes,
                                 tms_error_t *error);
/* For tests: gives everything back. No buffer may be left, and no other thread be in the store. What is in the quarantine
 * may still be retried afterwards. */
void tms_host_store_release(tms_host_store_t *store);
/* At exit: no thread in the store begins another driver call after this has returned. Waits for those that are under way,
 * until `deadline` (tms_wait_now; INFINITY: none): giving pinned memory back waits for its device, where a kernel may never
 * end. What is left then is abandoned, and a later close does not wait for it. What is dropped later is left to the end of
 * the process. */
void tms_host_store_close(tms_host_store_t *store, double deadline);
/* In a forked child, with `lock` held by the forking thread: forgets everything, which is the parent's. */
void tms_host_store_after_fork_in_child(tms_host_store_t *store);

/* ---- memory that is not the store's ---- */

/* Backup files of a file system in memory are host memory, too: they count against the limits and in resident_bytes. A claim
 * asks whether there is room; its bytes are in flight until tms_host_store_claim_used says that the system counts them.
 * TMS_OUT_OF_HOST_MEMORY, as for a piece of the store. */
tms_status_t tms_host_store_claim(tms_host_store_t *store, uint64_t bytes, const tms_error_context_t *context,
                                  tms_error_t *error);
void tms_host_store_claim_used(tms_host_store_t *store, uint64_t bytes);
/* The memory is back with the system, after tms_host_store_claim_used. Takes no lock. */
void tms_host_store_disclaim(tms_host_store_t *store, uint64_t bytes);

/* ---- batches ---- */

/* What a buffer is for. Buffers of one batch with equal device, kind and group share blocks, so that they are given back
 * together; `group` is compared only. */
typedef struct tms_host_request {
    uint64_t bytes; /* not 0 */
    int device;
    tms_backup_kind_t kind; /* PINNED or MMAP */
    const void *group;
} tms_host_request_t;

/* Empty. TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_host_batch_create(struct tms_host_batch **batch, tms_host_store_t *store,
                                   const tms_error_context_t *context, tms_error_t *error);
/* One reference to a new buffer, the caller's; from the pool if that has room in one piece, else planned. Its `memory` is
 * known once the batch has been started. */
tms_status_t tms_host_batch_add(struct tms_host_batch *batch, const tms_host_request_t *request, tms_host_buffer_t **buffer,
                                const tms_error_context_t *context, tms_error_t *error);
/* Maps what was planned and begins to make it usable. TMS_OUT_OF_HOST_MEMORY also where the headroom is too small for all of
 * it already (what waits to be released, and idle pooled memory, is given back before that is said). The caller then
 * destroys the batch and drops the buffers. Where no thread can be had, tms_host_buffer_await does its work. */
tms_status_t tms_host_batch_start(struct tms_host_batch *batch, const tms_error_context_t *context, tms_error_t *error);
/* Stops what is under way and waits for its threads; buffers stay. NULL is fine. After a failure, before the buffers are
 * dropped. */
void tms_host_batch_destroy(struct tms_host_batch *batch);

/* On a thread that has nothing better to do: page-locks the first piece of `device` that is ready for it. False: none is. */
bool tms_host_batch_help(struct tms_host_batch *batch, int device);

/* ---- buffers ---- */

struct tms_host_buffer {
    struct tms_host_buffer *previous, *next; /* of its block, by offset; under the store's lock */
    _Atomic uint32_t references;
    _Atomic int policy; /* tms_host_policy_t, RELEASE or POOL: what happens with the last reference */
    tms_host_store_t *store;
    struct tms_host_block *block;
    tms_backup_kind_t kind;
    void *memory;    /* page-aligned; NULL until its batch has been started */
    uint64_t offset; /* in the block */
    uint64_t bytes;
    pid_t process; /* that made it: in another one dropping touches nothing but the count */
};

/* How many bytes from `offset` on can be copied in one go: up to the end of the piece, or of the buffer. Waits until they
 * are touched, and page-locks them, unless another thread does. What `wait` says; what has failed the batch;
 * TMS_INVALID_STATE after the batch was destroyed early, or at exit. */
tms_status_t tms_host_buffer_await(tms_host_buffer_t *buffer, uint64_t offset, tms_wait_t *wait, uint64_t *bytes,
                                   const tms_error_context_t *context, tms_error_t *error);
/* Whether the piece there is pinned: one that has been awaited is not where the driver refused that. */
bool tms_host_buffer_is_pinned(tms_host_buffer_t *buffer, uint64_t offset);
void tms_host_buffer_acquire(tms_host_buffer_t *buffer);
void tms_host_buffer_drop(tms_host_buffer_t *buffer); /* NULL is fine; calls no driver */
/* Page-locking was refused for this reason, and ordinary memory serves instead: one log line, the first time. */
void tms_host_store_say_not_locked(tms_host_store_t *store, const tms_error_t *reason);

/* ---- giving back ---- */

/* On this thread: everything of kind MMAP that waits to be released. Waits for what another thread has begun with. */
void tms_host_store_release_now(tms_host_store_t *store);
/* Has everything in the quarantine that holds host memory tried again on a thread: taking page-locked memory back waits for
 * the device, which no caller is to wait for. Cheap when there is nothing. */
void tms_host_store_retry(tms_host_store_t *store);
/* Until nothing waits to be released any more; gives back on this thread too. */
void tms_host_store_settle(tms_host_store_t *store);
/* Has `bytes` of idle page-locked memory made ready in the background, in `device`'s context, where the pool has less.
 * TMS_OUT_OF_HOST_MEMORY if it is clear at once that this cannot be; later failures are logged. Raises the pool's limit to
 * at least `bytes`. */
tms_status_t tms_host_store_reserve(tms_host_store_t *store, int device, uint64_t bytes, tms_error_t *error);
/* Gives idle memory back until no more than `bytes` are pooled, and keeps to that from now on. */
void tms_host_store_set_pool_limit(tms_host_store_t *store, uint64_t bytes);
/* What the pool holds idle is to be given back, in the background. Its limit stays. */
void tms_host_store_trim(tms_host_store_t *store);

#endif
