/* Entry points of operations: they validate the arguments and add the operation to the group. */
#include <stdlib.h>
#include <string.h>

#include "simulator/nccl/communicator.h"
#include "simulator/nccl/entries.h"
#include "simulator/nccl/error.h"
#include "simulator/nccl/group.h"
#include "simulator/nccl/numbers.h"
#include "simulator/nccl/operation.h"

static bool is_known(int type) { return type >= 0 && type < SIM_NCCL_TYPES; }

/* Resolves a reduction. A reduction that the program created is a scaled sum. */
static sim_nccl_result_t read_reduction(const sim_nccl_comm_t *comm, int reduction, sim_nccl_part_t *part) {
    if (reduction >= 0 && reduction < SIM_NCCL_REDUCTIONS) {
        part->reduction = (sim_nccl_reduction_t)reduction;
        return SIM_NCCL_SUCCESS;
    }
    const sim_nccl_factor_t *factor = sim_table_find(&comm->factors, (uint64_t)(unsigned)reduction);
    if (!factor) return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "there is no reduction %d of this communicator", reduction);
    if (factor->type != part->type)
        return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "reduction %d is for %s, but the data is %s", reduction,
                             sim_nccl_type_name(factor->type), sim_nccl_type_name(part->type));
    part->reduction = SIM_NCCL_SUM;
    part->scaled = true;
    part->factor = *factor;
    return SIM_NCCL_SUCCESS;
}

static sim_nccl_result_t check(const sim_nccl_comm_t *comm, int type, int peer) {
    if (!is_known(type)) return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "there is no type %d", type);
    if (peer < 0 || (unsigned)peer >= comm->exchange.ranks)
        return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "there is no rank %d among %u", peer, comm->exchange.ranks);
    if (comm->suspended)
        return sim_nccl_fail(SIM_NCCL_INVALID_USAGE, "the communicator is suspended; call ncclCommResume first");
    return SIM_NCCL_SUCCESS;
}

static sim_nccl_result_t check_buffers(const sim_nccl_comm_t *comm, const sim_nccl_part_t *part) {
    bool is_root = part->peer == comm->exchange.rank;
    bool gives =
        part->kind != SIM_NCCL_RECEIVE && (is_root || (part->kind != SIM_NCCL_BROADCAST && part->kind != SIM_NCCL_SCATTER));
    bool takes =
        part->kind != SIM_NCCL_SEND && (is_root || (part->kind != SIM_NCCL_REDUCE && part->kind != SIM_NCCL_GATHER));
    if ((gives && !part->source) || (takes && !part->destination))
        return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "a buffer is NULL");
    return SIM_NCCL_SUCCESS;
}

/* Whether the result is the input: a collective of one rank, without a factor. */
static bool is_copy(const sim_nccl_comm_t *comm, const sim_nccl_part_t *part) {
    return comm->exchange.ranks == 1 && !part->scaled && part->kind != SIM_NCCL_SEND && part->kind != SIM_NCCL_RECEIVE;
}

/* `peer` is the root or the other rank; 0 if there is none. */
static sim_nccl_result_t add(sim_nccl_handle_t handle, sim_nccl_part_t part, int type, int reduction, int peer,
                             CUstream stream) {
    sim_nccl_comm_t *comm = NULL;
    sim_nccl_result_t result = sim_nccl_require(handle, &comm);
    if (result == SIM_NCCL_SUCCESS) result = check(comm, type, peer);
    if (result != SIM_NCCL_SUCCESS) return sim_nccl_group_failed(result);
    part.type = (sim_nccl_type_t)type;
    part.peer = (unsigned)peer;
    result = read_reduction(comm, reduction, &part);
    if (result != SIM_NCCL_SUCCESS) return sim_nccl_group_failed(result);
    if (!part.count) return SIM_NCCL_SUCCESS; /* an empty operation has no effect */
    /* A copy is issued at once, even in a group, as in the real NCCL. */
    if (is_copy(comm, &part)) return sim_nccl_group_failed(sim_nccl_copy(comm, stream, &part));
    result = check_buffers(comm, &part);
    return result == SIM_NCCL_SUCCESS ? sim_nccl_group_add(comm, stream, &part) : sim_nccl_group_failed(result);
}

#define PART(kind_of, from, to, elements)                                                                                   \
    ((sim_nccl_part_t){.kind = (kind_of),                                                                                   \
                       .source = (uint64_t)(uintptr_t)(from),                                                               \
                       .destination = (uint64_t)(uintptr_t)(to),                                                            \
                       .count = (elements)})

sim_nccl_result_t sim_nccl_all_reduce(const void *source, void *destination, size_t count, int type, int reduction,
                                      sim_nccl_handle_t comm, CUstream stream) {
    return add(comm, PART(SIM_NCCL_ALL_REDUCE, source, destination, count), type, reduction, 0, stream);
}

