#include "simulator/nccl/turn.h"

#include "simulator/nccl/exchange.h"

const char *sim_nccl_kind_name(sim_nccl_kind_t kind) {
    static const char *const names[] = {
        [SIM_NCCL_ALL_REDUCE] = "ncclAllReduce",
        [SIM_NCCL_BROADCAST] = "ncclBroadcast",
        [SIM_NCCL_REDUCE] = "ncclReduce",
        [SIM_NCCL_ALL_GATHER] = "ncclAllGather",
        [SIM_NCCL_REDUCE_SCATTER] = "ncclReduceScatter",
        [SIM_NCCL_ALL_TO_ALL] = "ncclAlltoAll",
        [SIM_NCCL_GATHER] = "ncclGather",
        [SIM_NCCL_SCATTER] = "ncclScatter",
        [SIM_NCCL_SEND] = "ncclSend",
        [SIM_NCCL_RECEIVE] = "ncclRecv",
    };
    return (unsigned)kind < sizeof names / sizeof *names ? names[kind] : "another operation";
}

bool sim_nccl_may_continue(const sim_nccl_turn_t *turn) {
    return sim_state_may_continue(turn->stream) && !turn->comm->aborted;
}

bool sim_nccl_turn_wait(const sim_nccl_turn_t *turn, uint32_t seen, bool *late) {
    sim_nccl_comm_t *comm = turn->comm;
    *late = false;
    if (!sim_nccl_may_continue(turn)) return false;
    if (comm->error != SIM_NCCL_SUCCESS) {
        pthread_cond_wait(&sim_state.changed, &sim_state.lock);
        return sim_nccl_may_continue(turn);
    }
    pthread_mutex_unlock(&sim_state.lock);
    *late = !sim_nccl_sleep(&comm->exchange, seen);
    pthread_mutex_lock(&sim_state.lock);
    return sim_nccl_may_continue(turn);
}

void sim_nccl_report_missing(const sim_nccl_turn_t *turn, sim_nccl_kind_t kind, unsigned rank) {
    static const char *const reasons[] = {
        [SIM_NCCL_PRESENT] = "its process has exited",
        [SIM_NCCL_LEFT] = "it has destroyed its communicator",
        [SIM_NCCL_ABORTED] = "it has aborted its communicator",
        [SIM_NCCL_FAILED] = "its work has failed",
    };
    const sim_nccl_exchange_t *exchange = &turn->comm->exchange;
    int presence = atomic_load(&sim_nccl_seat(exchange, rank)->presence);
    sim_nccl_comm_fail(turn->comm, SIM_NCCL_REMOTE,
                       "%s: rank %u waits for rank %u, which is unavailable: %s; abort the communicator with ncclCommAbort",
                       sim_nccl_kind_name(kind), exchange->rank, rank,
                       presence > 0 && presence <= SIM_NCCL_FAILED ? reasons[presence] : "it never joined");
}
