/* What a worker does with a piece of work, on its own thread, with the simulator's lock held. */
#ifndef TMS_SIM_STREAMS_WORKER_H
#define TMS_SIM_STREAMS_WORKER_H

#include "simulator/base/state.h"

/* Does a piece of work; the lock is free while bytes are touched and while a function of the program runs. An error is what
 * becomes of the stream's context. */
CUresult sim_stream_work(sim_stream_t *stream, sim_op_t *op);
/* Whether a copy or fill finds its memory mapped and accessible now; without a context, whether it finds it mapped. */
bool sim_work_reachable(const sim_context_t *context, const sim_op_t *op);

#endif
