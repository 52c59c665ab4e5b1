/* Copies and fills of rows. Called with the simulator's lock held, which is given up while one is waited for. */
#ifndef TMS_SIM_STREAMS_COPY_H
#define TMS_SIM_STREAMS_COPY_H

#include "simulator/base/state.h"

/* Checks and issues one; `now`: through the legacy stream, and waited for. */
CUresult sim_copy_issue(const sim_op_t *op, CUstream stream, bool now);

#endif
