/* A rank's execution of an operation: the requested parts, cancellation, and waits for other ranks. Called on a stream's
 * thread with the simulator's lock held; waits release it. Owns nothing. */
#ifndef TMS_SIM_NCCL_TURN_H
#define TMS_SIM_NCCL_TURN_H

#include "simulator/base/simulation.h"
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

/* The arguments of one NCCL call. */
typedef struct sim_nccl_part {
    sim_nccl_kind_t kind;
    uint64_t source, destination;
    uint64_t count; /* elements; for all-gather and similar ones, of one rank */
    sim_nccl_type_t type;
    sim_nccl_reduction_t reduction;
    bool scaled; /* inputs are multiplied by `factor` before the sum */
    sim_nccl_factor_t factor;
    unsigned peer; /* or the root */
} sim_nccl_part_t;

/* A running operation. */
typedef struct sim_nccl_turn {
    const sim_stream_t *stream;
    sim_nccl_comm_t *comm;
} sim_nccl_turn_t;

const char *sim_nccl_kind_name(sim_nccl_kind_t kind);
/* Whether the operation may continue: neither aborted nor cancelled. */
bool sim_nccl_may_continue(const sim_nccl_turn_t *turn);
/* Waits for a change by another rank after `seen`; the lock is released during the wait. *late reports a timeout without a
 * change. False if the operation has ended. If the communicator has an error, the operation waits here until it is aborted,
 * as in the real NCCL. */
bool sim_nccl_turn_wait(const sim_nccl_turn_t *turn, uint32_t seen, bool *late);
/* Reports a rank that has left although its part is missing. */
void sim_nccl_report_missing(const sim_nccl_turn_t *turn, sim_nccl_kind_t kind, unsigned rank);

/* CUDA_ERROR_ILLEGAL_ADDRESS if the stream's device may not access the range. Both stop early, with CUDA_SUCCESS, if the
 * stream's work is cancelled. `buffer` is not device memory. */
CUresult sim_nccl_read(const sim_stream_t *stream, uint64_t address, void *buffer, uint64_t bytes);
CUresult sim_nccl_write(const sim_stream_t *stream, uint64_t address, const void *buffer, uint64_t bytes);

#endif
