/* Operations: collectives, and sends and receives that go on together, as work of a stream. Those that a communicator was
 * given outside captures work in the order in which they came, on whatever streams. Called with the simulator's lock held.
 */
#ifndef TMS_SIM_NCCL_OPERATION_H
#define TMS_SIM_NCCL_OPERATION_H

#include "simulator/base/state.h"
#include "simulator/nccl/communicator.h"
#include "simulator/nccl/turn.h"

/* Puts an operation of these parts into the stream: one collective, or any number of sends and receives. */
CUresult sim_nccl_submit(sim_nccl_comm_t *comm, sim_stream_t *stream, const sim_nccl_part_t *parts, size_t count);

#endif
