/* What the files of the host store share: the store, its blocks, their pieces and the buffers that lie in them. Only
 * backup/host includes this.
 *
 * A block is one mapping. A piece of it is the unit that is prefaulted, pinned and given back. Fields change under the
 * store's lock. A piece in TOUCHING, LOCKING or LEAVING belongs to the thread that put it there, which makes its system and
 * driver calls without the lock. store.h says what is kept where.
 *
 * Layers, each of which calls only those before it: map, limit, node; state; block; release; pool; room; work; batch; store.
 */
#ifndef TMS_HOST_STATE_H
#define TMS_HOST_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "backup/host/limit.h"
#include "backup/host/map.h"
#include "base/quarantine.h"
#include "device/device.h"

#define TMS_HOST_PIECE_BYTES ((uint64_t)64 << 20)

struct tms_host_block;
struct tms_host_batch;

typedef struct tms_host_store {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a piece became usable, a batch failed, something was given back, a thread ended */
    tms_devices_t *devices;
    tms_log_t *log;
    tms_quarantine_t *quarantine;
    tms_host_limits_t limits;
    uint64_t piece_bytes;    /* TMS_HOST_PIECE_BYTES; tests use less */
    int prefaulting_threads; /* of a batch, at most; 0: one less than processors, up to 15, at least one */

    /* All under `lock`, but for the atomics. */
    struct tms_host_block *blocks;
    struct tms_host_piece *waiting, *last_waiting;   /* to be given back, in this order */
    struct tms_host_buffer *recent[TMS_MAX_DEVICES]; /* placed in the pool last, or NULL */
    uint64_t pool_limit_bytes;                       /* of idle memory that is kept */
    uint64_t planned_bytes;                          /* of batches under way: not allowed yet */
    uint64_t in_flight_bytes;                        /* allowed, counted in resident_bytes, not all resident yet */
    uint64_t reserving_bytes;                        /* on its way into the pool */
    uint64_t releasing[2];                           /* pieces that are being given back now: [1] those of kind MMAP */
    uint64_t calls;                                  /* driver calls under way */
    uint64_t abandoned_calls;                        /* of them, those that no close waits for any more */
    int threads;                                     /* detached ones: releasing, retrying, reserving */
    bool checking;                                   /* a thread reads the headroom for what it wants to prefault */
    bool release_thread;                             /* the thread that gives memory back is running */
    bool retry_thread;                               /* the thread that tries what was refused again is */
    bool closing;                                    /* no driver call is to be begun any more */
    _Atomic uint64_t buffer_bytes;                   /* of all buffers, as they were asked for */
    _Atomic uint64_t
        resident_bytes; /* prefaulted and not yet given back: buffers, pool, quarantine, what waits to be released; claims */
    _Atomic uint64_t pooled_bytes;                                           /* of them idle, kept for later */
    _Atomic bool warned_not_pinned, warned_no_huge_pages, warned_no_threads; /* one log line of each is enough */
} tms_host_store_t;

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
    pid_t process; /* that made it: in another one a drop changes only the count */
};

typedef enum tms_piece_state {
    TMS_PIECE_ABSENT,      /* nothing is under way, and nothing usable there: its batch has ended before */
    TMS_PIECE_PLANNED,     /* waits for the threads of its batch */
    TMS_PIECE_PREFAULTING, /* parts of it are */
    TMS_PIECE_PREFAULTED,  /* waits to be pinned */
    TMS_PIECE_PINNING,
    TMS_PIECE_USABLE,    /* pinned, unless that was refused */
    TMS_PIECE_WAITING,   /* in the queue of what is to be given back */
    TMS_PIECE_RELEASING, /* a thread is giving it back */
    TMS_PIECE_REFUSED,   /* in the quarantine */
    TMS_PIECE_GONE       /* given back, its addresses with it */
} tms_piece_state_t;

typedef struct tms_host_piece {
    tms_quarantined_t quarantined; /* first */
    struct tms_host_piece *next;   /* in the queue of what is to be given back */
    struct tms_host_block *block;
    uint64_t offset, bytes;
    uint64_t not_prefaulted; /* bytes of it that its batch has still to prefault */
    uint32_t buffers;        /* that lie in it, wholly or in part */
    tms_piece_state_t state;
    tms_backup_kind_t kind; /* while it waits to be given back: of the buffer that left last */
    bool counted;           /* in resident_bytes */
    bool in_flight;         /* in in_flight_bytes */
    bool pinned;            /* registered with the driver */
    bool open;              /* of the pool: any buffer may be placed in it */
    bool reserved;          /* in reserving_bytes: on its way into the pool */
} tms_host_piece_t;

struct tms_host_block {
    struct tms_host_block *previous, *next; /* of the store, the newest first */
    tms_host_store_t *store;
    struct tms_host_batch *batch;    /* that is at work on it; NULL afterwards */
    tms_host_buffer_t *first, *last; /* by offset */
    char *memory;                    /* NULL until its batch is started */
    uint64_t bytes;                  /* planned, then mapped: whole pages */
    uint64_t used;                   /* by buffers */
    size_t piece_count, left;        /* `left`: pieces that are not GONE */
    tms_host_piece_t *pieces;
    int device;
    tms_backup_kind_t kind;
    const void *group;
    bool listed;         /* in store->blocks */
    bool for_pool;       /* made by tms_host_store_reserve */
    bool failed;         /* its batch has: what is not usable yet will not be */
    tms_error_t failure; /* if `failed` */
};

/* ---- under the lock ---- */

/* What a buffer takes of its block. */
static inline uint64_t tms_host_buffer_extent(const tms_host_buffer_t *buffer) {
    return tms_host_round(buffer->bytes, tms_host_page_bytes());
}
static inline tms_host_piece_t *tms_host_piece_at(const struct tms_host_block *block, uint64_t offset) {
    return &block->pieces[offset / block->store->piece_bytes];
}
/* Whether the calling thread may make a driver call; each one that may says when it has been made. */
bool tms_host_call_begin(tms_host_store_t *store);
void tms_host_call_end(tms_host_store_t *store);

/* ---- without it ---- */

/* A thread of the store that is not joined: it begins with pthread_detach of itself, is counted in store->threads, and ends
 * with tms_host_thread_end. 0, or the error number, which is logged. */
int tms_host_thread_detach(tms_host_store_t *store, void *(*run)(void *), void *argument);
void tms_host_thread_end(tms_host_store_t *store);
/* A thread could not be started, and others do its work: one log line, the first time. */
void tms_host_warn_no_thread(tms_host_store_t *store, int os_error);
/* The driver refused to pin for this reason, and the memory stays ordinary: one log line, the first time. */
void tms_host_warn_not_pinned(tms_host_store_t *store, const tms_error_t *reason);

#endif
