/* Sends and receives, which progress together as the ring of each pair allows. A message is its length and its bytes. A
 * send is complete when its last byte is in the ring. */
#include "simulator/nccl/transfer.h"

#include <stdlib.h>
#include <string.h>

#include "simulator/nccl/exchange.h"
#include "simulator/nccl/numbers.h"
#include "simulator/nccl/turn.h"

/* The progress of a send or receive. A message starts with its length. */
typedef struct progress {
    bool begun, done;
    uint64_t bytes;
} progress_t;

typedef struct transfers {
    const sim_nccl_turn_t *turn;
    const sim_nccl_part_t *parts;
    progress_t *progress;
    size_t count;
} transfers_t;

static uint64_t bytes_of(const sim_nccl_part_t *part) { return part->count * sim_nccl_type_bytes(part->type); }

/* The longest contiguous piece of a ring from a position on. */
static uint64_t piece(const sim_nccl_exchange_t *exchange, uint64_t at, uint64_t available, uint64_t wanted) {
    uint64_t straight = exchange->ring_bytes - at % exchange->ring_bytes;
    uint64_t bytes = available < wanted ? available : wanted;
    return bytes < straight ? bytes : straight;
}

static CUresult send_some(const transfers_t *transfers, size_t which, bool *moved) {
    const sim_nccl_exchange_t *exchange = &transfers->turn->comm->exchange;
    const sim_nccl_part_t *part = &transfers->parts[which];
    progress_t *progress = &transfers->progress[which];
    sim_nccl_ring_t *ring = sim_nccl_ring(exchange, exchange->rank, part->peer);
    uint8_t *data = sim_nccl_ring_data(exchange, ring);
    uint64_t written = atomic_load(&ring->written), space = exchange->ring_bytes - (written - atomic_load(&ring->read));
    uint64_t total = bytes_of(part);
    CUresult result = CUDA_SUCCESS;
    if (!progress->begun) {
        if (space < sizeof total) return CUDA_SUCCESS;
        for (size_t i = 0; i < sizeof total; i++) data[(written + i) % exchange->ring_bytes] = ((const uint8_t *)&total)[i];
        written += sizeof total;
        space -= sizeof total;
        progress->begun = *moved = true;
    }
    while (progress->bytes < total && space && result == CUDA_SUCCESS && sim_nccl_may_continue(transfers->turn)) {
        uint64_t bytes = piece(exchange, written, space, total - progress->bytes);
        result = sim_nccl_read(transfers->turn->stream, part->source + progress->bytes,
                               data + written % exchange->ring_bytes, bytes);
        written += bytes;
        space -= bytes;
        progress->bytes += bytes;
        *moved = true;
    }
    if (result == CUDA_SUCCESS && sim_nccl_may_continue(transfers->turn)) {
        atomic_store(&ring->written, written);
        progress->done = progress->bytes == total;
    }
    return result;
}

static CUresult receive_some(const transfers_t *transfers, size_t which, bool *moved) {
    const sim_nccl_exchange_t *exchange = &transfers->turn->comm->exchange;
    const sim_nccl_part_t *part = &transfers->parts[which];
    progress_t *progress = &transfers->progress[which];
    sim_nccl_ring_t *ring = sim_nccl_ring(exchange, part->peer, exchange->rank);
    const uint8_t *data = sim_nccl_ring_data(exchange, ring);
    uint64_t read = atomic_load(&ring->read), available = atomic_load(&ring->written) - read;
    uint64_t total = bytes_of(part), sent = 0;
    CUresult result = CUDA_SUCCESS;
    if (!progress->begun) {
        if (available < sizeof sent) return CUDA_SUCCESS;
        for (size_t i = 0; i < sizeof sent; i++) ((uint8_t *)&sent)[i] = data[(read + i) % exchange->ring_bytes];
        if (sent != total) {
            sim_nccl_comm_fail(
                transfers->turn->comm, SIM_NCCL_INVALID_USAGE,
                "ncclRecv: rank %u expects %llu bytes from rank %u, which sends %llu with ncclSend; pass both "
                "the same count and type",
                exchange->rank, (unsigned long long)total, part->peer, (unsigned long long)sent);
            return CUDA_SUCCESS;
        }
        read += sizeof sent;
        available -= sizeof sent;
        progress->begun = *moved = true;
    }
    while (progress->bytes < total && available && result == CUDA_SUCCESS && sim_nccl_may_continue(transfers->turn)) {
        uint64_t bytes = piece(exchange, read, available, total - progress->bytes);
        result = sim_nccl_write(transfers->turn->stream, part->destination + progress->bytes,
                                data + read % exchange->ring_bytes, bytes);
        read += bytes;
        available -= bytes;
        progress->bytes += bytes;
        *moved = true;
    }
    if (result == CUDA_SUCCESS && sim_nccl_may_continue(transfers->turn)) {
        atomic_store(&ring->read, read);
        progress->done = progress->bytes == total;
    }
    return result;
}

/* One pass over all transfers. Transfers with the same rank and direction run in call order. */
static CUresult run_pass(const transfers_t *transfers, bool *moved, bool *done) {
    uint64_t sending = 0, receiving = 0; /* bit masks of ranks with an incomplete transfer */
    CUresult result = CUDA_SUCCESS;
    *moved = false;
    *done = true;
    for (size_t i = 0; i < transfers->count && result == CUDA_SUCCESS; i++) {
        const sim_nccl_part_t *part = &transfers->parts[i];
        uint64_t *in_flight = part->kind == SIM_NCCL_SEND ? &sending : &receiving, peer = (uint64_t)1 << part->peer;
        if (transfers->progress[i].done || *in_flight & peer) continue;
        result = part->kind == SIM_NCCL_SEND ? send_some(transfers, i, moved) : receive_some(transfers, i, moved);
        if (transfers->progress[i].done) continue;
        *in_flight |= peer;
        *done = false;
    }
    return result;
}

static void report_missing_peer(const transfers_t *transfers) {
    const sim_nccl_exchange_t *exchange = &transfers->turn->comm->exchange;
    for (size_t i = 0; i < transfers->count; i++) {
        const sim_nccl_part_t *part = &transfers->parts[i];
        if (transfers->progress[i].done || sim_nccl_is_present(exchange, part->peer)) continue;
        sim_nccl_report_missing(transfers->turn, part->kind, part->peer);
        return;
    }
}

CUresult sim_nccl_transfer_work(const sim_nccl_turn_t *turn, const sim_nccl_part_t *parts, size_t count) {
    const transfers_t transfers = {
        .turn = turn, .parts = parts, .progress = calloc(count, sizeof(progress_t)), .count = count};
    bool late = false, moved = false, done = false;
    CUresult result = transfers.progress ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    while (result == CUDA_SUCCESS && !done) {
        uint32_t seen = sim_nccl_changes(&turn->comm->exchange);
        bool was_late = late;
        late = false;
        result = run_pass(&transfers, &moved, &done);
        if (moved) sim_nccl_announce(&turn->comm->exchange);
        if (!sim_nccl_may_continue(turn)) break;
        if (result != CUDA_SUCCESS || moved || done) continue;
        /* Checked only after a timeout and another look at the rings, which may hold a departed rank's last bytes. */
        if (was_late) report_missing_peer(&transfers);
        if (!sim_nccl_turn_wait(turn, seen, &late)) break;
    }
    free(transfers.progress);
    return result;
}
