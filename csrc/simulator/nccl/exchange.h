/* What the ranks of a communicator share: one piece of memory, without a name, that goes with the last of them. Each rank
 * has a seat in it, two slots for its part of a collective, and a ring to each rank for what it sends. A rank writes its own
 * seat and slots only. Counters only grow, and are written after what they count; a change is announced to the sleepers.
 *
 * The file is found through the process that made it (base/ipc.h), which keeps it open until all ranks have taken a seat.
 * Owns the mapping. What is shared is atomic and needs no lock. */
#ifndef TMS_SIM_NCCL_EXCHANGE_H
#define TMS_SIM_NCCL_EXCHANGE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "simulator/base/state.h"
#include "simulator/nccl/types.h"

enum {
    SIM_NCCL_MAX_RANKS = 64,
    SIM_NCCL_SLOT_BYTES = 256 << 10,
    /* Of a rank: one is written while another is read. Two are enough, since a rank begins a step when all have posted their
     * parts of the one before, and so have read what they need of the one before that. */
    SIM_NCCL_SLOTS = 2,
};

/* Where a file is found: of which process, and which. */
typedef struct sim_nccl_place {
    int process;
    int file;
    uint64_t file_id;
} sim_nccl_place_t;

/* The collective that a rank takes part in. */
typedef struct sim_nccl_call {
    uint32_t kind, type, reduction, root;
    uint64_t count;
} sim_nccl_call_t;

/* What a rank says when a communicator is made out of this one. */
typedef struct sim_nccl_wish {
    int color, key;
} sim_nccl_wish_t;

typedef enum sim_nccl_presence {
    SIM_NCCL_ABSENT,
    SIM_NCCL_PRESENT,
    SIM_NCCL_LEFT, /* it has destroyed its communicator */
    SIM_NCCL_ABORTED,
    SIM_NCCL_FAILED,
} sim_nccl_presence_t;

typedef struct sim_nccl_seat {
    _Atomic(int) presence;
    int process;
    unsigned long long started; /* of the process */
    int device;                 /* its place in the machine */
    uint64_t machine;
    _Atomic(uint64_t) calls; /* collectives begun */
    sim_nccl_call_t call[2]; /* the last two of them */
    /* Steps of the collectives: its own part is in its slot, and it has read what it needs of the step before; its share is
     * reduced. */
    _Atomic(uint64_t) posted, reduced;
    _Atomic(uint64_t) wishes, places; /* of communicators made out of this one */
    sim_nccl_wish_t wish[2];
    sim_nccl_place_t place[2];
} sim_nccl_seat_t;

typedef struct sim_nccl_ring {
    _Atomic(uint64_t) written, read; /* bytes */
} sim_nccl_ring_t;

typedef struct sim_nccl_shared {
    _Atomic(uint32_t) changes;
    _Atomic(uint32_t) joined;
    uint32_t ranks;
    sim_nccl_seat_t seats[SIM_NCCL_MAX_RANKS];
} sim_nccl_shared_t;

typedef struct sim_nccl_exchange {
    sim_nccl_shared_t *shared; /* NULL: none */
    size_t bytes;
    unsigned rank, ranks;
    uint64_t ring_bytes;
} sim_nccl_exchange_t;

/* A new file, of this process; -1 without memory. */
int sim_nccl_exchange_create(sim_nccl_place_t *place);
/* Opens the file of a place and takes the seat of exchange->rank. Says in words why it cannot. */
sim_nccl_result_t sim_nccl_exchange_join(sim_nccl_exchange_t *exchange, const sim_nccl_place_t *place, int device);
/* Closes the file of a place, if this process made it. */
void sim_nccl_exchange_forget(const sim_nccl_place_t *place);
void sim_nccl_exchange_leave(sim_nccl_exchange_t *exchange);

sim_nccl_seat_t *sim_nccl_seat(const sim_nccl_exchange_t *exchange, unsigned rank);
uint8_t *sim_nccl_slot(const sim_nccl_exchange_t *exchange, unsigned rank, uint64_t step);
sim_nccl_ring_t *sim_nccl_ring(const sim_nccl_exchange_t *exchange, unsigned from, unsigned to);
uint8_t *sim_nccl_ring_data(const sim_nccl_exchange_t *exchange, sim_nccl_ring_t *ring);
/* Whether the process of a rank that has taken its seat lives, and has not left. */
bool sim_nccl_is_present(const sim_nccl_exchange_t *exchange, unsigned rank);

/* Wakes all sleepers. */
void sim_nccl_announce(const sim_nccl_exchange_t *exchange);
uint32_t sim_nccl_changes(const sim_nccl_exchange_t *exchange);
/* Sleeps until there are others than `seen`, but not long; false after that time. Without the simulator's lock. */
bool sim_nccl_sleep(const sim_nccl_exchange_t *exchange, uint32_t seen);

#endif
