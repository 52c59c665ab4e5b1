#include "simulator/nccl/group.h"

#include <stdlib.h>

#include "simulator/nccl/entries.h"
#include "simulator/nccl/error.h"
#include "simulator/nccl/setup.h"
#include "simulator/streams/stream.h"

/* A communicator in setup. */
typedef struct pending {
    sim_nccl_handle_t *program, handle;
} pending_t;

/* A requested operation. Its stream is resolved at the end of the group. */
typedef struct request {
    uint64_t comm;
    CUstream stream;
    sim_nccl_part_t part;
    bool done;
} request_t;

typedef struct group {
    unsigned depth;
    sim_nccl_result_t error;
    pending_t *pending;
    request_t *requests;
    size_t pending_count, request_count;
} group_t;

static _Thread_local group_t group;

/* ---- communicators ---- */

/* Advances every setup. Returns whether the group must wait. Blocking communicators wait, and so do ranks of a split that
 * get no communicator, because all ranks take part in it. */
static bool step_all(const pending_t *pending, size_t count) {
    bool must_wait = false;
    for (size_t i = 0; i < count; i++) {
        sim_nccl_comm_t *comm = sim_nccl_find(pending[i].handle);
        if (!comm) continue; /* another thread has aborted it */
        sim_nccl_setup_step(comm);
        if (comm->stage < SIM_NCCL_READY && (comm->blocking || comm->split.color == SIM_NCCL_NO_COLOR)) must_wait = true;
    }
    return must_wait;
}

static sim_nccl_result_t finish_pending(const pending_t *pending) {
    sim_nccl_comm_t *comm = sim_nccl_find(pending->handle);
    sim_nccl_result_t result = SIM_NCCL_SUCCESS;
    if (!comm) return sim_nccl_fail(SIM_NCCL_INVALID_USAGE, "the communicator was aborted during its setup");
    if (comm->stage < SIM_NCCL_READY)
        return comm->blocking ? sim_nccl_fail(SIM_NCCL_UNHANDLED_CUDA, "the simulated GPU has shut down")
                              : SIM_NCCL_IN_PROGRESS;
    if (comm->stage == SIM_NCCL_BROKEN) {
        result = comm->error;
        sim_nccl_set_error(comm->text);
    }
    if (result != SIM_NCCL_SUCCESS || comm->split.color == SIM_NCCL_NO_COLOR) {
        *pending->program = NULL;
        sim_nccl_comm_drop(comm, SIM_NCCL_ABORTED);
    }
    return result;
}

static sim_nccl_result_t finish_all_pending(const pending_t *pending, size_t count) {
    sim_nccl_result_t result = SIM_NCCL_SUCCESS;
    while (step_all(pending, count) && sim_state_wait_briefly()) {
    }
    for (size_t i = 0; i < count; i++) {
        sim_nccl_result_t one = finish_pending(&pending[i]);
        if (result == SIM_NCCL_SUCCESS || (result == SIM_NCCL_IN_PROGRESS && one != SIM_NCCL_SUCCESS)) result = one;
    }
    return result;
}

/* Aborts the setups of a failed group, because some ranks will not join. */
static void abort_pending(void) {
    for (size_t i = 0; i < group.pending_count; i++) {
        sim_nccl_comm_t *comm = sim_nccl_find(group.pending[i].handle);
        *group.pending[i].program = NULL;
        if (comm) sim_nccl_comm_drop(comm, SIM_NCCL_ABORTED);
    }
}

sim_nccl_result_t sim_nccl_group_setup(sim_nccl_handle_t *handle) {
    const pending_t one = {.program = handle, .handle = *handle};
    if (!group.depth) return finish_all_pending(&one, 1);
    pending_t *grown = realloc(group.pending, (group.pending_count + 1) * sizeof *grown);
    if (!grown) return sim_nccl_group_failed(sim_nccl_fail(SIM_NCCL_SYSTEM, "no memory"));
    grown[group.pending_count++] = one;
    group.pending = grown;
    return SIM_NCCL_SUCCESS;
}

/* ---- operations ---- */

static sim_nccl_result_t submit(sim_nccl_comm_t *comm, sim_stream_t *stream, const sim_nccl_part_t *parts, size_t count) {
    CUresult result = sim_nccl_submit(comm, stream, parts, count);
    return result == CUDA_SUCCESS ? SIM_NCCL_SUCCESS : sim_nccl_cuda_failed(result);
}

/* Makes one stream wait for all work that another has queued so far. */
static CUresult order(sim_stream_t *later, const sim_stream_t *earlier) {
    const sim_op_t wait = {.kind = SIM_OP_WAIT, .stream = earlier->id, .position = earlier->submitted};
    return sim_stream_submit(later, &wait, NULL);
}

static bool is_transfer(const request_t *request) {
    return request->part.kind == SIM_NCCL_SEND || request->part.kind == SIM_NCCL_RECEIVE;
}

/* A group's sends and receives of one communicator are one operation in the stream of the first of them. This stream waits
 * for the other streams before the operation. With `afterwards`, the other streams wait for this stream. */
