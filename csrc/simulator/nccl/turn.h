/* What the program asked for, and the turn of a rank in which it is done: how long it lasts, and waiting in it. Called on a
 * stream's thread with the simulator's lock held, which waiting gives up. Owns nothing. */
#ifndef TMS_SIM_NCCL_TURN_H
#define TMS_SIM_NCCL_TURN_H

#include "simulator/base/state.h"
#include "simulator/nccl/communicator.h"
#include "simulator/nccl/types.h"

typedef enum sim_nccl_kind {
    SIM_NCCL_ALL_REDUCE,
    SIM_NCCL_BROADCAST,
    SIM_NCCL_REDUCE,
    SIM_NCCL_ALL_GATHER,
    SIM_NCCL_REDUCE_SCATTER,
    SIM_NCCL_ALL_TO_ALL,
    SIM_NCCL_GATHER,
    SIM_NCCL_SCATTER,
    SIM_NCCL_SEND,
    SIM_NCCL_RECEIVE,
} sim_nccl_kind_t;

/* What the program asked for in one call. */
typedef struct sim_nccl_part {
    sim_nccl_kind_t kind;
    uint64_t source, destination;
    uint64_t count; /* elements: of all_gather and the like those of one rank */
    sim_nccl_type_t type;
    sim_nccl_reduction_t reduction;
    bool scaled; /* by this, before the sum */
    sim_nccl_factor_t factor;
    unsigned peer; /* or root */
} sim_nccl_part_t;

/* An operation at work. */
typedef struct sim_nccl_turn {
    const sim_stream_t *stream;
    sim_nccl_comm_t *comm;
} sim_nccl_turn_t;

const char *sim_nccl_kind_name(sim_nccl_kind_t kind);
/* Whether it is still to be done. */
bool sim_nccl_goes_on(const sim_nccl_turn_t *turn);
/* Waits for the other ranks to change something, `seen` being the changes before it was looked at; the lock is free during
 * that. `late` tells that nothing has changed for a while. False where the operation is over; an operation whose
 * communicator has an error waits here until it is aborted, as the real one does. */
bool sim_nccl_turn_wait(const sim_nccl_turn_t *turn, uint32_t seen, bool *late);
/* What the work is stopped by if a rank that must still do something is gone. */
void sim_nccl_miss(const sim_nccl_turn_t *turn, sim_nccl_kind_t kind, unsigned rank);

#endif
