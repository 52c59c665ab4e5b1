/* Collectives, executed in steps. In a step each rank writes a part of its data to its slot, waits until all ranks have
 * done so, and reads what it needs from their slots. In an all-reduce each rank also reduces one share of the part, so
 * every element is computed once, in rank order, and all ranks get the same bits. */
#include "simulator/nccl/collective.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "simulator/nccl/exchange.h"
#include "simulator/nccl/numbers.h"
#include "simulator/nccl/turn.h"

typedef struct step {
    const sim_nccl_turn_t *turn;
    const sim_nccl_part_t *part;
    uint64_t number;
    uint64_t first, count; /* elements */
    size_t element;        /* bytes per element */
    uint64_t share;        /* bytes of the slot for each rank, if the source has a block per rank */
    uint8_t *buffer;       /* scratch buffer of one slot's size */
} step_t;

static bool is_reduction(sim_nccl_kind_t kind) {
    return kind == SIM_NCCL_ALL_REDUCE || kind == SIM_NCCL_REDUCE || kind == SIM_NCCL_REDUCE_SCATTER;
}

/* Whether the source has one block per rank. */
static bool is_divided(sim_nccl_kind_t kind) {
    return kind == SIM_NCCL_REDUCE_SCATTER || kind == SIM_NCCL_ALL_TO_ALL || kind == SIM_NCCL_SCATTER;
}

/* Whether only the root sends; whether only the root receives. */
static bool is_from_root(sim_nccl_kind_t kind) { return kind == SIM_NCCL_BROADCAST || kind == SIM_NCCL_SCATTER; }

static bool is_to_root(sim_nccl_kind_t kind) { return kind == SIM_NCCL_REDUCE || kind == SIM_NCCL_GATHER; }

/* Waits until a counter of every rank has reached a number. */
static bool await(const sim_nccl_turn_t *turn, sim_nccl_kind_t kind, size_t counter, uint64_t number) {
    const sim_nccl_exchange_t *exchange = &turn->comm->exchange;
    bool late = false;
    for (;;) {
        uint32_t seen = sim_nccl_changes(exchange);
        unsigned missing = exchange->ranks;
        for (unsigned i = 0; i < exchange->ranks; i++) {
            /* Checked before the counter, which the rank may have updated just before it exited. */
            bool has_left = late && !sim_nccl_is_present(exchange, i);
            const void *address = (const char *)sim_nccl_seat(exchange, i) + counter;
            if (atomic_load((const _Atomic(uint64_t) *)address) >= number) continue;
            missing = i;
            if (has_left) sim_nccl_report_missing(turn, kind, i);
        }
        if (missing == exchange->ranks) return sim_nccl_may_continue(turn) && turn->comm->error == SIM_NCCL_SUCCESS;
        if (!sim_nccl_turn_wait(turn, seen, &late)) return false;
    }
}

static void publish(const sim_nccl_turn_t *turn, _Atomic(uint64_t) *counter, uint64_t number) {
    atomic_store(counter, number);
    sim_nccl_announce(&turn->comm->exchange);
}

static bool equal(const sim_nccl_call_t *a, const sim_nccl_call_t *b) {
    return a->kind == b->kind && a->type == b->type && a->reduction == b->reduction && a->root == b->root &&
           a->count == b->count;
}

/* After a mismatch the operation waits for an abort. */
static bool wait_for_abort(const sim_nccl_turn_t *turn) {
    bool late = false;
    while (sim_nccl_turn_wait(turn, 0, &late)) {
    }
    return false;
}

