/* Groups: what a thread calls between ncclGroupStart and ncclGroupEnd is done at the end, together. Outside groups each call
 * is a group of its own. Owns each thread's group. Called with the simulator's lock held. */
#ifndef TMS_SIM_NCCL_GROUP_H
#define TMS_SIM_NCCL_GROUP_H

#include "simulator/nccl/communicator.h"
#include "simulator/nccl/operation.h"

void sim_nccl_group_begin(void);
/* Ends the innermost group. The end of the outermost one waits for the communicators that it makes, where they are blocking,
 * and submits the operations. */
sim_nccl_result_t sim_nccl_group_finish(void);
/* Adds a communicator that is being made: the program's handle, which is NULL afterwards if nothing comes of it. */
sim_nccl_result_t sim_nccl_group_setup(sim_nccl_handle_t *handle);
sim_nccl_result_t sim_nccl_group_add(sim_nccl_comm_t *comm, CUstream stream, const sim_nccl_part_t *part);
/* A call has failed: in a group its end fails as well. Returns the result. */
sim_nccl_result_t sim_nccl_group_failed(sim_nccl_result_t result);

#endif
