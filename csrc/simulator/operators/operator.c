#include "simulator/operators/operator.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "simulator/base/simulation.h"
#include "simulator/memory/access.h"
#include "simulator/memory/mapping.h"
#include "simulator/operators/channel.h"
#include "simulator/work/op.h"

enum { FIRST_CAPACITY = 16 };

typedef struct operator {
    sim_task_t task; /* must be first */
    tms_sim_operand_t *operands;
    size_t operand_count;
    char *name;
    char *body;
    size_t bytes;
    bool draws;
    tms_sim_draw_t draw;
    bool answered;
    sim_reply_t reply;
} operator_t;

typedef struct pin {
    sim_mapping_t *mapping;
} pin_t;

/* The pinned mappings of an operator, their placements, and the memory that became stale since the previous operator. */
typedef struct pinned {
    pin_t *pins;
    sim_placement_t *placements;
    int *descriptors;
    size_t count, capacity;
    sim_stale_t *stale;
    size_t stale_count;
} pinned_t;

static bool grow(pinned_t *pinned) {
    if (pinned->count < pinned->capacity) return true;
    size_t capacity = pinned->capacity ? 2 * pinned->capacity : FIRST_CAPACITY;
    void *pins = realloc(pinned->pins, capacity * sizeof *pinned->pins);
    if (pins) pinned->pins = pins;
    void *placements = realloc(pinned->placements, capacity * sizeof *pinned->placements);
    if (placements) pinned->placements = placements;
    void *descriptors = realloc(pinned->descriptors, capacity * sizeof *pinned->descriptors);
    if (descriptors) pinned->descriptors = descriptors;
    if (!pins || !placements || !descriptors) return false;
    pinned->capacity = capacity;
    return true;
}

static void unpin(pinned_t *pinned) {
    for (size_t i = 0; i < pinned->count; i++) sim_memory_unpin(pinned->pins[i].mapping);
    free(pinned->pins);
    free(pinned->placements);
    free(pinned->descriptors);
    free(pinned->stale);
    *pinned = (pinned_t){0};
}

/* Records the placement of a pinned mapping. */
static bool record_placement(const sim_mapping_t *mapping, sim_placement_t *to, int *descriptor) {
    sim_physical_t *physical = mapping->physical;
    sim_reservation_t *range = sim_memory_reservation_at(mapping->address);
    struct stat status;
    *descriptor = physical->file >= 0 ? physical->file : sim_state.devices[physical->device].memory;
    if (!range || fstat(*descriptor, &status) != 0) return false;
    range->sent = physical->sent = true;
    *to = (sim_placement_t){.range = range->address,
                            .range_bytes = range->bytes,
                            .address = mapping->address,
                            .bytes = mapping->span,
                            .file = status.st_ino,
                            .offset = (uint64_t)physical->offset};
    return true;
}

static CUresult pin_operand(const sim_context_t *context, const tms_sim_operand_t *operand, pinned_t *pinned) {
    for (uint64_t at = operand->address, end = at + operand->bytes; at < end;) {
        uint64_t bytes = end - at;
        if (!grow(pinned)) return CUDA_ERROR_OUT_OF_MEMORY;
        sim_mapping_t *mapping = sim_memory_pin(at, &bytes, 1U << context->device, operand->written != 0, context);
        if (!mapping) return CUDA_ERROR_ILLEGAL_ADDRESS;
        pinned->pins[pinned->count++].mapping = mapping;
        if (!record_placement(mapping, &pinned->placements[pinned->count - 1], &pinned->descriptors[pinned->count - 1]))
            return CUDA_ERROR_OPERATING_SYSTEM;
        at += bytes;
    }
    return CUDA_SUCCESS;
}

static CUresult pin_all(const sim_context_t *context, const operator_t *operator, pinned_t *pinned) {
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < operator->operand_count && result == CUDA_SUCCESS; i++)
        result = pin_operand(context, &operator->operands[i], pinned);
    return result;
}

/* Without a caller that waits for the reply, a failed operator is reported like a failed device assertion. Otherwise the
 * reply carries the failure. */
