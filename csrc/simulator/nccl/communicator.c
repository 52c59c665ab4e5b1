#include "simulator/nccl/communicator.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "simulator/devices/budget.h"
#include "simulator/nccl/error.h"

sim_nccl_comm_t *sim_nccl_find(sim_nccl_handle_t handle) {
    return sim_table_find(&sim_state.communicators, (uint64_t)(uintptr_t)handle);
}

sim_nccl_handle_t sim_nccl_handle(const sim_nccl_comm_t *comm) { return (sim_nccl_handle_t)(uintptr_t)comm->id; }

sim_nccl_result_t sim_nccl_require(sim_nccl_handle_t handle, sim_nccl_comm_t **comm) {
    sim_nccl_comm_t *found = sim_nccl_find(handle);
    if (!found)
        return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "there is no communicator %p; it was destroyed or never created",
                             (void *)handle);
    if (found->error != SIM_NCCL_SUCCESS) return sim_nccl_set_error(found->text), found->error;
    if (found->aborted || found->finalized)
        return sim_nccl_fail(SIM_NCCL_INVALID_USAGE, "the communicator was %s; create a new one",
                             found->aborted ? "aborted" : "finalized");
    if (found->stage != SIM_NCCL_READY)
        return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT,
                             "the communicator is not ready; call ncclCommGetAsyncError until it returns ncclSuccess");
    *comm = found;
    return SIM_NCCL_SUCCESS;
}

sim_nccl_comm_t *sim_nccl_comm_new(int device, bool blocking) {
    sim_nccl_comm_t *comm = calloc(1, sizeof *comm);
    if (!comm) return NULL;
    *comm = (sim_nccl_comm_t){.id = sim_state_new_id(), .references = 1, .device = device, .blocking = blocking};
    comm->stage = SIM_NCCL_JOINING;
    if (sim_table_insert(&sim_state.communicators, comm->id, comm)) return comm;
    free(comm);
    return NULL;
}

void sim_nccl_comm_retain(sim_nccl_comm_t *comm) { comm->references++; }

void sim_nccl_comm_release(sim_nccl_comm_t *comm) {
    if (--comm->references) return;
    for (size_t i = 0; i < comm->factors.count; i++) free(comm->factors.slots[i].value);
    sim_table_release(&comm->factors);
    sim_table_release(&comm->registrations);
    sim_nccl_exchange_leave(&comm->exchange);
    if (comm->parent) sim_nccl_comm_release(comm->parent);
    free(comm);
}

void sim_nccl_comm_drop(sim_nccl_comm_t *comm, sim_nccl_presence_t how) {
    sim_table_remove(&sim_state.communicators, comm->id);
    comm->destroyed = true;
    sim_nccl_credit(comm);
    sim_nccl_exchange_close_file(&comm->location);
    if (comm->exchange.shared) {
        atomic_store(&sim_nccl_seat(&comm->exchange, comm->exchange.rank)->presence, how);
        sim_nccl_announce(&comm->exchange);
    }
    sim_state_changed();
    sim_nccl_comm_release(comm);
}

sim_nccl_result_t sim_nccl_charge(sim_nccl_comm_t *comm) {
    uint64_t bytes = sim_state.nccl_bytes;
    if (!sim_budget_charge(comm->device, bytes, false))
        return sim_nccl_fail(SIM_NCCL_UNHANDLED_CUDA,
                             "out of memory: a communicator takes %llu bytes of device %d; free memory, or set "
                             "TMS_SIMULATED_NCCL_MEMORY to a smaller size",
                             (unsigned long long)bytes, comm->device);
    comm->charged = bytes;
    return SIM_NCCL_SUCCESS;
}

void sim_nccl_credit(sim_nccl_comm_t *comm) {
    if (comm->charged) sim_budget_credit(comm->device, comm->charged, false);
    comm->charged = 0;
}

void sim_nccl_comm_fail(sim_nccl_comm_t *comm, sim_nccl_result_t result, const char *format, ...) {
    va_list arguments;
    if (comm->error != SIM_NCCL_SUCCESS || comm->aborted) return;
    comm->error = result;
    va_start(arguments, format);
    vsnprintf(comm->text, sizeof comm->text, format, arguments);
    va_end(arguments);
    sim_nccl_set_error(comm->text);
    fprintf(stderr, "simulated GPU: NCCL: %s\n", comm->text);
    sim_state_changed();
}

void sim_nccl_clear(void) {
    while (sim_state.communicators.count) sim_nccl_comm_drop(sim_state.communicators.slots[0].value, SIM_NCCL_ABORTED);
    sim_table_release(&sim_state.communicators);
}
