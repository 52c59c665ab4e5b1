/* Operations: a collective, or sends and receives that progress together, as a stream task. Outside captures the
 * operations of a communicator run in submission order, on whatever streams. Called with the simulator's lock held. */
#ifndef TMS_SIM_NCCL_OPERATION_H
#define TMS_SIM_NCCL_OPERATION_H

#include "simulator/base/state.h"
#include "simulator/nccl/communicator.h"
#include "simulator/nccl/turn.h"

/* Submits an operation to the stream: one collective, or any number of sends and receives. */
CUresult sim_nccl_submit(sim_nccl_comm_t *comm, sim_stream_t *stream, const sim_nccl_part_t *parts, size_t count);

#endif
