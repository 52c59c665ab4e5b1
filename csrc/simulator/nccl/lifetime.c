/* Entry points that create and end communicators, and queries of their state. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "simulator/devices/context.h"
#include "simulator/devices/device.h"
#include "simulator/nccl/communicator.h"
#include "simulator/nccl/entries.h"
#include "simulator/nccl/error.h"
#include "simulator/nccl/group.h"
#include "simulator/nccl/setup.h"

/* The content of a unique id; the remaining bytes are zero. */
typedef struct unique {
    char magic[8];
    sim_nccl_location_t location;
} unique_t;

static const char id_magic[8] = "simnccl";

_Static_assert(sizeof(unique_t) <= sizeof(sim_nccl_id_t), "a unique id can contain the exchange's location");

sim_nccl_result_t sim_nccl_get_version(int *version) {
    if (!version) return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "version is NULL");
    *version = SIM_NCCL_VERSION;
    return SIM_NCCL_SUCCESS;
}

sim_nccl_result_t sim_nccl_get_unique_id(sim_nccl_id_t *unique) {
    unique_t id = {.location = {0}};
    if (!unique) return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "uniqueId is NULL");
    memcpy(id.magic, id_magic, sizeof id.magic);
    if (sim_nccl_exchange_create(&id.location) < 0) return sim_nccl_fail(SIM_NCCL_SYSTEM, "no shared memory for the ranks");
    memset(unique, 0, sizeof *unique);
    memcpy(unique, &id, sizeof id);
    return SIM_NCCL_SUCCESS;
}

static sim_nccl_result_t read_config(const sim_nccl_config_t *config, bool *blocking) {
    *blocking = true;
    if (!config) return SIM_NCCL_SUCCESS;
    if (config->size < sizeof *config || config->magic != sim_nccl_config_magic)
        return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "the config was not initialised with NCCL_CONFIG_INITIALIZER");
    if (config->blocking != SIM_NCCL_UNDEFINED && config->blocking != 0 && config->blocking != 1)
        return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "config.blocking is %d; it must be 0 or 1", config->blocking);
    *blocking = config->blocking != 0;
    return SIM_NCCL_SUCCESS;
}

/* Creates a communicator and joins its exchange. The end of the group waits for the other ranks. */
static sim_nccl_result_t begin(sim_nccl_handle_t *handle, int ranks, const sim_nccl_id_t *unique, int rank, int device,
                               const sim_nccl_config_t *config) {
    unique_t id;
    bool blocking = true;
    if (!handle) return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "comm is NULL");
    *handle = NULL;
    if (ranks < 1 || rank < 0 || rank >= ranks)
        return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "rank %d of %d ranks: ranks count from 0", rank, ranks);
    if (ranks > SIM_NCCL_MAX_RANKS)
        return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "%d ranks: the simulated GPU supports at most %d", ranks,
                             SIM_NCCL_MAX_RANKS);
    memcpy(&id, unique, sizeof id);
    if (memcmp(id.magic, id_magic, sizeof id_magic) != 0)
        return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "the unique id is not from ncclGetUniqueId of the simulated GPU");
    sim_nccl_result_t result = read_config(config, &blocking);
    if (result != SIM_NCCL_SUCCESS) return result;
    sim_nccl_comm_t *comm = sim_nccl_comm_new(device, blocking);
    if (!comm) return sim_nccl_fail(SIM_NCCL_SYSTEM, "no memory");
    comm->location = id.location;
    result = sim_nccl_setup_join(comm, (unsigned)rank, (unsigned)ranks);
    if (result != SIM_NCCL_SUCCESS) {
        comm->location = (sim_nccl_location_t){0}; /* keeps the file open for the other ranks */
        sim_nccl_comm_drop(comm, SIM_NCCL_ABORTED);
        return result;
    }
    *handle = sim_nccl_handle(comm);
    return SIM_NCCL_SUCCESS;
}

/* Creates a communicator on the current device, alone or in a group. */
static sim_nccl_result_t make(sim_nccl_handle_t *handle, int ranks, const sim_nccl_id_t *unique, int rank,
                              const sim_nccl_config_t *config) {
    int device = sim_context_current()->device;
    sim_nccl_result_t result = begin(handle, ranks, unique, rank, device, config);
    return result == SIM_NCCL_SUCCESS ? sim_nccl_group_setup(handle) : sim_nccl_group_failed(result);
}

sim_nccl_result_t sim_nccl_init_rank(sim_nccl_handle_t *handle, int ranks, sim_nccl_id_t unique, int rank) {
    return make(handle, ranks, &unique, rank, NULL);
}

sim_nccl_result_t sim_nccl_init_rank_config(sim_nccl_handle_t *handle, int ranks, sim_nccl_id_t unique, int rank,
                                            const sim_nccl_config_t *config) {
    return make(handle, ranks, &unique, rank, config);
}

/* Only the first id is used; the others distribute the load of a real rendezvous. */
sim_nccl_result_t sim_nccl_init_rank_scalable(sim_nccl_handle_t *handle, int ranks, int rank, int count,
                                              const sim_nccl_id_t *uniques, const sim_nccl_config_t *config) {
    if (count < 1 || !uniques) return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "there is no unique id");
    return make(handle, ranks, uniques, rank, config);
}

