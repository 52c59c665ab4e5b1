/* Streams: each has a work queue and a worker thread that executes it in order. Owns sim_state.streams, the queues and
 * the threads. Called with the simulator's lock held; waits release it. */
#ifndef TMS_SIM_STREAMS_STREAM_H
#define TMS_SIM_STREAMS_STREAM_H

#include "simulator/base/simulation.h"

/* Returns the stream of a handle, or NULL. The handles CU_STREAM_LEGACY and NULL denote the current context's legacy
 * stream. */
sim_stream_t *sim_stream_find(CUstream handle);
/* Appends a copy of the work item to the stream's queue, or to the graph that it captures. *position (optional) is its
 * place in the queue, 0 in a capture. */
CUresult sim_stream_submit(sim_stream_t *stream, const sim_op_t *op, uint64_t *position);
bool sim_stream_reached(uint64_t stream, uint64_t position);
CUresult sim_stream_wait(sim_stream_t *stream, uint64_t position);
void sim_stream_close_all(sim_context_t *context); /* closes all streams of a context that is being destroyed */
void sim_stream_clear(void);                       /* stops and joins every worker */

/* Waits for all work submitted to a context so far. Returns the context's error if there is one, even if it occurs during
 * the wait. */
CUresult sim_stream_drain(sim_context_t *context);
/* Waits until no queued work uses the host memory. */
CUresult sim_stream_wait_for_host(uint64_t address, uint64_t bytes);

#endif
