/* The types of the host store: the store, its blocks, their chunks and buffers. Only backup/host includes this.
 *
 * A block is one mapping. A chunk is the part of a block that is prefaulted, pinned and released as a unit. Fields change
 * under the store's lock. A chunk in PREFAULTING, PINNING or RELEASING belongs to the thread that put it there, which makes
 * its system and driver calls without the lock. store.h describes the whole.
 *
 * Layers, each of which calls only those before it: map, limit, node; types; gaps; block; release; pool; room; work; batch;
 * store.
 */
#ifndef TMS_HOST_TYPES_H
#define TMS_HOST_TYPES_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "backup/host/limit.h"
#include "backup/host/map.h"
#include "base/quarantine.h"
#include "base/registry.h"
#include "device/device.h"

#define TMS_HOST_CHUNK_BYTES ((uint64_t)64 << 20)

struct tms_host_block;
struct tms_host_batch;

/* Memory of the pool without buffers (gaps.h). */
typedef struct tms_host_gap {
    tms_registry_node_t node; /* first: its addresses */
    struct tms_host_block *block;
    struct tms_host_gap *previous, *next; /* neighbours in its list; `next` also links the block's spare gaps */
    bool allocated;                       /* by itself, not as a part of a chunk */
} tms_host_gap_t;

enum { TMS_HOST_GAP_CLASSES = 64 };

/* The gaps in memory of one device, by the number of bits of their size. */
typedef struct tms_host_gap_lists {
    tms_host_gap_t *by_class[TMS_HOST_GAP_CLASSES];
    uint64_t used; /* a bit for each list that is not empty */
} tms_host_gap_lists_t;

typedef struct tms_host_store {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a chunk became usable or was released, a batch failed, a thread ended */
    tms_devices_t *devices;
    tms_log_t *log;
    tms_quarantine_t *quarantine;
    tms_host_limits_t limits;
    uint64_t chunk_bytes;    /* TMS_HOST_CHUNK_BYTES; tests use less */
    int prefaulting_threads; /* maximum for a batch; 0: one less than processors, from 1 to 15 */

    /* All under `lock`, except the atomics. */
    struct tms_host_block *blocks;
    struct tms_host_chunk *waiting, *last_waiting; /* queue of chunks to be released */
    tms_registry_t gaps;                           /* all gaps of the pool, by address */
    tms_host_gap_lists_t gap_lists[TMS_MAX_DEVICES];
    uint64_t steps;                  /* gaps and entries of batches that searches have visited; for complexity tests */
    uint64_t pool_limit_bytes;       /* maximum of idle memory that is kept */
    uint64_t planned_bytes;          /* bytes of current batches that are not allowed yet */
    uint64_t in_flight_bytes;        /* allowed, counted in resident_bytes, not all resident yet */
    uint64_t reserving_bytes;        /* bytes of chunks being prepared for the pool (reserve_host_memory) */
    uint64_t releasing[2];           /* number of chunks being released: [1] of kind MMAP, [0] others */
    uint64_t calls;                  /* driver calls in flight */
    uint64_t abandoned_calls;        /* calls in flight for which close no longer waits */
    int threads;                     /* number of detached threads: releasing, retrying, reserving */
    bool checking;                   /* a thread is checking the headroom for a chunk */
    bool release_thread;             /* the releasing thread is running */
    bool retry_thread;               /* the retrying thread is running */
    bool closing;                    /* no driver call may begin any more */
    _Atomic uint64_t buffer_bytes;   /* sum of the requested sizes of all buffers */
    _Atomic uint64_t resident_bytes; /* prefaulted and not released: buffers, pool, quarantine, queue; and claims */
    _Atomic uint64_t pooled_bytes;   /* part of resident_bytes that is idle in the pool */
    _Atomic bool warned_not_pinned, warned_no_huge_pages, warned_no_threads; /* the line has been logged */
} tms_host_store_t;

struct tms_host_buffer {
    struct tms_host_buffer *previous, *next; /* in the list of its block, in any order; under the store's lock */
    _Atomic uint32_t references;
    _Atomic int policy;      /* tms_host_policy_t, RELEASE or POOL: applied when the last reference is dropped */
    _Atomic bool handed_out; /* a program has got a reference since all of it was written last */
    tms_host_store_t *store;
    struct tms_host_block *block;
    tms_backup_kind_t kind;
    void *memory;    /* page-aligned; NULL until its batch has been started */
    uint64_t offset; /* in the block */
    uint64_t bytes;
    pid_t process; /* the process that made it; in a forked child a drop changes only the count */
    bool placed;   /* in a gap of the pool */
};