static CUresult call_device_process(operator_t *operator, const pinned_t *pinned, uint64_t number) {
    const sim_request_t request = {.number = number,
                                   .placements = pinned->placements,
                                   .descriptors = pinned->descriptors,
                                   .count = pinned->count,
                                   .stale = pinned->stale,
                                   .stale_count = pinned->stale_count,
                                   .body = operator->body,
                                   .bytes = operator->bytes};
    sim_reply_t reply = {.status = SIM_REPLY_DONE};
    if (!sim_channel_call(&request, &reply)) return CUDA_ERROR_LAUNCH_FAILED;
    if (operator->answered) {
        free(operator->reply.text);
        operator->reply = reply;
        return CUDA_SUCCESS;
    }
    if (reply.status != SIM_REPLY_DONE) fprintf(stderr, "simulated GPU: %s\n", reply.text);
    free(reply.text);
    return reply.status == SIM_REPLY_DONE ? CUDA_SUCCESS : CUDA_ERROR_ASSERT;
}

/* Replaces the addresses of a captured draw by the values of this replay. False if they are not accessible. */
static bool read_draw(const sim_context_t *context, tms_sim_draw_t *draw) {
    uint64_t seed = 0, offset = 0;
    if (!draw->captured) return true;
    if (!sim_memory_read_word(context, draw->seed, &seed)) return false;
    if (!sim_memory_read_word(context, draw->offset, &offset)) return false;
    *draw = (tms_sim_draw_t){.seed = seed, .offset = offset + draw->addend};
    return true;
}

/* Every bit of the result depends on every bit of the input. The constants are those of the splitmix64 generator. */
static uint64_t mix(uint64_t number) {
    number += 0x9E3779B97F4A7C15U;
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9U;
    number = (number ^ (number >> 27)) * 0x94D049BB133111EBU;
    return number ^ (number >> 31);
}

/* The number drawn, which is not negative as an int64_t. The draw is not captured. */
static uint64_t number_of(const tms_sim_draw_t *draw) {
    static const uint64_t factor = 0x9E3779B97F4A7C15U; /* distributes small seeds over the range */
    return mix(mix(draw->seed * factor + draw->offset)) & INT64_MAX;
}

static CUresult work(sim_stream_t *stream, sim_task_t *task) {
    operator_t *operator = (operator_t *)task;
    pinned_t pinned = {0};
    while (sim_state.unmapping && sim_state_may_continue(stream)) pthread_cond_wait(&sim_state.changed, &sim_state.lock);
    if (!sim_state_may_continue(stream)) return CUDA_SUCCESS;
    CUresult result = pin_all(stream->context, operator, &pinned);
    tms_sim_draw_t draw = operator->draw; /* a graph draws from the original at every launch */
    if (result == CUDA_SUCCESS && !read_draw(stream->context, &draw)) result = CUDA_ERROR_ILLEGAL_ADDRESS;
    if (result == CUDA_SUCCESS) {
        uint64_t number = operator->draws ? number_of(&draw) : 0;
        pinned.stale = sim_stale_take(&pinned.stale_count);
        pthread_mutex_unlock(&sim_state.lock);
        result = call_device_process(operator, &pinned, number);
        pthread_mutex_lock(&sim_state.lock);
    }
    unpin(&pinned);
    return result;
}

static void destroy(sim_task_t *task) {
    operator_t *operator = (operator_t *)task;
    free(operator->operands);
    free(operator->name);
    free(operator->body);
    free(operator->reply.text);
    free(operator);
}

sim_task_t *sim_operator_new(const tms_sim_operator_t *description, bool answered) {
    operator_t *operator = calloc(1, sizeof *operator);
    if (!operator) return NULL;
    *operator = (operator_t){.task = {.references = 1, .work = work, .destroy = destroy},
                             .operands = calloc(description->operand_count + 1, sizeof *description->operands),
                             .operand_count = description->operand_count,
                             .name = description->name ? strdup(description->name) : NULL,
                             .body = malloc(description->bytes + 1),
                             .bytes = description->bytes,
                             .draws = description->draw != NULL,
                             .draw = description->draw ? *description->draw : (tms_sim_draw_t){0},
                             .answered = answered};
    if (!operator->operands || !operator->body) {
        destroy(&operator->task);
        return NULL;
    }
    operator->task.name = operator->name;
    if (description->operand_count)
        memcpy(operator->operands, description->operands, description->operand_count * sizeof *description->operands);
    memcpy(operator->body, description->request, description->bytes);
    return &operator->task;
}

const char *sim_operator_reply(const sim_task_t *task, size_t *bytes) {
    const operator_t *operator = (const operator_t *)task;
    *bytes = operator->reply.bytes;
    return operator->reply.text;
}
