/* The tms_sim_* functions that send PyTorch's operators to the device process. In a forked child they fail. */
#include <stdlib.h>
#include <string.h>

#include "simulator/base/simulation.h"
#include "simulator/control/life.h"
#include "simulator/devices/context.h"
#include "simulator/operators/channel.h"
#include "simulator/operators/operator.h"
#include "simulator/simulator.h"
#include "simulator/streams/stream.h"
#include "simulator/work/capture.h"
#include "simulator/work/op.h"

/* Must not initialise the state: a program may attach before it forks, and its children must start uninitialised. */
void tms_sim_attach_device_process(int socket) { sim_channel_attach(socket); }

static CUresult find_stream(const tms_sim_operator_t *description, sim_stream_t **stream) {
    if (sim_state.deinitialized) return CUDA_ERROR_DEINITIALIZED;
    if (!sim_state.initialized || !sim_channel_attached()) return CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = sim_context_attach_runtime();
    if (result != CUDA_SUCCESS) return result;
    *stream = sim_stream_find((CUstream)description->stream);
    return *stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult submit(const tms_sim_operator_t *description, sim_stream_t *stream, sim_task_t *task, uint64_t *position) {
    const sim_op_t op = {.kind = SIM_OP_TASK, .task = task, .gate = description->gate};
    return sim_stream_submit(stream, &op, position);
}

static CUresult enqueue(const tms_sim_operator_t *description) {
    sim_stream_t *stream = NULL;
    CUresult result = find_stream(description, &stream);
    sim_task_t *task = result == CUDA_SUCCESS ? sim_operator_new(description, false) : NULL;
    if (result == CUDA_SUCCESS) result = task ? submit(description, stream, task, NULL) : CUDA_ERROR_OUT_OF_MEMORY;
    sim_task_release(task);
    return result;
}

int tms_sim_run_operator(const tms_sim_operator_t *description) {
    if (!sim_life_enter()) return CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = enqueue(description);
    sim_life_leave();
    return (int)result;
}

void tms_sim_begin_draw(void) {
    sim_thread_t *thread = sim_state_thread();
    thread->draws = true;
    thread->drawn = false;
}

int tms_sim_end_draw(tms_sim_draw_t *draw) {
    sim_thread_t *thread = sim_state_thread();
    thread->draws = false;
    if (!thread->drawn) return 1;
    *draw = thread->draw;
    return 0;
}

static CUresult copy_answer(const sim_task_t *task, tms_sim_answer_t *answer) {
    const char *text = sim_operator_reply(task, &answer->bytes);
    if (!text) return CUDA_ERROR_LAUNCH_FAILED;
    answer->text = malloc(answer->bytes + 1);
    if (!answer->text) return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(answer->text, text, answer->bytes + 1);
    return CUDA_SUCCESS;
}

/* Waiting for a capturing stream invalidates its capture, as in every other call. */
static CUresult ask(const tms_sim_operator_t *description, tms_sim_answer_t *answer) {
    sim_stream_t *stream = NULL;
    uint64_t position = 0;
    CUresult result = find_stream(description, &stream);
    if (result == CUDA_SUCCESS) result = sim_capture_check_stream(stream);
    sim_task_t *task = result == CUDA_SUCCESS ? sim_operator_new(description, true) : NULL;
    if (result == CUDA_SUCCESS) result = task ? submit(description, stream, task, &position) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS) result = sim_stream_wait(stream, position);
    if (result == CUDA_SUCCESS) result = copy_answer(task, answer);
    sim_task_release(task);
    return result;
}

int tms_sim_ask_operator(const tms_sim_operator_t *description, tms_sim_answer_t *answer) {
    *answer = (tms_sim_answer_t){0};
    if (!sim_life_enter()) return CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = ask(description, answer);
    sim_life_leave();
    return (int)result;
}

void tms_sim_free_answer(tms_sim_answer_t *answer) {
    free(answer->text);
    *answer = (tms_sim_answer_t){0};
}
