/* Sends and receives, executed by one rank. Called on a stream's thread with the simulator's lock held; it is released
 * while bytes are touched and during waits for other ranks. */
#ifndef TMS_SIM_NCCL_TRANSFER_H
#define TMS_SIM_NCCL_TRANSFER_H

#include "simulator/nccl/turn.h"

/* A returned error becomes the context's sticky error. A cancelled transfer returns CUDA_SUCCESS. */
CUresult sim_nccl_transfer_work(const sim_nccl_turn_t *turn, const sim_nccl_part_t *parts, size_t count);

#endif
