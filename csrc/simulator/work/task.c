#include "simulator/work/task.h"

void sim_task_retain(sim_task_t *task) {
    if (task) task->references++;
}

void sim_task_release(sim_task_t *task) {
    if (task && --task->references == 0) task->destroy(task);
}
