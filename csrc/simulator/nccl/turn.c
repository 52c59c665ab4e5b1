#include "simulator/nccl/turn.h"

#include <string.h>

#include "simulator/memory/access.h"
#include "simulator/memory/host.h"
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

static void touch(uint64_t address, void *into, const void *from, uint64_t bytes) {
    pthread_mutex_unlock(&sim_state.lock);
    void *memory = (void *)(uintptr_t)address;
    sim_memory_populate(address, bytes, from != NULL);
    memcpy(into ? into : memory, from ? from : memory, bytes);
    pthread_mutex_lock(&sim_state.lock);
}

/* Copies from `from`, or into `into`; the other is NULL. */
static CUresult move(const sim_stream_t *stream, uint64_t address, uint8_t *into, const uint8_t *from, uint64_t bytes) {
    while (bytes && sim_state_may_continue(stream)) {
        uint64_t part = bytes < SIM_CHUNK_BYTES ? bytes : SIM_CHUNK_BYTES;
        if (sim_state.unmapping) {
            pthread_cond_wait(&sim_state.changed, &sim_state.lock);
            continue;
        }
        const sim_host_t *host = sim_host_at(address);
        if (host) { /* pinned host memory stays mapped until the stream's work is done */
            uint64_t left = host->bytes - (address - host->address);
            part = part < left ? part : left;
            touch(address, into, from, part);
        } else {
            sim_mapping_t *mapping =
                sim_memory_pin(address, &part, 1U << stream->context->device, from != NULL, stream->context);
            if (!mapping) return CUDA_ERROR_ILLEGAL_ADDRESS;
            touch(address, into, from, part);
            sim_memory_unpin(mapping);
        }
        address += part;
        bytes -= part;
        if (into) into += part;
        if (from) from += part;
    }
    return CUDA_SUCCESS;
}

CUresult sim_nccl_read(const sim_stream_t *stream, uint64_t address, void *buffer, uint64_t bytes) {
    return move(stream, address, buffer, NULL, bytes);
}

CUresult sim_nccl_write(const sim_stream_t *stream, uint64_t address, const void *buffer, uint64_t bytes) {
    return move(stream, address, NULL, buffer, bytes);
}
