#include "core/transition/restore.h"

#include <errno.h>
#include <stdlib.h>

#include "core/transition/guard_mode.h"
#include "core/transition/integrity.h"
#include "core/transition/layout.h"
#include "core/transition/observers.h"
#include "core/transition/pending.h"

/* ---- the order ---- */

static uint64_t bytes_to_load(const tms_segment_t *segment) { return tms_backup_held_bytes(&segment->backup); }

/* Merges two sorted lists. */
static tms_segment_t *merge(tms_segment_t *one, tms_segment_t *other) {
    tms_segment_t *first = NULL, **end = &first;
    while (one && other) {
        tms_segment_t **taken = bytes_to_load(one) >= bytes_to_load(other) ? &one : &other;
        *end = *taken;
        end = &(*taken)->next_in_transition;
        *taken = *end;
    }
    *end = one ? one : other;
    return first;
}

void tms_restore_sort(tms_transition_t *t) {
    enum { SEQUENCES = 8 * sizeof(size_t) };
    /* Sequence i is empty or has 2^i segments, which precede those of lower sequences. */
    tms_segment_t *sequences[SEQUENCES] = {NULL};
    tms_segment_t *segment = t->planned.first, *all = NULL;
    while (segment) {
        tms_segment_t *sequence = segment;
        segment = segment->next_in_transition;
        sequence->next_in_transition = NULL;
        int i = 0;
        for (; sequences[i]; i++) {
            sequence = merge(sequences[i], sequence);
            sequences[i] = NULL;
        }
        sequences[i] = sequence;
    }
    for (int i = 0; i < SEQUENCES; i++) all = merge(sequences[i], all);
    t->planned.first = all;
    t->planned.end = NULL; /* nothing is appended any more */
}

/* Whether all of the segment is filled before its contents, if any, are copied. */
static bool is_filled(const tms_transition_t *t, const tms_segment_t *segment) {
    return (t->requested.selection->zero || t->requested.guards) && tms_backup_lacks_contents(&segment->backup);
}

/* Whether the segment needs a copy or a fill. */
static bool is_copied(const tms_transition_t *t, const tms_segment_t *segment) {
    return bytes_to_load(segment) > 0 || is_filled(t, segment);
}

/* ---- memory ---- */

/* The restoration of one device's segments: memory, access for `peers`, contents. */
typedef struct restoration {
    tms_transition_t *t;
    int device;
    tms_device_mask_t peers;
    tms_copier_t copier;
    tms_phase_t creating, mapping, copying;
    tms_segment_t *unmapped; /* segments before it on the list have memory */
} restoration_t;

static tms_status_t make_memory(restoration_t *all, tms_run_t *run, const tms_error_context_t *context, tms_error_t *error) {
    tms_transition_t *t = all->t;
    const uint64_t bytes = tms_run_bytes(run), began = tms_observers_now(t);
    tms_observers_push(t, TMS_PHASE_CREATE, bytes);
    tms_status_t status = tms_run_create(run, t->driver, t->devices, context, error);
    tms_observers_pop(t);
    const uint64_t created = tms_observers_now(t);
    tms_phase_add(&all->creating, began, created, bytes, status);
    if (status != TMS_OK) return status;
    tms_observers_push(t, TMS_PHASE_MAP, bytes);
    status = tms_run_map(run, t->driver, all->peers, context, error);
    tms_observers_pop(t);
    tms_phase_add(&all->mapping, created, tms_observers_now(t), bytes, status);
    return status;
}

/* Makes a run for the segments that are placed with `leader`. A run that does not fit is tried with half of them, down to
 * the leader alone. A run that could not be undone also belongs to the call, and ends the attempts because its addresses are
 * taken. */
static tms_status_t make_run(restoration_t *all, tms_segment_t *leader, tms_error_t *error) {
    tms_transition_t *t = all->t;
    tms_error_context_t context = tms_transition_context_of(t, leader);
    for (;;) {
        tms_run_t *run = tms_run_make(leader, tms_layout_last(leader));
        if (!run) return tms_error_set_os(error, &context, "calloc", ENOMEM, NULL);
        context.bytes = tms_run_bytes(run);
        tms_status_t status = make_memory(all, run, &context, error);
        if (tms_run_has_memory(run)) {
            tms_layout_occupy(t, leader, run);
            return status;
        }
        free(run);
        if (status != TMS_OUT_OF_DEVICE_MEMORY || !tms_layout_halve(leader)) return status;
    }
}

/* on_idle of the copier: maps the memory of the next segment. */
static tms_status_t populate_ahead(void *context, bool *more, tms_error_t *error) {
    restoration_t *all = context;
    tms_segment_t *segment = all->unmapped;
    while (segment && (segment->device != all->device || tms_segment_is_mapped(segment)))
        segment = segment->next_in_transition;
    all->unmapped = segment;
    *more = segment != NULL;
    return segment ? make_run(all, segment->placement.leader, error) : TMS_OK;
}

