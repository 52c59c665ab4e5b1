/* Tasks: work of which a stream, or a graph, knows only how to do it. The folders above make them (collectives, operators).
 * Called with the simulator's lock held.
 *
 * A task is the first member of what its maker knows of it. A node of a graph does the same task at every launch, so `work`
 * leaves it as it was. */
#ifndef TMS_SIM_WORK_TASK_H
#define TMS_SIM_WORK_TASK_H

#include "simulator/base/state.h"

struct sim_task {
    unsigned references; /* the maker's and those of queued work and graphs */
    /* On the stream's thread, at the task's turn. It may give the lock up, and takes it again before it returns; it stops
     * early where sim_state_goes_on says so. A failure becomes the context's sticky error. */
    CUresult (*work)(sim_stream_t *stream, sim_task_t *task);
    void (*destroy)(sim_task_t *task); /* the last reference has gone */
};

/* NULL is allowed in both. */
void sim_task_retain(sim_task_t *task);
void sim_task_release(sim_task_t *task);

#endif
