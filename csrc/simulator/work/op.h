/* Pieces of work: what a queue or a graph holds. Called with the simulator's lock held. */
#ifndef TMS_SIM_WORK_OP_H
#define TMS_SIM_WORK_OP_H

#include "simulator/base/state.h"

/* Work in a queue or in a graph holds references to the objects that it names. */
void sim_op_retain(const sim_op_t *op);
void sim_op_release(const sim_op_t *op);
uint64_t sim_op_rows(const sim_op_t *op);
/* How many bytes lie between the first and the end of the last that work of rows touches. */
uint64_t sim_op_extent(const sim_op_t *op, uint64_t pitch);

#endif
