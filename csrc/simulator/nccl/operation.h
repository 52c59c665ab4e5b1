/* Operations: a collective, or sends and receives that progress together, as a stream task. Outside captures the
 * operations of a communicator run in submission order, on whatever streams. A collective of one rank is a copy. Called with
 * the simulator's lock held; a copy of pageable host memory releases it. */
#ifndef TMS_SIM_NCCL_OPERATION_H
#define TMS_SIM_NCCL_OPERATION_H

#include "simulator/base/simulation.h"
#include "simulator/nccl/communicator.h"
#include "simulator/nccl/turn.h"

/* Resolves a stream; default streams are those of the communicator's device. */
sim_nccl_result_t sim_nccl_stream(const sim_nccl_comm_t *comm, CUstream handle, sim_stream_t **stream);
/* Issues a collective of a communicator of one rank: a cudaMemcpyAsync, as in the real NCCL. */
sim_nccl_result_t sim_nccl_copy(const sim_nccl_comm_t *comm, CUstream stream, const sim_nccl_part_t *part);
/* Submits an operation to the stream: one collective, or any number of sends and receives. */
CUresult sim_nccl_submit(sim_nccl_comm_t *comm, sim_stream_t *stream, const sim_nccl_part_t *parts, size_t count);

#endif
