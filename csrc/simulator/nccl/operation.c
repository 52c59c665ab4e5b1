#include "simulator/nccl/operation.h"

#include <stdlib.h>
#include <string.h>

#include "simulator/devices/context.h"
#include "simulator/nccl/collective.h"
#include "simulator/nccl/error.h"
#include "simulator/nccl/exchange.h"
#include "simulator/nccl/numbers.h"
#include "simulator/nccl/transfer.h"
#include "simulator/runtime/entries.h"
#include "simulator/streams/stream.h"
#include "simulator/work/op.h"

enum { COPY_DEFAULT = 4 }; /* cudaMemcpyDefault */

struct sim_nccl_operation {
    sim_task_t task;
    sim_nccl_comm_t *comm;
    sim_nccl_operation_t *next; /* next in the communicator's order */
    bool queued;
    size_t count; /* one collective, or any number of sends and receives */
    sim_nccl_part_t parts[];
};

static void enqueue(sim_nccl_operation_t *operation) {
    sim_nccl_comm_t *comm = operation->comm;
    operation->queued = true;
    if (comm->last)
        comm->last->next = operation;
    else
        comm->first = operation;
    comm->last = operation;
}

static void dequeue(sim_nccl_operation_t *operation) {
    sim_nccl_comm_t *comm = operation->comm;
    sim_nccl_operation_t *previous = NULL;
    if (!operation->queued) return;
    for (sim_nccl_operation_t *at = comm->first; at != operation; at = at->next) previous = at;
    if (previous)
        previous->next = operation->next;
    else
        comm->first = operation->next;
    if (comm->last == operation) comm->last = previous;
    operation->queued = false;
    sim_state_changed();
}

static CUresult run_parts(const sim_nccl_turn_t *turn, const sim_nccl_operation_t *operation) {
    const sim_nccl_part_t *first = &operation->parts[0];
    if (first->kind == SIM_NCCL_SEND || first->kind == SIM_NCCL_RECEIVE)
        return sim_nccl_transfer_work(turn, operation->parts, operation->count);
    return sim_nccl_collective_work(turn, first);
}

/* Reports a failed operation to the other ranks, which would otherwise wait forever. */
static void report_failure(const sim_nccl_turn_t *turn, const sim_nccl_operation_t *operation, CUresult result) {
    const sim_nccl_exchange_t *exchange = &turn->comm->exchange;
    const char *name = sim_nccl_kind_name(operation->parts[0].kind);
    if (turn->comm->aborted || sim_state.stopping) return;
    if (result == CUDA_SUCCESS && sim_state_may_continue(turn->stream)) return;
    atomic_store(&sim_nccl_seat(exchange, exchange->rank)->presence, SIM_NCCL_FAILED);
    sim_nccl_announce(exchange);
    sim_nccl_comm_fail(turn->comm, SIM_NCCL_UNHANDLED_CUDA,
                       "%s: the work of rank %u on device %d failed: %s; abort the communicator with ncclCommAbort", name,
                       exchange->rank, turn->comm->device,
                       result == CUDA_ERROR_ILLEGAL_ADDRESS ? "memory that it touches is not mapped (paused, or freed)"
                                                            : "its context has an error, or was destroyed");
}

static CUresult work(sim_stream_t *stream, sim_task_t *task) {
    sim_nccl_operation_t *operation = (sim_nccl_operation_t *)task;
    sim_nccl_comm_t *comm = operation->comm;
    const sim_nccl_turn_t turn = {.stream = stream, .comm = comm};
    CUresult result = CUDA_SUCCESS;
    if (comm->destroyed && sim_state_may_continue(stream) && !operation->queued) return CUDA_ERROR_LAUNCH_FAILED;
    while (sim_nccl_may_continue(&turn) &&
           (comm->busy || comm->error != SIM_NCCL_SUCCESS || (operation->queued && comm->first != operation)))
        pthread_cond_wait(&sim_state.changed, &sim_state.lock);
    if (sim_nccl_may_continue(&turn)) {
        comm->busy = true;
        result = run_parts(&turn, operation);
        comm->busy = false;
        report_failure(&turn, operation, result);
        sim_state_changed();
    }
    dequeue(operation);
    return result;
}

