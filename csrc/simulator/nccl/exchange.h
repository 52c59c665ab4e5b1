/* The exchange: shared memory of a communicator's ranks. It is an unnamed file that exists until the last rank has
 * unmapped it. Each rank has a seat, two slots for its part of a collective, and a ring per peer for sends. A rank writes
 * only its own seat, slots and rings, with two exceptions: a receiver advances the read counter of a ring, and a shrink
 * advances the split counters of excluded ranks. Counters only grow and are updated after the data they count. A change
 * wakes the waiting ranks.
 *
 * Other ranks open the file through the process that created it (base/process.h), which keeps it open until all ranks have
 * joined. Owns the mapping. The shared data is atomic and needs no lock; functions that report an error need the
 * simulator's lock. */
#ifndef TMS_SIM_NCCL_EXCHANGE_H
#define TMS_SIM_NCCL_EXCHANGE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "simulator/base/simulation.h"
#include "simulator/nccl/types.h"

enum {
    SIM_NCCL_MAX_RANKS = 64,
    SIM_NCCL_SLOT_BYTES = 256 << 10,
    /* Per rank: one slot is written while the other is read. Two suffice: a rank starts a step only after all ranks have
     * posted their parts of the previous step, and then they have read what they need of the step before that. */
    SIM_NCCL_SLOTS = 2,
};

/* Identifies an exchange file: the process that has it open, its file number and inode. */
typedef struct sim_nccl_location {
    int process;
    int file;
    uint64_t file_id;
} sim_nccl_location_t;

/* The arguments of a rank's collective, for comparison between ranks. */
typedef struct sim_nccl_call {
    uint32_t kind, type, reduction, root;
    uint64_t count;
} sim_nccl_call_t;

/* A rank's arguments for a derived communicator (ncclCommSplit, ncclCommShrink). */
typedef struct sim_nccl_split_request {
    int color, key;
} sim_nccl_split_request_t;

typedef enum sim_nccl_presence {
    SIM_NCCL_ABSENT,
    SIM_NCCL_PRESENT,
    SIM_NCCL_LEFT, /* destroyed its communicator */
    SIM_NCCL_ABORTED,
    SIM_NCCL_FAILED,
} sim_nccl_presence_t;

typedef struct sim_nccl_seat {
    _Atomic(int) presence;
    int process;
    unsigned long long started; /* start time of the process */
    int device;                 /* machine index of its device */
    uint64_t machine;
    _Atomic(uint64_t) calls; /* number of collectives started */
    sim_nccl_call_t call[2]; /* the last two collectives */
    /* Steps of the collectives. `posted`: the rank's part is in its slot, and it has read what it needs of the previous
     * step. `reduced`: its share is reduced. */
    _Atomic(uint64_t) posted, reduced;
    _Atomic(uint64_t) split_requests, locations; /* number of derived communicators: requests made, and exchanges created */
    sim_nccl_split_request_t split[2];
    sim_nccl_location_t location[2];
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
    sim_nccl_shared_t *shared; /* NULL: not joined */
    size_t bytes;
    unsigned rank, ranks;
    uint64_t ring_bytes;
} sim_nccl_exchange_t;

/* Creates an exchange file in this process; -1 if out of memory. */
int sim_nccl_exchange_create(sim_nccl_location_t *location);
/* Opens and maps an exchange and takes the seat of exchange->rank. Stores an error text on failure. */
sim_nccl_result_t sim_nccl_exchange_join(sim_nccl_exchange_t *exchange, const sim_nccl_location_t *location, int device);
/* Closes the exchange file if this process created it. */
void sim_nccl_exchange_close_file(const sim_nccl_location_t *location);
void sim_nccl_exchange_leave(sim_nccl_exchange_t *exchange);

sim_nccl_seat_t *sim_nccl_seat(const sim_nccl_exchange_t *exchange, unsigned rank);
uint8_t *sim_nccl_slot(const sim_nccl_exchange_t *exchange, unsigned rank, uint64_t step);
sim_nccl_ring_t *sim_nccl_ring(const sim_nccl_exchange_t *exchange, unsigned from, unsigned to);
uint8_t *sim_nccl_ring_data(const sim_nccl_exchange_t *exchange, sim_nccl_ring_t *ring);
/* Whether the rank's process is alive and has not left the communicator. */
bool sim_nccl_is_present(const sim_nccl_exchange_t *exchange, unsigned rank);

/* Publishes a change and wakes all waiting ranks. */
void sim_nccl_announce(const sim_nccl_exchange_t *exchange);
uint32_t sim_nccl_changes(const sim_nccl_exchange_t *exchange);
/* Waits for a change after `seen`, for a limited time; false on timeout. The caller must not hold the simulator's lock. */
bool sim_nccl_sleep(const sim_nccl_exchange_t *exchange, uint32_t seen);

#endif
