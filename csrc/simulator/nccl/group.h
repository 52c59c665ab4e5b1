/* Groups: calls between ncclGroupStart and ncclGroupEnd are executed together at the end. A call outside a group is a
 * group of its own. Owns each thread's group. Called with the simulator's lock held; waits release it. */
#ifndef TMS_SIM_NCCL_GROUP_H
#define TMS_SIM_NCCL_GROUP_H

#include "simulator/nccl/communicator.h"
#include "simulator/nccl/operation.h"

void sim_nccl_group_begin(void);
/* Ends the innermost group. The end of the outermost one waits for new communicators that are blocking, and submits the
 * operations. */
sim_nccl_result_t sim_nccl_group_finish(void);
/* Adds a communicator in setup. `handle` is the program's variable; it becomes NULL if the setup fails. */
sim_nccl_result_t sim_nccl_group_setup(sim_nccl_handle_t *handle);
sim_nccl_result_t sim_nccl_group_add(sim_nccl_comm_t *comm, CUstream stream, const sim_nccl_part_t *part);
/* Records a failed call: the end of the group then fails, too. Returns the result. */
sim_nccl_result_t sim_nccl_group_failed(sim_nccl_result_t result);

#endif
