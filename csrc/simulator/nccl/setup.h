/* Setup of communicators: their ranks find each other. Every query of a communicator advances its setup; no step waits.
 * Called with the simulator's lock held. */
#ifndef TMS_SIM_NCCL_SETUP_H
#define TMS_SIM_NCCL_SETUP_H

#include "simulator/nccl/communicator.h"

/* Advances the setup as far as possible. It ends in SIM_NCCL_READY or SIM_NCCL_BROKEN. */
void sim_nccl_setup_step(sim_nccl_comm_t *comm);
/* Advances the setup of a communicator's derived one. True while the derived one needs its parent. */
bool sim_nccl_setup_child(const sim_nccl_comm_t *comm);
/* Joins the exchange at comm->location as this rank. On failure only the object remains. */
sim_nccl_result_t sim_nccl_setup_join(sim_nccl_comm_t *comm, unsigned rank, unsigned ranks);

#endif
