#include "simulator/nccl/setup.h"

#include <stdio.h>
#include <stdlib.h>

#include "simulator/devices/visible.h"
#include "simulator/nccl/error.h"
#include "simulator/nccl/exchange.h"

static void fail_setup(sim_nccl_comm_t *comm, sim_nccl_result_t result) {
    comm->stage = SIM_NCCL_BROKEN;
    comm->error = result;
    snprintf(comm->text, sizeof comm->text, "%s", sim_nccl_last_error());
}

sim_nccl_result_t sim_nccl_setup_join(sim_nccl_comm_t *comm, unsigned rank, unsigned ranks) {
    sim_nccl_result_t result = sim_nccl_charge(comm);
    if (result != SIM_NCCL_SUCCESS) return result;
    comm->exchange.rank = rank;
    comm->exchange.ranks = ranks;
    result = sim_nccl_exchange_join(&comm->exchange, &comm->location, sim_state.visible[comm->device]);
    if (result == SIM_NCCL_SUCCESS)
        comm->stage = SIM_NCCL_JOINING;
    else
        sim_nccl_credit(comm);
    return result;
}

static void wait_for_seats(sim_nccl_comm_t *comm) {
    const sim_nccl_exchange_t *exchange = &comm->exchange;
    if (atomic_load(&exchange->shared->joined) == exchange->ranks) {
        sim_nccl_exchange_close_file(&comm->location);
        comm->stage = SIM_NCCL_READY;
        return;
    }
    for (unsigned i = 0; i < exchange->ranks; i++) {
        if (atomic_load(&sim_nccl_seat(exchange, i)->presence) == SIM_NCCL_ABSENT || sim_nccl_is_present(exchange, i))
            continue;
        fail_setup(comm, sim_nccl_fail(SIM_NCCL_REMOTE, "rank %u left before all ranks had joined; restart all ranks", i));
        return;
    }
}

/* Finds the parent's ranks that belong to the new communicator, in the order of their new ranks. */
static unsigned find_members(const sim_nccl_comm_t *comm, unsigned *members) {
    const sim_nccl_exchange_t *exchange = &comm->parent->exchange;
    unsigned count = 0;
    for (unsigned i = 0; i < exchange->ranks; i++) {
        const sim_nccl_split_request_t split = sim_nccl_seat(exchange, i)->split[comm->number % 2];
        if (comm->excluded >> i & 1 || split.color != comm->split.color) continue;
        unsigned at = count++;
        while (at && sim_nccl_seat(exchange, members[at - 1])->split[comm->number % 2].key > split.key) {
            members[at] = members[at - 1];
            at--;
        }
        members[at] = i;
    }
    return count;
}

/* Whether a counter of all selected ranks of the parent has reached this derived communicator. */
static bool all_have(sim_nccl_comm_t *comm, uint64_t only, size_t counter) {
    const sim_nccl_exchange_t *exchange = &comm->parent->exchange;
    for (unsigned i = 0; i < exchange->ranks; i++) {
        if (comm->excluded >> i & 1 || !(only >> i & 1)) continue;
        bool has_left = !sim_nccl_is_present(exchange, i);
        const void *address = (const char *)sim_nccl_seat(exchange, i) + counter;
        if (atomic_load((const _Atomic(uint64_t) *)address) >= comm->number) continue;
        if (has_left)
            fail_setup(comm, sim_nccl_fail(SIM_NCCL_REMOTE,
                                           "rank %u must take part, but it has left; exclude it with ncclCommShrink", i));
        return false;
    }
    return true;
}

static void wait_for_split_requests(sim_nccl_comm_t *comm) {
    if (!all_have(comm, UINT64_MAX, offsetof(sim_nccl_seat_t, split_requests))) return;
    unsigned members[SIM_NCCL_MAX_RANKS], count = find_members(comm, members), own = comm->parent->exchange.rank;
    const sim_nccl_exchange_t *exchange = &comm->parent->exchange;
    sim_nccl_seat_t *seat = sim_nccl_seat(exchange, own);
    /* Excluded ranks must count it, too. */
    for (unsigned i = 0; i < exchange->ranks; i++) {
        if (comm->excluded >> i & 1) atomic_store(&sim_nccl_seat(exchange, i)->split_requests, comm->number);
    }
    if (comm->split.color == SIM_NCCL_NO_COLOR)
        comm->stage = SIM_NCCL_READY;
    else
        comm->stage = SIM_NCCL_LOCATING;
    if (comm->stage == SIM_NCCL_READY || members[0] != own || count == 0) return;
    if (sim_nccl_exchange_create(&seat->location[comm->number % 2]) < 0)
        return fail_setup(comm, sim_nccl_fail(SIM_NCCL_SYSTEM, "no shared memory for the ranks"));
    atomic_store(&seat->locations, comm->number);
    sim_nccl_announce(exchange);
}

static void locate_exchange(sim_nccl_comm_t *comm) {
    unsigned members[SIM_NCCL_MAX_RANKS], count = find_members(comm, members), rank = 0;
    const sim_nccl_exchange_t *exchange = &comm->parent->exchange;
    if (!all_have(comm, (uint64_t)1 << members[0], offsetof(sim_nccl_seat_t, locations))) return;
    while (members[rank] != exchange->rank) rank++;
    comm->location = sim_nccl_seat(exchange, members[0])->location[comm->number % 2];
    sim_nccl_result_t result = sim_nccl_setup_join(comm, rank, count);
    if (result != SIM_NCCL_SUCCESS) return fail_setup(comm, result);
    sim_nccl_comm_release(comm->parent);
    comm->parent = NULL;
}

void sim_nccl_setup_step(sim_nccl_comm_t *comm) {
    sim_nccl_stage_t before = SIM_NCCL_READY;
    while (comm->stage != before && comm->stage < SIM_NCCL_READY) {
        before = comm->stage;
        if (before == SIM_NCCL_SPLITTING)
            wait_for_split_requests(comm);
        else if (before == SIM_NCCL_LOCATING)
            locate_exchange(comm);
        else
            wait_for_seats(comm);
    }
}

bool sim_nccl_setup_child(const sim_nccl_comm_t *comm) {
    sim_nccl_comm_t *child = comm->derived ? sim_table_find(&sim_state.communicators, comm->derived) : NULL;
    if (child) sim_nccl_setup_step(child);
    return child && child->stage < SIM_NCCL_JOINING;
}
