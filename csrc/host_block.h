/* The blocks of the host store and their pieces: what the files of the store (host_*.c) share. Nobody else includes this.
 *
 * A block is one mapping, a piece of it the unit that is touched, page-locked and given back. Fields change under the
 * store's lock. The functions of host_block.c make the system and driver calls on a piece that its caller has taken into a
 * state in which nobody else touches it (TOUCHING, LOCKING, LEAVING), and hold no lock. */
#ifndef TMS_HOST_BLOCK_H
#define TMS_HOST_BLOCK_H

#include "host_map.h"
#include "host_store.h"

/* What a thread touches before it looks for more work. */
#define TMS_HOST_TOUCH_BYTES ((uint64_t)4 << 20)

typedef enum tms_piece_state {
    TMS_PIECE_ABSENT,   /* nothing is under way, and nothing usable there: its batch has ended before */
    TMS_PIECE_PLANNED,  /* waits for the threads of its batch */
    TMS_PIECE_TOUCHING, /* parts of it are */
    TMS_PIECE_TOUCHED,  /* waits to be page-locked */
    TMS_PIECE_LOCKING,
    TMS_PIECE_USABLE,  /* page-locked, unless that was refused */
    TMS_PIECE_WAITING, /* in the queue of what is to be given back */
    TMS_PIECE_LEAVING, /* somebody is giving it back */
    TMS_PIECE_REFUSED, /* in the quarantine */
    TMS_PIECE_GONE     /* given back, its addresses with it */
} tms_piece_state_t;

typedef struct tms_host_piece {
    tms_quarantined_t quarantined; /* first */
    struct tms_host_piece *next;   /* in the queue of what is to be given back */
    struct tms_host_block *block;
    uint64_t offset, bytes;
    uint64_t untouched; /* bytes of it that its batch has still to touch */
    uint32_t buffers;   /* that lie in it, wholly or in part */
    tms_piece_state_t state;
    tms_backup_kind_t kind; /* while it waits to be given back: of the buffer that left last */
    bool counted;           /* in resident_bytes */
    bool in_flight;         /* in in_flight_bytes */
    bool locked;            /* registered with the driver */
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

/* Maps block->bytes, which it rounds up (TMS_HOST_HUGE_PAGE_BYTES at most), and makes the pieces, none of which is touched.
 * TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_host_block_map(struct tms_host_block *block, const tms_error_context_t *context, tms_error_t *error);
/* Undoes that, before anything was touched. */
void tms_host_block_unmap(struct tms_host_block *block);
/* Has the system find pages for [from, from + bytes) of a piece. */
void tms_host_piece_touch(tms_host_piece_t *piece, uint64_t from, uint64_t bytes);
/* Page-locks a piece; where that is refused it stays ordinary memory, and piece->locked false. TMS_DRIVER_UNAVAILABLE where
 * the driver has gone. */
tms_status_t tms_host_piece_lock(tms_host_piece_t *piece, const tms_error_context_t *context, tms_error_t *error);
/* Gives a piece back to the driver and the system. A driver that has gone may not have stopped the device: the piece is then
 * left as it is, and that is TMS_OK. */
tms_status_t tms_host_piece_give_back(tms_host_piece_t *piece, tms_error_t *error);

/* The memory node of a device, from the system's list of PCI devices under `root`; -1 where there is one node only, or it is
 * not known. host_node.c. */
int tms_host_node(tms_devices_t *devices, int device, const char *root);
/* Asks the system to take memory from a node as long as that has some. */
void tms_host_node_prefer(void *memory, uint64_t bytes, int node);

/* ---- under the store's lock ---- */

/* What a buffer takes of its block. */
static inline uint64_t tms_host_buffer_extent(const tms_host_buffer_t *buffer) {
    return tms_host_round(buffer->bytes, tms_host_page_bytes());
}
static inline tms_host_piece_t *tms_host_piece_at(const struct tms_host_block *block, uint64_t offset) {
    return &block->pieces[offset / block->store->piece_bytes];
}

/* host_pool.c. A place for a buffer in the pool: links it there and sets its block, offset and memory. */
bool tms_host_pool_place(tms_host_store_t *store, tms_host_buffer_t *buffer, int device);
/* A buffer leaves, or enters, the list of its block between its neighbours and the pieces that it lies in. */
void tms_host_buffer_link(tms_host_buffer_t *buffer, tms_host_buffer_t *after);
void tms_host_buffer_unlink(tms_host_buffer_t *buffer);
/* A usable piece in which nothing lies becomes the pool's. */
void tms_host_pool_take(tms_host_piece_t *piece);
/* Has idle pooled memory wait to be given back: at least `bytes` of it, if there is so much. */
void tms_host_pool_give_up(tms_host_store_t *store, uint64_t bytes);

/* host_release.c. A piece in which nothing lies is to be given back. */
void tms_host_release_queue(tms_host_piece_t *piece, tms_backup_kind_t kind);
/* What becomes of a piece whose last buffer has left. */
void tms_host_piece_retire(tms_host_piece_t *piece, tms_host_policy_t policy, tms_backup_kind_t kind);
/* Takes a block off the store's list if nothing is left of it, to be freed by the caller; else NULL. */
struct tms_host_block *tms_host_block_forget(struct tms_host_block *block);
/* Whether the calling thread may make a driver call; each one that may says when it has been made. */
bool tms_host_call_begin(tms_host_store_t *store);
void tms_host_call_end(tms_host_store_t *store);

/* ---- without it ---- */

void tms_host_block_free(struct tms_host_block *block); /* NULL is fine */
/* Starts the releasing thread if there is something for it to do. */
void tms_host_release_start(tms_host_store_t *store);
/* A thread of the store that nobody joins: it begins with pthread_detach of itself, is counted in store->threads, and ends
 * with tms_host_thread_end. 0, or the error number, which is logged. */
int tms_host_thread_detach(tms_host_store_t *store, void *(*run)(void *), void *argument);
void tms_host_thread_end(tms_host_store_t *store);
/* Whether `bytes` more may be touched beside what is in flight; what the tightest limit is. */
bool tms_host_store_fits(tms_host_store_t *store, uint64_t bytes, tms_host_headroom_t *headroom);
/* Gives back what waits for that, then idle pooled memory, until `bytes` more fit. */
bool tms_host_store_make_room(tms_host_store_t *store, uint64_t bytes, tms_host_headroom_t *headroom);

#endif
