/* Entry points that end communicators, and queries of their state. */
#include "simulator/nccl/communicator.h"
#include "simulator/nccl/entries.h"
#include "simulator/nccl/error.h"
#include "simulator/nccl/setup.h"

static sim_nccl_result_t find(sim_nccl_handle_t handle, const void *result, sim_nccl_comm_t **comm) {
    *comm = sim_nccl_find(handle);
    if (!*comm)
        return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "there is no communicator %p; it was destroyed or never created",
                             (void *)handle);
    return result ? SIM_NCCL_SUCCESS : sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "a pointer is NULL");
}

/* Waits until submitted work is complete, or can never complete. */
static void drain(sim_nccl_comm_t *comm) {
    sim_nccl_comm_retain(comm);
    while (comm->first && !comm->aborted && !comm->destroyed && comm->error == SIM_NCCL_SUCCESS) {
        if (!sim_state_wait()) break;
    }
    sim_nccl_comm_release(comm);
}

/* NULL ends nothing and is no error in finalize, destroy and abort, as in the real NCCL. */
sim_nccl_result_t sim_nccl_finalize(sim_nccl_handle_t handle) {
    sim_nccl_comm_t *comm = sim_nccl_find(handle);
    if (!handle) return SIM_NCCL_SUCCESS;
    if (comm && comm->finalized) return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "the communicator is already finalized");
    sim_nccl_result_t result = sim_nccl_require(handle, &comm);
    if (result != SIM_NCCL_SUCCESS) return result;
    comm->finalized = true;
    if (!comm->blocking) return comm->first ? SIM_NCCL_IN_PROGRESS : SIM_NCCL_SUCCESS;
    drain(comm);
    comm = sim_nccl_find(handle);
    return comm ? comm->error : SIM_NCCL_SUCCESS;
}

static void abort_comm(sim_nccl_comm_t *comm) {
    comm->aborted = true;
    sim_nccl_comm_drop(comm, SIM_NCCL_ABORTED);
}

/* After an error, submitted work never completes, so the communicator is aborted. */
sim_nccl_result_t sim_nccl_destroy(sim_nccl_handle_t handle) {
    sim_nccl_comm_t *comm = NULL;
    if (!handle) return SIM_NCCL_SUCCESS;
    sim_nccl_result_t result = find(handle, &handle, &comm);
    if (result != SIM_NCCL_SUCCESS) return result;
    comm->finalized = true;
    if (comm->stage == SIM_NCCL_READY) drain(comm);
    comm = sim_nccl_find(handle);
    if (!comm) return SIM_NCCL_SUCCESS;
    if (comm->error != SIM_NCCL_SUCCESS || comm->stage != SIM_NCCL_READY || comm->aborted)
        abort_comm(comm);
    else
        sim_nccl_comm_drop(comm, SIM_NCCL_LEFT);
    return SIM_NCCL_SUCCESS;
}

sim_nccl_result_t sim_nccl_abort(sim_nccl_handle_t handle) {
    sim_nccl_comm_t *comm = NULL;
    if (!handle) return SIM_NCCL_SUCCESS;
    sim_nccl_result_t result = find(handle, &handle, &comm);
    if (result == SIM_NCCL_SUCCESS) abort_comm(comm);
    return result;
}

sim_nccl_result_t sim_nccl_async_error(sim_nccl_handle_t handle, sim_nccl_result_t *error) {
    sim_nccl_comm_t *comm = NULL;
    sim_nccl_result_t result = find(handle, error, &comm);
    if (result != SIM_NCCL_SUCCESS) return result;
    sim_nccl_setup_step(comm);
    bool in_progress = comm->stage < SIM_NCCL_READY || (comm->finalized && comm->first) || sim_nccl_setup_child(comm);
    *error = comm->error != SIM_NCCL_SUCCESS ? comm->error : in_progress ? SIM_NCCL_IN_PROGRESS : SIM_NCCL_SUCCESS;
    if (comm->error != SIM_NCCL_SUCCESS) sim_nccl_set_error(comm->text);
    return SIM_NCCL_SUCCESS;
}

sim_nccl_result_t sim_nccl_count(sim_nccl_handle_t handle, int *count) {
    sim_nccl_comm_t *comm = NULL;
    sim_nccl_result_t result = find(handle, count, &comm);
    if (result == SIM_NCCL_SUCCESS) *count = (int)comm->exchange.ranks;
    return result;
}

sim_nccl_result_t sim_nccl_device(sim_nccl_handle_t handle, int *device) {
    sim_nccl_comm_t *comm = NULL;
    sim_nccl_result_t result = find(handle, device, &comm);
    if (result == SIM_NCCL_SUCCESS) *device = comm->device;
    return result;
}

sim_nccl_result_t sim_nccl_rank(sim_nccl_handle_t handle, int *rank) {
    sim_nccl_comm_t *comm = NULL;
    sim_nccl_result_t result = find(handle, rank, &comm);
    if (result == SIM_NCCL_SUCCESS) *rank = (int)comm->exchange.rank;
    return result;
}
