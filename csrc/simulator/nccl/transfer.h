/* Sends and receives, done in the turn of a rank. Called on a stream's thread with the simulator's lock held, which is given
 * up while bytes are touched and ranks are waited for. */
#ifndef TMS_SIM_NCCL_TRANSFER_H
#define TMS_SIM_NCCL_TRANSFER_H

#include "simulator/nccl/turn.h"

/* An error is what becomes of the stream's context. A turn that has ended early is a success. */
CUresult sim_nccl_transfer_work(const sim_nccl_turn_t *turn, const sim_nccl_part_t *parts, size_t count);

#endif
