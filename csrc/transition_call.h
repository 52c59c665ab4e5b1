/* Inside of transition.c, pause.c, resume.c and restore.c: one call of pause or resume, and the steps that both have.
 *
 * The segments on a call's list are in its state (PAUSING or RESUMING) and nobody else touches them. What the steps must do
 * in which order is in transition.h. */
#ifndef TMS_TRANSITION_CALL_H
#define TMS_TRANSITION_CALL_H

#include "tag_bytes.h"
#include "transition.h"
#include "wait.h"

/* What the log says of one call that has succeeded. */
typedef struct tms_transition_notes {
    tms_tag_bytes_t moved;                          /* released or mapped */
    uint64_t host_bytes, disk_bytes, dropped_bytes; /* a pause: where contents went */
} tms_transition_notes_t;

typedef struct tms_transition {
    tms_saver_t *saver;
    const tms_selection_t *selection;
    tms_tag_t **tags; /* those of the selection that exist; NULL: all */
    size_t tag_count;
    uint64_t mark; /* of the look at all segments under way, on the tags selected; under the lock */
    const char *operation;
    tms_segment_state_t from, through, to;
    /* Moves the segments on the list, or undoes what it did, and publishes where they ended up (tms_transition_finish). */
    tms_status_t (*act)(struct tms_transition *t, tms_error_t *error);
    /* NULL, or: one whole attempt of a call that makes several. */
    tms_status_t (*perform)(struct tms_transition *t, tms_error_t *error);
    bool has_turn;
    tms_wait_t wait;
    struct tms_host_batch *batch;  /* NULL, or the host memory that a pause is making ready */
    tms_pending_t *pending;        /* NULL, or who waits for the end of a resume that nobody waits for */
    tms_segment_t *first, **end;   /* in order of allocation; a resume sorts them */
    tms_device_mask_t collectable; /* only segments of these devices may come on the list */
    tms_device_mask_t owners;      /* devices that own a segment on the list */
    tms_device_mask_t affected;    /* devices that can access one */
    const tms_driver_table_t *driver;
    const tms_device_table_t *devices; /* NULL: there was nothing to act on, and the driver has not been asked for */
    tms_device_mask_t peers_seen;      /* saver->peers.seen when the list was made */
    bool incomplete;                   /* the list lacks selected segments, which are damaged */
    _Atomic tms_device_mask_t busy;    /* devices that may still be copying although a call of theirs has failed */
    bool damaged;                      /* an attempt has left something damaged: another would pass over it */
    _Atomic uint64_t done_bytes;       /* of `total_bytes`, copied for certain */
    uint64_t total_bytes;              /* that this attempt copies */
    _Atomic uint64_t mapped_bytes;     /* that this attempt has mapped */
    tms_report_t report;
    tms_transition_notes_t notes;
} tms_transition_t;

#define TMS_FOR_EACH(segment, t) for (tms_segment_t *segment = (t)->first; segment; segment = segment->next_in_transition)

static inline tms_error_context_t tms_transition_context(const tms_transition_t *t, int device) {
    return (tms_error_context_t){.operation = t->operation, .device = device};
}
static inline tms_error_context_t tms_transition_context_of(const tms_transition_t *t, const tms_segment_t *segment) {
    return (tms_error_context_t){.operation = t->operation,
                                 .device = segment->device,
                                 .bytes = tms_segment_reserved(segment),
                                 .address = tms_segment_address(segment),
                                 .tag = segment->tag->name};
}

/* The frame of a call: checks, the turn, the list, the counters, the report. */
tms_status_t tms_transition_run(tms_transition_t *t, _Atomic uint64_t *successes, tms_report_t *report, tms_error_t *error);
/* One attempt: takes the turn, collects the list, acts, and gives the turn to the next. */
tms_status_t tms_transition_attempt(tms_transition_t *t, tms_error_t *error);

/* Under the lock, before a look at all segments: marks the tags selected, so that asking for each segment costs no search.
 * The mark holds until the lock is given up. */
void tms_transition_begin_look(tms_transition_t *t);
/* Under the lock, in such a look. */
bool tms_transition_selects(const tms_transition_t *t, const tms_segment_t *segment);
/* In such a look: whether it is selected, but the driver has not taken its memory back, so that a resume has passed it over.
 */
bool tms_transition_passes_over(const tms_transition_t *t, const tms_segment_t *segment);

/* One device's part of a call. It runs on the thread of the call or on one of its own, beside those of other devices, and
 * touches only the segments of its device. `wait` is the call's, or says to stop when the call is to stop or another
 * device's part has failed. */
typedef tms_status_t (*tms_device_work_t)(tms_transition_t *t, int device, tms_wait_t *wait, tms_error_t *error);
/* Does that for every device of the mask at once, and waits for all of them. The first failure, if there is one. After
 * TMS_FORKED the threads are the parent's. */
tms_status_t tms_transition_on_devices(tms_transition_t *t, tms_device_mask_t devices, tms_device_work_t work,
                                       tms_error_t *error);
/* Tells the caller how far the copies are, if it wants to know. On the thread of the call. */
void tms_transition_report_progress(const tms_transition_t *t);

/* Puts those with most to copy first, and leaves others in their order: while the bus is busy with them, the rest gets its
 * memory, which costs time for every segment, however small. */
void tms_restore_sort(tms_transition_t *t);
/* One device's part of a resume: memory, access and contents for its segments. */
tms_status_t tms_restore_device(tms_transition_t *t, int device, tms_wait_t *wait, tms_error_t *error);

/* transition_log.c. Under the lock: notes a segment that has done what the call is for, for the log. */
void tms_transition_note(tms_transition_t *t, const tms_segment_t *segment);
/* One line, at level info, about a call that has succeeded. */
void tms_transition_log(const tms_transition_t *t);

/* Publishes every segment's new state (`moved`: it did what the call is for) and finishes the frees that came meanwhile. The
 * list is empty afterwards. */
void tms_transition_finish(tms_transition_t *t, bool moved);

#endif
