/* Copies and fills of rows. Called with the simulator's lock held; waits release it. */
#ifndef TMS_SIM_STREAMS_COPY_H
#define TMS_SIM_STREAMS_COPY_H

#include "simulator/base/simulation.h"

/* Validates and issues a copy or fill. `now` uses the legacy stream and waits for completion. */
CUresult sim_copy_issue(const sim_op_t *op, CUstream stream, bool now);

#endif
