#include "simulator/work/op.h"

#include "simulator/base/simulation.h"
#include "simulator/work/event.h"

void sim_task_retain(sim_task_t *task) {
    if (task) task->references++;
}

void sim_task_release(sim_task_t *task) {
    if (task && --task->references == 0) task->destroy(task);
}

void sim_op_retain(const sim_op_t *op) {
    sim_task_retain(op->task);
    if (op->event) op->event->references++;
}

void sim_op_release(const sim_op_t *op) {
    sim_task_release(op->task);
    if (op->event) sim_event_release(op->event);
}

uint64_t sim_op_rows(const sim_op_t *op) { return op->rows ? op->rows : 1; }

uint64_t sim_op_extent(const sim_op_t *op, uint64_t pitch) { return (sim_op_rows(op) - 1) * pitch + op->bytes; }
