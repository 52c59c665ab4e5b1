/* Waiting for work of several streams. Called with the simulator's lock held; waits release it. CUDA_ERROR_DEINITIALIZED
 * at shutdown. */
#ifndef TMS_SIM_STREAMS_WAIT_H
#define TMS_SIM_STREAMS_WAIT_H

#include "simulator/base/state.h"

/* Waits for all work submitted to a context so far. Returns the context's error if there is one, also if it occurs during
 * the wait. */
CUresult sim_stream_drain(sim_context_t *context);
/* Waits until no queued work uses the host memory. */
CUresult sim_stream_wait_for_host(uint64_t address, uint64_t bytes);

#endif
