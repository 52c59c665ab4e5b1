/* Waiting for work of many streams. Called with the simulator's lock held, which is released during the wait.
 * CUDA_ERROR_DEINITIALIZED once everything stops. */
#ifndef TMS_SIM_STREAMS_WAIT_H
#define TMS_SIM_STREAMS_WAIT_H

#include "simulator/base/state.h"

/* Waits for all work submitted to a context so far; the context's error, where it has or gets one. */
CUresult sim_stream_drain(sim_context_t *context);
/* Waits until no queued work uses the host memory. */
CUresult sim_stream_wait_for_host(uint64_t address, uint64_t bytes);

#endif
