/* Making communicators: their ranks find each other. A communicator that is being made takes a step whenever it is asked;
 * no step waits. Called with the simulator's lock held. */
#ifndef TMS_SIM_NCCL_SETUP_H
#define TMS_SIM_NCCL_SETUP_H

#include "simulator/nccl/communicator.h"

/* Takes the steps that can be taken now. Its stage is SIM_NCCL_READY or SIM_NCCL_BROKEN at the end. */
void sim_nccl_setup_step(sim_nccl_comm_t *comm);
/* The same for what is being made of a communicator. Whether that still needs the communicator. */
bool sim_nccl_setup_child(const sim_nccl_comm_t *comm);
/* Takes the seat of a rank of a communicator whose place is known; on failure nothing is left but the object. */
sim_nccl_result_t sim_nccl_setup_join(sim_nccl_comm_t *comm, unsigned rank, unsigned ranks);

#endif
