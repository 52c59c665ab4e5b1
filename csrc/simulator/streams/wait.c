#include "simulator/streams/wait.h"

#include "simulator/base/state.h"
#include "simulator/work/op.h"

/* Whether a context has incomplete work that was submitted before this ticket. */
static bool is_busy(const sim_context_t *context, uint64_t before_ticket) {
    for (size_t i = 0; i < sim_state.streams.count; i++) {
        const sim_stream_t *stream = sim_state.streams.slots[i].value;
        if (stream->context == context && stream->first && stream->first->ticket < before_ticket) return true;
    }
    return false;
}

CUresult sim_stream_drain(sim_context_t *context) {
    uint64_t before = sim_state.next_ticket + 1;
    CUresult result = CUDA_SUCCESS;
    sim_state_begin_synchronizing();
    while (result == CUDA_SUCCESS && context->error == CUDA_SUCCESS && is_busy(context, before)) {
        if (!sim_state_wait()) result = CUDA_ERROR_DEINITIALIZED;
        if (!context->alive) result = CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
    sim_state_end_synchronizing();
    return result == CUDA_SUCCESS ? context->error : result;
}

static bool overlaps(uint64_t address, uint64_t bytes, uint64_t other, uint64_t other_bytes) {
    return address < other + other_bytes && other < address + bytes;
}

static bool uses_host(const sim_op_t *op, uint64_t address, uint64_t bytes) {
    if (op->kind != SIM_OP_COPY) return false;
    uint64_t read = sim_op_extent(op, op->source_pitch), written = sim_op_extent(op, op->destination_pitch);
    return (!op->source_on_device && overlaps(op->source, read, address, bytes)) ||
           (!op->destination_on_device && overlaps(op->destination, written, address, bytes));
}

static bool host_is_used(uint64_t address, uint64_t bytes) {
    for (size_t i = 0; i < sim_state.streams.count; i++) {
        const sim_stream_t *stream = sim_state.streams.slots[i].value;
        for (const sim_op_t *op = stream->first; op; op = op->next) {
            if (uses_host(op, address, bytes)) return true;
        }
    }
    return false;
}

CUresult sim_stream_wait_for_host(uint64_t address, uint64_t bytes) {
    CUresult result = CUDA_SUCCESS;
    sim_state_begin_synchronizing();
    while (result == CUDA_SUCCESS && host_is_used(address, bytes)) {
        if (!sim_state_wait()) result = CUDA_ERROR_DEINITIALIZED;
    }
    sim_state_end_synchronizing();
    return result;
}
