/* Operators as work of a stream: a request that the device process understands, with the device memory that it touches.
 * Called with the simulator's lock held. */
#ifndef TMS_SIM_OPERATORS_OPERATOR_H
#define TMS_SIM_OPERATORS_OPERATOR_H

#include "simulator/base/state.h"
#include "simulator/simulator.h"

/* A task with one reference, which the caller releases; NULL without memory. `answered`: its reply is kept. */
sim_task_t *sim_operator_new(const tms_sim_operator_t *what, bool answered);
/* The reply of one that was answered and is done; *bytes is its length. The task's own; NULL if there is none. */
const char *sim_operator_reply(const sim_task_t *task, size_t *bytes);

#endif