/* Whether the device's free memory suffices for its segments now. */
static tms_status_t find_fit(const restoration_t *all, bool *fits, tms_error_t *error) {
    const tms_transition_t *t = all->t;
    tms_error_context_t context = tms_transition_context(t, all->device);
    uint64_t needed = 0, free_bytes = 0, total_bytes = 0;
    TMS_FOR_EACH(segment, t) needed += segment->device == all->device ? tms_segment_reserved(segment) : 0;
    tms_status_t status = tms_devices_memory(t->saver->devices, all->device, &free_bytes, &total_bytes, &context, error);
    *fits = free_bytes >= needed;
    return status;
}

/* ---- contents ---- */

static tms_status_t load(restoration_t *all, tms_segment_t *segment, tms_error_t *error) {
    const tms_transition_t *t = all->t;
    tms_error_context_t context = tms_transition_context_of(t, segment);
    CUdeviceptr address = tms_segment_address(segment);
    tms_status_t status = TMS_OK;
    if (is_filled(t, segment))
        status = tms_copier_fill(&all->copier, address, tms_segment_reserved(segment),
                                 t->requested.selection->zero ? 0 : TMS_GUARD_BYTE, &context, error);
    return status == TMS_OK ? tms_backup_load(&segment->backup, &t->saver->stores, &all->copier, address, &context, error)
                            : status;
}

/* Maps and loads each segment. Memory of the next ones is mapped while contents are copied. */
static tms_status_t restore_segments(restoration_t *all, tms_wait_t *wait, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    TMS_FOR_EACH(segment, all->t) {
        if (status != TMS_OK) break;
        if (segment->device != all->device) continue;
        tms_error_context_t context = tms_transition_context_of(all->t, segment);
        /* A run that was tried with half of its segments may not contain this segment. */
        while (status == TMS_OK && !tms_segment_is_mapped(segment)) status = make_run(all, segment->placement.leader, error);
        if (status == TMS_OK && all->copier.open) status = load(all, segment, error);
        if (status == TMS_OK) status = tms_wait_check(wait, &context, error);
    }
    return status;
}

/* Copies all contents to the device. While the bus is busy, maps the segments that have no memory yet. */
static tms_status_t copy_all(restoration_t *all, tms_wait_t *wait, const tms_error_context_t *context, tms_error_t *error) {
    tms_transition_t *t = all->t;
    /* A pending resume queues all its copies without checking for cancellation between them. */
    tms_status_t status =
        tms_copier_open(&all->copier, &t->saver->stores.copying, all->device, t->pending ? NULL : wait, context, error);
    all->copier.done = &t->done.copied_bytes;
    all->copier.on_idle = populate_ahead;
    all->copier.on_idle_context = all;
    if (status == TMS_OK) status = restore_segments(all, wait, error);
    if (status == TMS_FORKED) return status; /* in a forked child: the stream and its context belong to the parent */
    if (status == TMS_OK) status = tms_copier_queue_all(&all->copier, error);
    if (status == TMS_OK) status = tms_integrity_check(t, &all->copier, wait, error);
    if (status == TMS_FORKED) return status;
    if (status == TMS_OK) status = tms_pending_ready(t->pending, all->device, &all->copier, context, error);
    if (status == TMS_OK) status = tms_copier_wait(&all->copier, context, error);
    if (!tms_copier_close(&all->copier)) atomic_fetch_or(&t->done.busy, (tms_device_mask_t)1 << all->device);
    return status;
}

static tms_status_t restore(restoration_t *all, tms_wait_t *wait, tms_error_t *error) {
    tms_transition_t *t = all->t;
    const int device = all->device;
    tms_error_context_t context = tms_transition_context(t, device);
    bool copies = false, fits = true;
    TMS_FOR_EACH(segment, t) {
        if (segment->device != device || !is_copied(t, segment)) continue;
        copies = true;
        all->copying.allocations++;
        all->copying.bytes += tms_backup_held_bytes(&segment->backup);
    }
    tms_status_t status = tms_guard_mode_lift(t, device, error);
    if (status == TMS_OK) status = tms_devices_peers(t->saver->devices, device, &all->peers, &context, error);
    if (status == TMS_OK && copies) status = find_fit(all, &fits, error);
    /* If the memory does not suffice, mapping fails here, before anything is copied. */
    if (status == TMS_OK && (!copies || !fits)) status = restore_segments(all, wait, error);
    if (status != TMS_OK) return status;
    if (!copies) return tms_pending_ready(t->pending, device, NULL, &context, error);
    all->copying.began = tms_observers_now(t);
    tms_observers_push(t, TMS_PHASE_COPY, all->copying.bytes);
    all->copying.status = status = copy_all(all, wait, &context, error);
    tms_observers_pop(t);
    tms_observers_record_phase(t, TMS_PHASE_COPY, device, &all->copying);
    return status;
}

tms_status_t tms_restore_device(tms_transition_t *t, int device, tms_wait_t *wait, tms_error_t *error) {
    restoration_t all = {.t = t, .device = device, .unmapped = t->planned.first};
    tms_status_t status = restore(&all, wait, error);
    if (status == TMS_FORKED) return status; /* in a forked child, whose ring has nothing of the parent */
    tms_observers_record_phase(t, TMS_PHASE_CREATE, device, &all.creating);
    tms_observers_record_phase(t, TMS_PHASE_MAP, device, &all.mapping);
    return status;
}
