#include "simulator/work/event.h"

#include <stdlib.h>

#include "simulator/base/state.h"
#include "simulator/base/table.h"
#include "simulator/work/event_shared.h"
#include "simulator/work/nodes.h"

sim_event_t *sim_event_new(unsigned flags) {
    sim_event_t *event = calloc(1, sizeof *event);
    if (!event) return NULL;
    *event = (sim_event_t){.id = sim_state_new_id(), .references = 1, .flags = flags, .shared_file = -1};
    if (sim_table_insert(&sim_state.events, event->id, event)) return event;
    free(event);
    return NULL;
}

void sim_event_release(sim_event_t *event) {
    if (--event->references) return;
    sim_event_unshare(event);
    sim_nodes_clear(&event->nodes);
    free(event);
}

void sim_event_clear(void) {
    for (size_t i = 0; i < sim_state.events.count; i++) sim_event_release(sim_state.events.slots[i].value);
    sim_table_release(&sim_state.events);
}

void sim_event_reach(sim_event_t *event, uint64_t number) {
    if (event->shared) sim_event_shared_reach(event, number);
    if (number < event->completed) return;
    event->completed = number;
    clock_gettime(CLOCK_MONOTONIC, &event->time);
}

uint64_t sim_event_note(sim_event_t *event, const sim_stream_t *stream, uint64_t position) {
    event->stream = stream->id;
    event->device = stream->context->device;
    event->position = position;
    event->captured = false;
    event->capture = NULL;
    event->records = event->shared ? sim_event_shared_record(event) : event->records + 1;
    return event->records;
}
