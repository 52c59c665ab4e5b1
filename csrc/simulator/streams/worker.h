/* Execution of a work item on the worker's thread, with the simulator's lock held. */
#ifndef TMS_SIM_STREAMS_WORKER_H
#define TMS_SIM_STREAMS_WORKER_H

#include "simulator/base/simulation.h"

/* Executes a work item. Releases the lock while bytes are touched and while a function of the program runs. A returned
 * error becomes the context's sticky error. */
CUresult sim_stream_work(sim_stream_t *stream, sim_op_t *op);
/* Whether all memory of a copy or fill is mapped and accessible now. Without a context, whether it is mapped. */
bool sim_work_reachable(const sim_context_t *context, const sim_op_t *op);

#endif
