#include "core/transition/observers.h"

#include "base/clock.h"

/* ---- the counters ---- */

static void count_call(tms_transition_t *t) {
    const tms_report_t *report = &t->done.report;
    if (!t->calls) return;
    tms_stats_add(t->done.status == TMS_OK ? &t->calls->successes : &t->calls->failures, 1);
    if (t->done.status != TMS_OK) return;
    tms_stats_add(&t->calls->nanoseconds, (uint64_t)(report->seconds * TMS_NANOSECONDS));
    tms_stats_add(&t->calls->bytes, report->bytes);
    tms_stats_add(&t->calls->copied_bytes, report->copied_bytes);
    tms_stats_add(&t->calls->unchanged_bytes, report->unchanged_bytes);
}

/* ---- the shared page ---- */

static tms_shared_page_call_t page_call(const tms_transition_t *t) {
    if (t->requested.from == t->requested.to) return TMS_SHARED_PAGE_IDLE;
    return t->requested.from == TMS_SEGMENT_ACTIVE ? TMS_SHARED_PAGE_PAUSE : TMS_SHARED_PAGE_RESUME;
}

tms_shared_page_outcome_t tms_observers_outcome(const tms_transition_t *t, bool succeeded) {
    return (tms_shared_page_outcome_t){.call = page_call(t),
                                       .succeeded = succeeded,
                                       .ended = tms_clock_nanoseconds(),
                                       .nanoseconds = (uint64_t)(tms_wait_elapsed(&t->wait) * TMS_NANOSECONDS)};
}

static void begin_moves_on_page(tms_transition_t *t) {
    tms_shared_page_t *page = &t->saver->shared_page;
    if (!tms_shared_page_is_open(page)) return;
    tms_shared_page_begin_moves(page, page_call(t), tms_clock_nanoseconds());
    tms_shared_page_publish(page);
}

static void end_moves_on_page(tms_transition_t *t) {
    tms_shared_page_end_moves(&t->saver->shared_page);
    tms_shared_page_publish(&t->saver->shared_page);
}

static void count_call_on_page(tms_transition_t *t) {
    tms_shared_page_t *page = &t->saver->shared_page;
    if (!tms_shared_page_is_open(page)) return;
    const tms_shared_page_outcome_t outcome = tms_observers_outcome(t, t->done.status == TMS_OK);
    pthread_mutex_lock(&t->saver->lock);
    tms_shared_page_count_call(page, &outcome);
    tms_shared_page_publish(page);
    pthread_mutex_unlock(&t->saver->lock);
}

/* ---- the report ---- */

static void report_call(tms_transition_t *t) {
    const tms_tag_bytes_t *moved = &t->done.notes.moved;
    if (t->done.status != TMS_OK || !t->report) return;
    *t->report = t->done.report;
    for (size_t i = 0; i < moved->named; i++) {
        t->report->tags[i] = moved->tag[i]->name;
        t->report->tag_bytes[i] = moved->bytes[i];
    }
}

/* ---- NVTX ---- */

static void push_call(tms_transition_t *t) {
    const tms_selection_t *selection = t->requested.selection;
    t->nvtx = tms_nvtx_attach(&t->saver->nvtx);
    if (t->nvtx) tms_nvtx_push_call(t->nvtx, t->requested.operation, selection->tags, selection->tag_count);
}

static void pop_call(tms_transition_t *t) {
    if (!t->nvtx) return;
    tms_nvtx_mark(t->nvtx, t->done.status, t->done.report.bytes);
    tms_nvtx_pop(t->nvtx);
}

/* ---- the event ring ---- */

static tms_event_t event_of(const tms_transition_t *t, tms_event_kind_t kind) {
    return (tms_event_t){.kind = kind, .call = t->call, .operation = t->requested.operation, .device = TMS_NO_DEVICE};
}

static void record_begin(tms_transition_t *t) {
    tms_events_t *events = &t->saver->events;
    t->call = tms_events_begin_call(events);
    t->began = tms_events_now(events);
    tms_event_t event = event_of(t, TMS_EVENT_BEGIN);
    event.ended = t->began;
    tms_events_record(events, event);
}

static void record_end(tms_transition_t *t) {
    tms_event_t event = event_of(t, TMS_EVENT_END);
    event.began = t->began;
    event.status = t->done.status;
    event.driver_result = t->done.driver_result;
    event.allocations = t->done.report.allocations;
    event.bytes = t->done.report.bytes;
    event.copied_bytes = t->done.report.copied_bytes;
    event.unchanged_bytes = t->done.report.unchanged_bytes;
    tms_events_record(&t->saver->events, event);
}

