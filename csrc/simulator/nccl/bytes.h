/* Bytes of the device, as an operation reads and writes them. Called on a stream's thread with the simulator's lock held,
 * which is given up while bytes are touched. */
#ifndef TMS_SIM_NCCL_BYTES_H
#define TMS_SIM_NCCL_BYTES_H

#include "simulator/base/state.h"

/* CUDA_ERROR_ILLEGAL_ADDRESS where the stream's device may not touch them. They stop early, with success, where the stream's
 * work is over. `buffer` is no memory of the device. */
CUresult sim_nccl_read(const sim_stream_t *stream, uint64_t address, void *buffer, uint64_t bytes);
CUresult sim_nccl_write(const sim_stream_t *stream, uint64_t address, const void *buffer, uint64_t bytes);

#endif