static bool agree(const sim_nccl_turn_t *turn, const sim_nccl_part_t *part) {
    const sim_nccl_exchange_t *exchange = &turn->comm->exchange;
    sim_nccl_seat_t *own = sim_nccl_seat(exchange, exchange->rank);
    uint64_t number = ++turn->comm->calls;
    const sim_nccl_call_t call = {.kind = part->kind,
                                  .type = part->type,
                                  .reduction = is_reduction(part->kind) ? (uint32_t)part->reduction : 0,
                                  .root = part->peer,
                                  .count = part->count};
    own->call[number % 2] = call;
    publish(turn, &own->calls, number);
    if (!await(turn, part->kind, offsetof(sim_nccl_seat_t, calls), number)) return false;
    for (unsigned i = 0; i < exchange->ranks; i++) {
        const sim_nccl_call_t *other = &sim_nccl_seat(exchange, i)->call[number % 2];
        if (equal(&call, other)) continue;
        sim_nccl_comm_fail(
            turn->comm, SIM_NCCL_INVALID_USAGE,
            "rank %u calls %s (count %llu, %s, op %u, root %u) where rank %u calls %s (count %llu, %s, op %u, "
            "root %u); call the same on all ranks, in the same order",
            exchange->rank, sim_nccl_kind_name((sim_nccl_kind_t)call.kind), (unsigned long long)call.count,
            sim_nccl_type_name((sim_nccl_type_t)call.type), call.reduction, call.root, i,
            sim_nccl_kind_name((sim_nccl_kind_t)other->kind), (unsigned long long)other->count,
            sim_nccl_type_name((sim_nccl_type_t)(other->type % SIM_NCCL_TYPES)), other->reduction, other->root);
        return wait_for_abort(turn);
    }
    return true;
}

/* Copies elements of the program into this rank's slot, scaled if the reduction requires it. */
static CUresult load(const step_t *step, uint64_t source, uint8_t *slot) {
    const sim_stream_t *stream = step->turn->stream;
    const sim_nccl_part_t *part = step->part;
    uint8_t factor[sizeof part->factor.value];
    uint64_t bytes = step->count * step->element;
    CUresult result = sim_nccl_read(stream, source + step->first * step->element, slot, bytes);
    if (result != CUDA_SUCCESS || !part->scaled) return result;
    memcpy(factor, part->factor.value, sizeof factor);
    if (part->factor.address) result = sim_nccl_read(stream, part->factor.address, factor, step->element);
    if (result == CUDA_SUCCESS) sim_nccl_scale(part->type, slot, step->count, factor);
    return result;
}

static CUresult write_slot(const step_t *step) {
    const sim_nccl_part_t *part = step->part;
    const sim_nccl_exchange_t *exchange = &step->turn->comm->exchange;
    uint8_t *slot = sim_nccl_slot(exchange, exchange->rank, step->number);
    CUresult result = CUDA_SUCCESS;
    if (is_from_root(part->kind) && part->peer != exchange->rank) return CUDA_SUCCESS;
    if (!is_divided(part->kind)) return load(step, part->source, slot);
    for (unsigned i = 0; i < exchange->ranks && result == CUDA_SUCCESS; i++)
        result = load(step, part->source + i * part->count * step->element, slot + i * step->share);
    return result;
}

/* Reduces the same part of every rank's slot, in rank order. */
static void reduce_slots(const step_t *step, uint64_t offset, uint64_t count, void *destination) {
    const sim_nccl_exchange_t *exchange = &step->turn->comm->exchange;
    const void *sources[SIM_NCCL_MAX_RANKS];
    for (unsigned i = 0; i < exchange->ranks; i++) sources[i] = sim_nccl_slot(exchange, i, step->number) + offset;
    pthread_mutex_unlock(&sim_state.lock);
    sim_nccl_reduce(step->part->type, step->part->reduction, destination, sources, exchange->ranks, count);
    pthread_mutex_lock(&sim_state.lock);
}

/* A rank's share of the elements in an all-reduce. */
static void find_share(const step_t *step, unsigned rank, uint64_t *first, uint64_t *count) {
    uint64_t ranks = step->turn->comm->exchange.ranks, each = (step->count + ranks - 1) / ranks;
    *first = rank * each < step->count ? rank * each : step->count;
    *count = step->count - *first < each ? step->count - *first : each;
}

static CUresult store(const step_t *step, uint64_t block, uint64_t offset, const void *bytes, uint64_t count) {
    uint64_t position = (block * step->part->count + step->first) * step->element + offset;
    return sim_nccl_write(step->turn->stream, step->part->destination + position, bytes, count * step->element);
}