/* ---- the log ---- */

/* Appends ", <bytes> of contents <where> <place>" unless `bytes` is 0. */
static void append_part(tms_error_t *line, uint64_t bytes, const char *where, const char *place) {
    if (!bytes) return;
    tms_error_append(line, ", ");
    tms_error_append_bytes(line, bytes);
    tms_error_append(line, " of contents %s%s", where, place);
}

/* Writes one line, at level info. */
static void log_moves(const tms_transition_t *t) {
    const tms_transition_notes_t *notes = &t->done.notes;
    const tms_backup_stores_t *stores = &t->saver->stores;
    unsigned long long allocations = t->done.report.allocations;
    tms_error_t line; /* not an error: only used to build the text */
    if (!tms_log_enabled(t->saver->log, TMS_LOG_INFO)) return;
    tms_error_clear(&line);
    tms_error_append(&line, "%s: %llu allocation%s, ", t->requested.operation, allocations, allocations == 1 ? "" : "s");
    tms_error_append_bytes(&line, t->done.report.bytes);
    tms_error_append(&line, ", in %.3f seconds", t->done.report.seconds);
    for (int i = 0; i < stores->count; i++)
        append_part(&line, notes->kept_bytes[i], "to ", stores->list[i].operations->place);
    append_part(&line, t->done.report.unchanged_bytes, "unchanged since the last pause", "");
    append_part(&line, notes->dropped_bytes, "dropped", "");
    if (t->requested.to == TMS_SEGMENT_ACTIVE) append_part(&line, t->done.report.copied_bytes, "from backups", "");
    tms_error_append(&line, "; now ");
    tms_error_append_bytes(&line, tms_stats_read(&t->saver->account.mapped.now));
    tms_error_append(&line, " are resident and ");
    tms_error_append_bytes(&line, tms_stats_read(&t->saver->account.paused_bytes));
    tms_error_append(&line, " paused");
    if (notes->moved.named) tms_error_append(&line, "; by tag: ");
    tms_tag_bytes_append(&notes->moved, &line);
    tms_log_write(t->saver->log, TMS_LOG_INFO, "%s", line.message);
}

static void log_call(tms_transition_t *t) {
    if (t->done.status == TMS_OK && t->requested.from != t->requested.to) log_moves(t);
    tms_log_summarize(t->saver->log, false);
}

/* ---- the list ---- */

/* An observer has a function for each moment, or NULL. */
typedef void (*const observer_t[TMS_MOMENTS])(tms_transition_t *t);

static observer_t observers[] = {
    {[TMS_CALL_ENDS] = count_call},
    {[TMS_MOVES_BEGIN] = begin_moves_on_page, [TMS_MOVES_END] = end_moves_on_page, [TMS_CALL_ENDS] = count_call_on_page},
    {[TMS_CALL_ENDS] = report_call},
    {[TMS_CALL_BEGINS] = push_call, [TMS_CALL_ENDS] = pop_call},
    {[TMS_CALL_BEGINS] = record_begin, [TMS_CALL_ENDS] = record_end},
    {[TMS_CALL_ENDS] = log_call},
};

void tms_observers_notify(tms_transition_t *t, tms_moment_t moment) {
    for (size_t i = 0; i < sizeof observers / sizeof *observers; i++) {
        if (observers[i][moment]) observers[i][moment](t);
    }
}

/* ---- phases ---- */

static uint64_t listed_bytes(const tms_transition_t *t) {
    uint64_t bytes = 0;
    TMS_FOR_EACH(segment, t) bytes += tms_segment_reserved(segment);
    return bytes;
}

uint64_t tms_observers_begin_phase(tms_transition_t *t, tms_event_phase_t which) {
    if (t->nvtx) tms_nvtx_push(t->nvtx, which, listed_bytes(t));
    return tms_observers_now(t);
}

void tms_observers_end_phase(tms_transition_t *t, tms_event_phase_t which, uint64_t began, tms_status_t status) {
    const tms_phase_t phase = {.began = began, .status = status};
    tms_observers_pop(t);
    tms_observers_record_phase(t, which, TMS_NO_DEVICE, &phase);
}

void tms_observers_record_phase(tms_transition_t *t, tms_event_phase_t which, int device, const tms_phase_t *phase) {
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

void tms_phase_add(tms_phase_t *phase, uint64_t since, uint64_t until, uint64_t bytes, tms_status_t status) {
    if (phase->allocations++ == 0) phase->began = since;
    phase->ended = until;
    phase->busy += until - since;
    phase->bytes += bytes;
    phase->status = status;
}

void tms_observers_sample_memory(tms_transition_t *t) {
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