sim_nccl_result_t sim_nccl_broadcast(const void *source, void *destination, size_t count, int type, int root,
                                     sim_nccl_handle_t comm, CUstream stream) {
    return add(comm, PART(SIM_NCCL_BROADCAST, source, destination, count), type, SIM_NCCL_SUM, root, stream);
}

sim_nccl_result_t sim_nccl_broadcast_in_place(void *buffer, size_t count, int type, int root, sim_nccl_handle_t comm,
                                              CUstream stream) {
    return sim_nccl_broadcast(buffer, buffer, count, type, root, comm, stream);
}

sim_nccl_result_t sim_nccl_reduce_to(const void *source, void *destination, size_t count, int type, int reduction, int root,
                                     sim_nccl_handle_t comm, CUstream stream) {
    return add(comm, PART(SIM_NCCL_REDUCE, source, destination, count), type, reduction, root, stream);
}

sim_nccl_result_t sim_nccl_all_gather(const void *source, void *destination, size_t count, int type, sim_nccl_handle_t comm,
                                      CUstream stream) {
    return add(comm, PART(SIM_NCCL_ALL_GATHER, source, destination, count), type, SIM_NCCL_SUM, 0, stream);
}

sim_nccl_result_t sim_nccl_reduce_scatter(const void *source, void *destination, size_t count, int type, int reduction,
                                          sim_nccl_handle_t comm, CUstream stream) {
    return add(comm, PART(SIM_NCCL_REDUCE_SCATTER, source, destination, count), type, reduction, 0, stream);
}

sim_nccl_result_t sim_nccl_all_to_all(const void *source, void *destination, size_t count, int type, sim_nccl_handle_t comm,
                                      CUstream stream) {
    return add(comm, PART(SIM_NCCL_ALL_TO_ALL, source, destination, count), type, SIM_NCCL_SUM, 0, stream);
}

sim_nccl_result_t sim_nccl_gather(const void *source, void *destination, size_t count, int type, int root,
                                  sim_nccl_handle_t comm, CUstream stream) {
    return add(comm, PART(SIM_NCCL_GATHER, source, destination, count), type, SIM_NCCL_SUM, root, stream);
}

sim_nccl_result_t sim_nccl_scatter(const void *source, void *destination, size_t count, int type, int root,
                                   sim_nccl_handle_t comm, CUstream stream) {
    return add(comm, PART(SIM_NCCL_SCATTER, source, destination, count), type, SIM_NCCL_SUM, root, stream);
}

sim_nccl_result_t sim_nccl_send(const void *source, size_t count, int type, int peer, sim_nccl_handle_t comm,
                                CUstream stream) {
    return add(comm, PART(SIM_NCCL_SEND, source, NULL, count), type, SIM_NCCL_SUM, peer, stream);
}

sim_nccl_result_t sim_nccl_receive(void *destination, size_t count, int type, int peer, sim_nccl_handle_t comm,
                                   CUstream stream) {
    return add(comm, PART(SIM_NCCL_RECEIVE, NULL, destination, count), type, SIM_NCCL_SUM, peer, stream);
}

/* ---- reductions that the program creates ---- */

/* Any residence that is not the host is the device, as in the real NCCL. */
sim_nccl_result_t sim_nccl_make_reduction(int *reduction, void *scalar, int type, int residence, sim_nccl_handle_t handle) {
    sim_nccl_comm_t *comm = NULL;
    sim_nccl_result_t result = sim_nccl_require(handle, &comm);
    if (result != SIM_NCCL_SUCCESS) return result;
    if (!reduction || !scalar) return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "a pointer is NULL");
    if (!is_known(type)) return sim_nccl_fail(SIM_NCCL_INTERNAL, "there is no type %d", type);
    sim_nccl_factor_t *factor = calloc(1, sizeof *factor);
    if (!factor) return sim_nccl_fail(SIM_NCCL_SYSTEM, "no memory");
    factor->type = (sim_nccl_type_t)type;
    if (residence == SIM_NCCL_SCALAR_ON_HOST)
        memcpy(factor->value, scalar, sim_nccl_type_bytes(factor->type));
    else
        factor->address = (uint64_t)(uintptr_t)scalar;
    int number = SIM_NCCL_REDUCTIONS + comm->reductions_made;
    if (!sim_table_insert(&comm->factors, (uint64_t)number, factor)) {
        free(factor);
        return sim_nccl_fail(SIM_NCCL_SYSTEM, "no memory");
    }
    comm->reductions_made++;
    *reduction = number;
    return SIM_NCCL_SUCCESS;
}

/* Submitted operations have a copy of the factor. */
sim_nccl_result_t sim_nccl_drop_reduction(int reduction, sim_nccl_handle_t handle) {
    sim_nccl_comm_t *comm = sim_nccl_find(handle);
    void *factor = comm ? sim_table_remove(&comm->factors, (uint64_t)(unsigned)reduction) : NULL;
    if (!factor) return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "there is no reduction %d of this communicator", reduction);
    free(factor);
    return SIM_NCCL_SUCCESS;
}