static sim_nccl_result_t order_streams(const sim_nccl_comm_t *comm, size_t first, sim_stream_t *stream, bool afterwards) {
    for (size_t i = first; i < group.request_count; i++) {
        sim_stream_t *other = NULL;
        if (group.requests[i].comm != comm->id || !is_transfer(&group.requests[i])) continue;
        sim_nccl_result_t result = sim_nccl_stream(comm, group.requests[i].stream, &other);
        if (result != SIM_NCCL_SUCCESS) return result;
        if (other == stream) continue;
        if (other->capture || stream->capture)
            return sim_nccl_fail(SIM_NCCL_INVALID_USAGE,
                                 "sends and receives of a group are captured on several streams; use one stream");
        CUresult ordered = afterwards ? order(other, stream) : order(stream, other);
        if (ordered != CUDA_SUCCESS) return sim_nccl_cuda_failed(ordered);
    }
    return SIM_NCCL_SUCCESS;
}

static sim_nccl_result_t submit_transfers(sim_nccl_comm_t *comm, size_t first) {
    sim_stream_t *stream = NULL;
    size_t count = 0;
    sim_nccl_part_t *parts = malloc((group.request_count - first) * sizeof *parts);
    if (!parts) return sim_nccl_fail(SIM_NCCL_SYSTEM, "no memory");
    sim_nccl_result_t result = sim_nccl_stream(comm, group.requests[first].stream, &stream);
    if (result == SIM_NCCL_SUCCESS) result = order_streams(comm, first, stream, false);
    for (size_t i = first; i < group.request_count; i++) {
        if (group.requests[i].comm != comm->id || !is_transfer(&group.requests[i])) continue;
        parts[count++] = group.requests[i].part;
        group.requests[i].done = true;
    }
    if (result == SIM_NCCL_SUCCESS) result = submit(comm, stream, parts, count);
    if (result == SIM_NCCL_SUCCESS) result = order_streams(comm, first, stream, true);
    free(parts);
    return result;
}

static sim_nccl_result_t submit_request(size_t which) {
    request_t *request = &group.requests[which];
    sim_nccl_comm_t *comm = NULL;
    sim_stream_t *stream = NULL;
    sim_nccl_result_t result = sim_nccl_require((sim_nccl_handle_t)(uintptr_t)request->comm, &comm);
    if (result != SIM_NCCL_SUCCESS) return result;
    if (is_transfer(request)) return submit_transfers(comm, which);
    request->done = true;
    result = sim_nccl_stream(comm, request->stream, &stream);
    return result == SIM_NCCL_SUCCESS ? submit(comm, stream, &request->part, 1) : result;
}

/* Submits sends and receives first, so that all ranks use the same order. */
static sim_nccl_result_t submit_all(void) {
    sim_nccl_result_t result = SIM_NCCL_SUCCESS;
    for (int transfers = 1; transfers >= 0; transfers--) {
        for (size_t i = 0; i < group.request_count && result == SIM_NCCL_SUCCESS; i++) {
            if (!group.requests[i].done && is_transfer(&group.requests[i]) == transfers) result = submit_request(i);
        }
    }
    return result;
}

sim_nccl_result_t sim_nccl_group_add(sim_nccl_comm_t *comm, CUstream stream, const sim_nccl_part_t *part) {
    sim_nccl_group_begin();
    request_t *grown = realloc(group.requests, (group.request_count + 1) * sizeof *grown);
    if (grown) {
        grown[group.request_count++] = (request_t){.comm = comm->id, .stream = stream, .part = *part};
        group.requests = grown;
    } else {
        sim_nccl_group_failed(sim_nccl_fail(SIM_NCCL_SYSTEM, "no memory"));
    }
    return sim_nccl_group_finish();
}

/* ---- groups ---- */

void sim_nccl_group_begin(void) { group.depth++; }

sim_nccl_result_t sim_nccl_group_failed(sim_nccl_result_t result) {
    if (group.depth && group.error == SIM_NCCL_SUCCESS) group.error = result;
    return result;
}

/* A failed group creates and submits nothing. */
sim_nccl_result_t sim_nccl_group_finish(void) {
    if (--group.depth) return group.error;
    sim_nccl_result_t result = group.error;
    if (result != SIM_NCCL_SUCCESS)
        abort_pending();
    else
        result = finish_all_pending(group.pending, group.pending_count);
    if (result == SIM_NCCL_SUCCESS) result = submit_all();
    free(group.pending);
    free(group.requests);
    group = (group_t){0};
    return result;
}

sim_nccl_result_t sim_nccl_group_start(void) {
    sim_nccl_group_begin();
    return SIM_NCCL_SUCCESS;
}

sim_nccl_result_t sim_nccl_group_end(void) {
    if (!group.depth) return sim_nccl_fail(SIM_NCCL_INVALID_USAGE, "ncclGroupEnd without ncclGroupStart");
    return sim_nccl_group_finish();
}

sim_nccl_result_t sim_nccl_group_simulate_end(void *information) {
    (void)information;
    if (group.depth) { /* ends the group without effect */
        group.error = SIM_NCCL_INVALID_USAGE;
        sim_nccl_group_finish();
    }
    return sim_nccl_refuse("ncclGroupSimulateEnd");
}
