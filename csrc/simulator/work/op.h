/* Work items of queues and graphs. Called with the simulator's lock held. */
#ifndef TMS_SIM_WORK_OP_H
#define TMS_SIM_WORK_OP_H

#include "simulator/base/state.h"

/* A work item in a queue or a graph holds references to its objects. */
void sim_op_retain(const sim_op_t *op);
void sim_op_release(const sim_op_t *op);
uint64_t sim_op_rows(const sim_op_t *op);
/* The distance in bytes from the start of the first row to the end of the last. */
uint64_t sim_op_extent(const sim_op_t *op, uint64_t pitch);

#endif
