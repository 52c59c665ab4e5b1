#include "core/transition/phases.h"

static tms_event_t event_of(const tms_transition_t *t, tms_event_kind_t kind) {
    return (tms_event_t){.kind = kind, .call = t->call, .operation = t->asked.operation, .device = TMS_NO_DEVICE};
}

void tms_phases_begin_call(tms_transition_t *t) {
    tms_events_t *events = &t->saver->events;
    const tms_selection_t *selection = t->asked.selection;
    t->nvtx = tms_nvtx_attach(&t->saver->nvtx);
    if (t->nvtx) tms_nvtx_push_call(t->nvtx, t->asked.operation, selection->tags, selection->tag_count);
    t->call = tms_events_begin_call(events);
    t->began = tms_events_now(events);
    tms_event_t event = event_of(t, TMS_EVENT_BEGIN);
    event.ended = t->began;
    tms_events_record(events, event);
}

void tms_phases_end_call(tms_transition_t *t, tms_status_t status, const tms_error_t *error) {
    tms_event_t event = event_of(t, TMS_EVENT_END);
    event.began = t->began;
    event.status = status;
    event.driver_result = status != TMS_OK && error ? error->driver_result : 0;
    event.allocations = t->done.report.allocations;
    event.bytes = t->done.report.bytes;
    event.copied_bytes = t->done.report.copied_bytes;
    event.unchanged_bytes = t->done.report.unchanged_bytes;
    tms_events_record(&t->saver->events, event);
    if (!t->nvtx) return;
    tms_nvtx_mark(t->nvtx, status, t->done.report.bytes);
    tms_nvtx_pop(t->nvtx);
}

static uint64_t listed_bytes(const tms_transition_t *t) {
    uint64_t bytes = 0;
    TMS_FOR_EACH(segment, t) bytes += tms_segment_reserved(segment);
    return bytes;
}

uint64_t tms_phases_begin(tms_transition_t *t, tms_event_phase_t phase) {
    if (t->nvtx) tms_nvtx_push(t->nvtx, phase, listed_bytes(t));
    return tms_phases_now(t);
}

void tms_phases_end(tms_transition_t *t, tms_event_phase_t phase, uint64_t began, tms_status_t status) {
    tms_phases_pop(t);
    tms_event_t event = event_of(t, TMS_EVENT_PHASE);
    event.phase = phase;
    event.began = began;
    event.status = status;
    tms_events_record(&t->saver->events, event);
}

void tms_phases_add(tms_phase_t *phase, uint64_t since, uint64_t until, uint64_t bytes, tms_status_t status) {
    if (phase->allocations++ == 0) phase->began = since;
    phase->ended = until;
    phase->busy += until - since;
    phase->bytes += bytes;
    phase->status = status;
}

void tms_phases_record_device(tms_transition_t *t, tms_event_phase_t which, int device, const tms_phase_t *phase) {
    if (phase->began == 0) return;
    tms_event_t event = event_of(t, TMS_EVENT_PHASE);
    event.phase = which;
    event.device = device;
    event.began = phase->began;
    event.ended = phase->ended;
    event.busy = phase->busy;
    event.allocations = phase->allocations;
    event.bytes = phase->bytes;
    event.status = phase->status;
    tms_events_record(&t->saver->events, event);
}

void tms_phases_sample(tms_transition_t *t) {
    if (!tms_events_sample(&t->saver->events)) return;
    for (int device = 0; device < t->devices->count; device++) {
        tms_error_t error;
        tms_error_context_t context = tms_transition_context(t, device);
        tms_event_t event = event_of(t, TMS_EVENT_MEMORY);
        if (!(t->planned.owners >> device & 1)) continue;
        event.status = tms_devices_memory(t->saver->devices, device, &event.bytes, &event.total_bytes, &context, &error);
        if (event.status != TMS_OK) event.driver_result = error.driver_result;
        event.device = device;
        tms_events_record(&t->saver->events, event);
    }
}
