/* Streams: a queue of work each, served in order by a thread of its own. Owns sim_state.streams, the queues and the
 * threads. Called with the simulator's lock held; what waits releases it. */
#ifndef TMS_SIM_STREAMS_STREAM_H
#define TMS_SIM_STREAMS_STREAM_H

#include "simulator/base/state.h"

/* NULL for a handle that names none; CU_STREAM_LEGACY and NULL are the current context's legacy stream. */
sim_stream_t *sim_stream_find(CUstream handle);
/* Puts a copy of the work at the end of the stream's queue, or into the graph that it captures, and tells where it stands:
 * `position` (may be NULL) is 0 in a capture. */
CUresult sim_stream_submit(sim_stream_t *stream, const sim_op_t *op, uint64_t *position);
bool sim_stream_reached(uint64_t stream, uint64_t position);
CUresult sim_stream_wait(sim_stream_t *stream, uint64_t position);
void sim_stream_close_all(sim_context_t *context); /* of a context that is being destroyed */
void sim_stream_clear(void);                       /* every thread ends and is joined */

#endif