static void destroy(sim_task_t *task) {
    sim_nccl_operation_t *operation = (sim_nccl_operation_t *)task;
    dequeue(operation);
    sim_nccl_comm_release(operation->comm);
    free(operation);
}

CUresult sim_nccl_submit(sim_nccl_comm_t *comm, sim_stream_t *stream, const sim_nccl_part_t *parts, size_t count) {
    sim_nccl_operation_t *operation = calloc(1, sizeof *operation + count * sizeof *parts);
    if (!operation) return CUDA_ERROR_OUT_OF_MEMORY;
    operation->task = (sim_task_t){.references = 1, .work = work, .destroy = destroy};
    operation->comm = comm;
    operation->count = count;
    memcpy(operation->parts, parts, count * sizeof *parts);
    sim_nccl_comm_retain(comm);
    const sim_op_t op = {.kind = SIM_OP_TASK, .task = &operation->task};
    if (!stream->capture) enqueue(operation);
    CUresult result = sim_stream_submit(stream, &op, NULL);
    sim_task_release(&operation->task);
    return result;
}

/* ---- streams of the communicator's device ---- */

/* Makes the communicator's device current for this thread. leave_device undoes it. */
static CUresult enter_device(const sim_nccl_comm_t *comm) {
    sim_thread_t *thread = sim_state_thread();
    CUresult result = sim_context_retain_for_runtime(comm->device);
    if (result != CUDA_SUCCESS) return result;
    if (thread->depth == SIM_CONTEXT_DEPTH) return CUDA_ERROR_INVALID_CONTEXT;
    thread->contexts[thread->depth++] = sim_state.devices[comm->device].primary.id;
    return CUDA_SUCCESS;
}

static void leave_device(void) { sim_state_thread()->depth--; }

sim_nccl_result_t sim_nccl_stream(const sim_nccl_comm_t *comm, CUstream handle, sim_stream_t **stream) {
    CUresult result = enter_device(comm);
    if (result != CUDA_SUCCESS) return sim_nccl_cuda_failed(result);
    *stream = sim_stream_find(handle);
    leave_device();
    if (*stream && (*stream)->context->device == comm->device) return SIM_NCCL_SUCCESS;
    return sim_nccl_fail(SIM_NCCL_UNHANDLED_CUDA, "stream %p is not a stream of device %d, which the communicator uses",
                         (void *)handle, comm->device);
}

sim_nccl_result_t sim_nccl_copy(const sim_nccl_comm_t *comm, CUstream handle, const sim_nccl_part_t *part) {
    sim_stream_t *stream = NULL;
    int device = comm->device;
    size_t bytes = part->count * sim_nccl_type_bytes(part->type);
    sim_nccl_result_t found = sim_nccl_stream(comm, handle, &stream);
    if (found != SIM_NCCL_SUCCESS || part->destination == part->source) return found;
    CUresult result = enter_device(comm);
    if (result != CUDA_SUCCESS) return sim_nccl_cuda_failed(result);
    result = sim_runtime_copy_async((void *)(uintptr_t)part->destination, (const void *)(uintptr_t)part->source, bytes,
                                    COPY_DEFAULT, handle);
    leave_device();
    if (result == CUDA_ERROR_INVALID_VALUE)
        return sim_nccl_fail(
            SIM_NCCL_UNHANDLED_CUDA,
            "a buffer is NULL, or not all of its %zu bytes are accessible to device %d; resume paused memory", bytes,
            device);
    return result == CUDA_SUCCESS ? SIM_NCCL_SUCCESS : sim_nccl_cuda_failed(result);
}
