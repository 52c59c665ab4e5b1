/* Operators as stream tasks: a request for the device process, and the device memory that it accesses. Called with the
 * simulator's lock held. */
#ifndef TMS_SIM_OPERATORS_OPERATOR_H
#define TMS_SIM_OPERATORS_OPERATOR_H

#include "simulator/base/simulation.h"
#include "simulator/simulator.h"

/* Creates a task with one reference, which the caller releases. NULL if out of memory. With `answered` the task stores
 * its reply. */
sim_task_t *sim_operator_new(const tms_sim_operator_t *description, bool answered);
/* The stored reply of a completed task, and its length. The task owns it. NULL if there is none. */
const char *sim_operator_reply(const sim_task_t *task, size_t *bytes);

#endif
