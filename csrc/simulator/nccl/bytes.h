/* Access to device memory for operations. Called on a stream's thread with the simulator's lock held; it is released
 * while bytes are touched. */
#ifndef TMS_SIM_NCCL_BYTES_H
#define TMS_SIM_NCCL_BYTES_H

#include "simulator/base/state.h"

/* CUDA_ERROR_ILLEGAL_ADDRESS if the stream's device may not access the range. Both stop early, with CUDA_SUCCESS, if the
 * stream's work is cancelled. `buffer` is not device memory. */
CUresult sim_nccl_read(const sim_stream_t *stream, uint64_t address, void *buffer, uint64_t bytes);
CUresult sim_nccl_write(const sim_stream_t *stream, uint64_t address, const void *buffer, uint64_t bytes);

#endif