/* Copies from the slots of the other ranks to the program's memory. */
static CUresult read_slots(const step_t *step) {
    const sim_nccl_part_t *part = step->part;
    const sim_nccl_exchange_t *exchange = &step->turn->comm->exchange;
    unsigned rank = exchange->rank;
    CUresult result = CUDA_SUCCESS;
    if (is_to_root(part->kind) && part->peer != rank) return CUDA_SUCCESS;
    if (part->kind == SIM_NCCL_REDUCE || part->kind == SIM_NCCL_REDUCE_SCATTER) {
        reduce_slots(step, part->kind == SIM_NCCL_REDUCE ? 0 : rank * step->share, step->count, step->buffer);
        return store(step, 0, 0, step->buffer, step->count);
    }
    if (part->kind == SIM_NCCL_BROADCAST)
        return store(step, 0, 0, sim_nccl_slot(exchange, part->peer, step->number), step->count);
    if (part->kind == SIM_NCCL_SCATTER)
        return store(step, 0, 0, sim_nccl_slot(exchange, part->peer, step->number) + rank * step->share, step->count);
    for (unsigned i = 0; i < exchange->ranks && result == CUDA_SUCCESS; i++) {
        const uint8_t *slot = sim_nccl_slot(exchange, i, step->number);
        uint64_t first = 0, count = step->count;
        if (part->kind == SIM_NCCL_ALL_REDUCE) {
            find_share(step, i, &first, &count);
            result = store(step, 0, first * step->element, slot + first * step->element, count);
        } else {
            result = store(step, i, 0, slot + (part->kind == SIM_NCCL_ALL_TO_ALL ? rank * step->share : 0), count);
        }
    }
    return result;
}

/* False if the operation has ended; *result is then its result. */
static bool run_step(const step_t *step, CUresult *result) {
    const sim_nccl_turn_t *turn = step->turn;
    const sim_nccl_exchange_t *exchange = &turn->comm->exchange;
    sim_nccl_seat_t *own = sim_nccl_seat(exchange, exchange->rank);
    sim_nccl_kind_t kind = step->part->kind;
    uint64_t number = step->number;
    *result = write_slot(step);
    if (*result != CUDA_SUCCESS || !sim_nccl_may_continue(turn)) return false;
    publish(turn, &own->posted, number);
    if (!await(turn, kind, offsetof(sim_nccl_seat_t, posted), number)) return false;
    if (kind == SIM_NCCL_ALL_REDUCE) {
        uint64_t first = 0, count = 0;
        find_share(step, exchange->rank, &first, &count);
        uint64_t offset = first * step->element;
        reduce_slots(step, offset, count, sim_nccl_slot(exchange, exchange->rank, number) + offset);
        publish(turn, &own->reduced, number);
        if (!await(turn, kind, offsetof(sim_nccl_seat_t, reduced), number)) return false;
    }
    *result = read_slots(step);
    return *result == CUDA_SUCCESS && sim_nccl_may_continue(turn);
}

CUresult sim_nccl_collective_work(const sim_nccl_turn_t *turn, const sim_nccl_part_t *part) {
    size_t element = sim_nccl_type_bytes(part->type);
    uint64_t ranks = turn->comm->exchange.ranks, share = SIM_NCCL_SLOT_BYTES;
    CUresult result = CUDA_SUCCESS;
    if (is_divided(part->kind)) share = SIM_NCCL_SLOT_BYTES / ranks / sizeof(uint64_t) * sizeof(uint64_t);
    uint64_t most = share / element;
    if (!agree(turn, part)) return CUDA_SUCCESS;
    uint8_t *buffer = malloc(SIM_NCCL_SLOT_BYTES);
    if (!buffer) return CUDA_ERROR_OUT_OF_MEMORY;
    for (uint64_t first = 0; first < part->count; first += most) {
        const step_t step = {.turn = turn,
                             .part = part,
                             .number = ++turn->comm->steps,
                             .first = first,
                             .count = part->count - first < most ? part->count - first : most,
                             .element = element,
                             .share = share,
                             .buffer = buffer};
        if (!run_step(&step, &result)) break;
    }
    free(buffer);
    return result;
}