sim_nccl_result_t sim_nccl_init_all(sim_nccl_handle_t *handles, int count, const int *devices) {
    sim_nccl_id_t unique;
    if (!handles || count < 1 || count > sim_state.device_count)
        return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "%d communicators on %d devices", count, sim_state.device_count);
    sim_nccl_result_t result = sim_nccl_get_unique_id(&unique);
    sim_nccl_group_begin();
    for (int i = 0; i < count && result == SIM_NCCL_SUCCESS; i++) {
        int device = devices ? devices[i] : i;
        if (!sim_device_valid(device))
            result = sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "there is no device %d", device);
        else if (sim_context_retain_for_runtime(device) != CUDA_SUCCESS)
            result = sim_nccl_fail(SIM_NCCL_UNHANDLED_CUDA, "device %d is unavailable", device);
        else
            result = begin(&handles[i], count, &unique, i, device, NULL);
        result = result == SIM_NCCL_SUCCESS ? sim_nccl_group_setup(&handles[i]) : sim_nccl_group_failed(result);
    }
    sim_nccl_result_t ended = sim_nccl_group_finish();
    return result == SIM_NCCL_SUCCESS ? ended : result;
}

/* ---- derived communicators ---- */

static sim_nccl_result_t derive(sim_nccl_comm_t *parent, sim_nccl_split_request_t split, uint64_t excluded,
                                sim_nccl_handle_t *handle, const sim_nccl_config_t *config) {
    const sim_nccl_exchange_t *exchange = &parent->exchange;
    sim_nccl_seat_t *seat = sim_nccl_seat(exchange, exchange->rank);
    bool blocking = parent->blocking;
    sim_nccl_result_t result = config ? read_config(config, &blocking) : SIM_NCCL_SUCCESS;
    if (result != SIM_NCCL_SUCCESS) return result;
    if (sim_nccl_setup_child(parent))
        return sim_nccl_fail(
            SIM_NCCL_INVALID_USAGE,
            "the setup of another communicator from this one is in progress; call ncclCommGetAsyncError or ncclGroupEnd "
            "until it has succeeded");
    sim_nccl_comm_t *comm = sim_nccl_comm_new(parent->device, blocking);
    if (!comm) return sim_nccl_fail(SIM_NCCL_SYSTEM, "no memory");
    sim_nccl_comm_retain(parent);
    parent->derived = comm->id;
    comm->parent = parent;
    comm->stage = SIM_NCCL_SPLITTING;
    comm->split = split;
    comm->excluded = excluded;
    comm->number = atomic_load(&seat->split_requests) + 1;
    seat->split[comm->number % 2] = split;
    atomic_store(&seat->split_requests, comm->number);
    sim_nccl_announce(exchange);
    *handle = sim_nccl_handle(comm);
    return SIM_NCCL_SUCCESS;
}

sim_nccl_result_t sim_nccl_split(sim_nccl_handle_t handle, int color, int key, sim_nccl_handle_t *made,
                                 const sim_nccl_config_t *config) {
    sim_nccl_comm_t *parent = NULL;
    sim_nccl_result_t result = sim_nccl_require(handle, &parent);
    if (result == SIM_NCCL_SUCCESS && !made) result = sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "newcomm is NULL");
    if (made) *made = NULL;
    const sim_nccl_split_request_t split = {.color = color, .key = key};
    if (result == SIM_NCCL_SUCCESS) result = derive(parent, split, 0, made, config);
    return result == SIM_NCCL_SUCCESS ? sim_nccl_group_setup(made) : sim_nccl_group_failed(result);
}

static sim_nccl_result_t read_excluded(const sim_nccl_comm_t *comm, const int *ranks, int count, uint64_t *excluded) {
    *excluded = 0;
    for (int i = 0; i < count; i++) {
        if (ranks[i] < 0 || (unsigned)ranks[i] >= comm->exchange.ranks || *excluded >> ranks[i] & 1)
            return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "rank %d cannot be excluded", ranks[i]);
        *excluded |= (uint64_t)1 << ranks[i];
    }
    if (*excluded >> comm->exchange.rank & 1)
        return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "rank %u is excluded, but calls; only the other ranks may call",
                             comm->exchange.rank);
    return SIM_NCCL_SUCCESS;
}

/* With NCCL_SHRINK_ABORT the parent may have an error. */
sim_nccl_result_t sim_nccl_shrink(sim_nccl_handle_t handle, const int *ranks, int count, sim_nccl_handle_t *made,
                                  const sim_nccl_config_t *config, int flags) {
    sim_nccl_comm_t *parent = sim_nccl_find(handle);
    uint64_t excluded = 0;
    sim_nccl_result_t result = SIM_NCCL_SUCCESS;
    if (!(flags & SIM_NCCL_SHRINK_ABORT) || !parent || parent->stage != SIM_NCCL_READY)
        result = sim_nccl_require(handle, &parent);
    if (result == SIM_NCCL_SUCCESS && (!made || count < 1 || !ranks))
        result = sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "no rank is excluded");
    if (made) *made = NULL;
    if (result == SIM_NCCL_SUCCESS) result = read_excluded(parent, ranks, count, &excluded);
    if (result == SIM_NCCL_SUCCESS && flags & SIM_NCCL_SHRINK_ABORT) {
        parent->aborted = true;
        sim_nccl_announce(&parent->exchange);
        sim_state_changed();
    }
    const sim_nccl_split_request_t split = {.key = 0};
    if (result == SIM_NCCL_SUCCESS) result = derive(parent, split, excluded, made, config);
    return result == SIM_NCCL_SUCCESS ? sim_nccl_group_setup(made) : sim_nccl_group_failed(result);
}

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
