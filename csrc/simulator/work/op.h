/* Work items of queues and graphs, and tasks, which are work items that higher folders define (collectives, operators).
 * Called with the simulator's lock held. */
#ifndef TMS_SIM_WORK_OP_H
#define TMS_SIM_WORK_OP_H

#include "simulator/base/simulation.h"

/* A task is the first member of its creator's structure. A graph node runs the same task at every launch, so `work` must not
 * change it. */
struct sim_task {
    unsigned references; /* held by the creator, queued work and graphs */
    const char *name;    /* for messages; NULL: none. Lives as long as the task */
    /* Runs on the stream's thread. May release the lock, but returns with it held. Returns early when
     * sim_state_may_continue is false. An error becomes the context's sticky error. */
    CUresult (*work)(sim_stream_t *stream, sim_task_t *task);
    void (*destroy)(sim_task_t *task); /* called for the last reference */
};

/* Both accept NULL. */
void sim_task_retain(sim_task_t *task);
void sim_task_release(sim_task_t *task);

/* A work item in a queue or a graph holds references to its objects. */
void sim_op_retain(const sim_op_t *op);
void sim_op_release(const sim_op_t *op);
uint64_t sim_op_rows(const sim_op_t *op);
/* The distance in bytes from the start of the first row to the end of the last. */
uint64_t sim_op_extent(const sim_op_t *op, uint64_t pitch);

#endif