typedef enum tms_host_chunk_state {
    TMS_HOST_CHUNK_ABSENT,      /* not usable, and its batch has ended */
    TMS_HOST_CHUNK_PLANNED,     /* waits for the threads of its batch */
    TMS_HOST_CHUNK_PREFAULTING, /* being prefaulted in parts */
    TMS_HOST_CHUNK_PREFAULTED,  /* waits to be pinned */
    TMS_HOST_CHUNK_PINNING,
    TMS_HOST_CHUNK_USABLE,    /* pinned, unless the driver failed to */
    TMS_HOST_CHUNK_WAITING,   /* in the queue for release */
    TMS_HOST_CHUNK_RELEASING, /* a thread is releasing it */
    TMS_HOST_CHUNK_REFUSED,   /* in the quarantine */
    TMS_HOST_CHUNK_GONE       /* released, addresses included */
} tms_host_chunk_state_t;

typedef struct tms_host_chunk {
    tms_quarantined_t quarantined; /* first */
    struct tms_host_chunk *next;   /* in the queue for release */
    struct tms_host_block *block;
    uint64_t offset, bytes;
    uint64_t not_prefaulted; /* bytes that its batch has not prefaulted yet */
    uint32_t buffers;        /* number of buffers that overlap it */
    tms_host_chunk_state_t state;
    tms_backup_kind_t kind; /* while it waits for release: the kind of its last buffer */
    bool counted;           /* in resident_bytes */
    bool in_flight;         /* in in_flight_bytes */
    bool pinned;            /* registered with the driver */
    bool open;              /* in the pool: any buffer may be placed in it */
    bool reserved;          /* in reserving_bytes: will enter the pool */
    tms_host_gap_t gap;     /* for gaps of its block; which one it is may change */
} tms_host_chunk_t;

struct tms_host_block {
    struct tms_host_block *previous, *next; /* links of the store's list, the newest block first */
    tms_host_store_t *store;
    struct tms_host_batch *batch; /* the batch that prepares it; NULL afterwards */
    tms_host_buffer_t *first;     /* its buffers */
    char *memory;                 /* NULL until its batch is started */
    uint64_t bytes;               /* planned, then mapped: whole pages */
    size_t placed;                /* buffers that were placed in gaps */
    tms_host_gap_t *spare_gaps;   /* not in use */
    size_t gap_count;             /* in use or spare */
    size_t chunk_count, left;     /* `left`: chunks that are not GONE */
    tms_host_chunk_t *chunks;
    int device;
    tms_backup_kind_t kind;
    const void *group;
    bool listed;         /* in store->blocks */
    bool for_pool;       /* made by tms_host_store_reserve */
    bool failed;         /* its batch failed: chunks that are not usable will never be */
    tms_error_t failure; /* if `failed` */
};

/* ---- under the lock ---- */

/* Returns the number of bytes that a buffer occupies in its block. */
static inline uint64_t tms_host_buffer_extent(const tms_host_buffer_t *buffer) {
    return tms_host_round(buffer->bytes, tms_host_page_bytes());
}
static inline tms_host_chunk_t *tms_host_chunk_at(const struct tms_host_block *block, uint64_t offset) {
    return &block->chunks[offset / block->store->chunk_bytes];
}
/* Whether the calling thread may make a driver call. If so, it calls tms_host_call_end after it. */
bool tms_host_call_begin(tms_host_store_t *store);
void tms_host_call_end(tms_host_store_t *store);

/* ---- without it ---- */

/* Starts a detached thread of the store. The thread first detaches itself, is counted in store->threads, and ends with
 * tms_host_thread_end. Returns 0, or the error number, which is logged. */
int tms_host_thread_detach(tms_host_store_t *store, void *(*run)(void *), void *argument);
void tms_host_thread_end(tms_host_store_t *store);
/* Warns once if a thread could not be started. Other threads do its work. */
void tms_host_warn_no_thread(tms_host_store_t *store, int os_error);
/* Warns once if the memory could not be pinned. */
void tms_host_warn_not_pinned(tms_host_store_t *store, const tms_error_t *reason);

#endif
