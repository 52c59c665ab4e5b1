/* One call of pause or resume, shared by the modules that perform it (steps.h).
 *
 * The call owns the segments on its list: they are PAUSING or RESUMING, and no other call uses them. Used on the thread of
 * the call, except where a comment says otherwise. */
#ifndef TMS_TRANSITION_H
#define TMS_TRANSITION_H

#include "core/model/saver.h"
#include "core/model/tag_bytes.h"
#include "device/wait.h"

/* The facts for the log line of a successful call. */
typedef struct tms_transition_notes {
    tms_tag_bytes_t moved;                      /* released or mapped */
    uint64_t kept_bytes[TMS_MAX_BACKUP_STORES]; /* a pause: bytes saved, by store */
    uint64_t dropped_bytes;
} tms_transition_notes_t;

/* The request: constant during the call. */
typedef struct tms_transition_requested {
    const tms_selection_t *selection;
    const char *operation;
    tms_segment_state_t from, through, to;
    tms_tag_t **tags; /* the tags of the selection that exist; NULL: all */
    size_t tag_count;
    uint64_t address; /* 0, or selects only the allocation that it lies in, unless that is damaged */
    bool guards;      /* guard mode is on */
    bool discards;    /* a pause that also discards the backups of paused allocations */
    bool any_memory;  /* the call uses memory that need not be managed, and selects no allocation (object_call.h) */
} tms_transition_requested_t;

/* The plan of one attempt. Each attempt resets it, except for `collectable`. */
typedef struct tms_transition_planned {
    tms_segment_t *first, **end;   /* in order of allocation; a resume sorts them */
    tms_device_mask_t collectable; /* only segments of these devices are selected */
    tms_device_mask_t owners;      /* devices that own a segment on the list */
    tms_device_mask_t affected;    /* devices that have access to such a segment; with `any_memory`, that have the memory */
    tms_device_mask_t peers_seen;  /* saver->peers.seen when the list was built */
    bool incomplete;               /* the list lacks selected segments that are damaged */
    size_t discard_count;          /* segments whose backups the call discards */
    tms_run_t *runs;               /* the runs of its segments, which the call owns; a resume adds the runs that it makes */
    tms_backup_batch_t batch;      /* the batches of a pause in the stores */
    uint64_t total_bytes;          /* number of bytes to be copied */
    uint64_t unchanged_bytes;      /* a pause: number of bytes that the retained backups have already */
} tms_transition_planned_t;

/* The results of an attempt. The devices' parts write the atomics concurrently. */
typedef struct tms_transition_done {
    _Atomic uint64_t copied_bytes;  /* completed part of `total_bytes` */
    _Atomic tms_device_mask_t busy; /* devices that may still be copying after a failure */
    tms_device_mask_t guard_pages;  /* devices to whose guard page the call holds a reference */
    tms_quiesced_t quiesced;        /* a resume: the devices that may have read the guarded segments on its list */
    bool damaged;                   /* an attempt has left a segment damaged, which another attempt would skip */
    tms_report_t report;
    tms_transition_notes_t notes;
    /* These are written when the whole call has ended. */
    tms_status_t status;
    int driver_result; /* 0 after a success */
} tms_transition_done_t;

typedef struct tms_transition {
    tms_saver_t *saver;
    tms_transition_requested_t requested;
    tms_transition_planned_t planned;
    tms_transition_done_t done;
    /* Moves the segments on the list, or undoes its work, and publishes their states (tms_completion_finish). */
    tms_status_t (*act)(struct tms_transition *t, tms_error_t *error);
    /* NULL, or performs all attempts of a call that may make several. */
    tms_status_t (*perform)(struct tms_transition *t, tms_error_t *error);
    tms_pending_t *pending; /* NULL, or the handle of a resume(wait=False) */
    tms_wait_t wait;
    tms_calls_t *calls;   /* the counters of such calls; NULL: the call is not counted */
    tms_report_t *report; /* NULL, or the caller's, written on success */
    uint64_t call, began; /* its number and its begin in the events (observers.h) */
    tms_nvtx_t *nvtx;     /* NULL: no tool was attached when it began */
    bool has_turn;
    uint64_t mark; /* the mark of the current walk on the selected tags; under the lock */
    const tms_driver_table_t *driver;
    const tms_device_table_t *devices; /* NULL: nothing to act on, and the driver was not loaded */
} tms_transition_t;

#define TMS_FOR_EACH(segment, t)                                                                                            \
    for (tms_segment_t *segment = (t)->planned.first; segment; segment = segment->next_in_transition)

static inline tms_error_context_t tms_transition_context(const tms_transition_t *t, int device) {
    return (tms_error_context_t){.operation = t->requested.operation, .device = device};
}
static inline tms_error_context_t tms_transition_context_of(const tms_transition_t *t, const tms_segment_t *segment) {
    return tms_saver_context(t->requested.operation, segment);
}
static inline tms_error_context_t tms_transition_context_of_run(const tms_transition_t *t, const tms_run_t *run) {
    return (tms_error_context_t){.operation = t->requested.operation,
                                 .device = run->device,
                                 .bytes = tms_run_bytes(run),
                                 .address = run->begin,
                                 .tag = run->tag->name};
}

#endif
