/* A run: one physical handle, mapped at the addresses of one segment or of several neighbours.
 *
 * An allocation gets a run of its own. A resume backs neighbours that come back together by one run (transition/layout.h):
 * most of what a pause and a resume cost is the number of handles. Segments of a run have one tag, backup and device, and
 * are always in the same state, since pauses select tags. A part of a run whose segment was freed is *slack*: it stays
 * mapped, and the next allocation of its kind gets it without a driver call. With several devices, every allocation checks
 * which devices are in use and grants a new one access; an allocation from slack does so as well (peers.h).
 *
 * A run lives as long as a segment refers to it, a freed one included until its end, or a call owns it. The spans of its
 * addresses (base/address_space.h) lie between `first` and `end`. The run of a segment that the program maps has that
 * segment alone, and no spans.
 *
 * A call that moves segments owns their runs until it ends. Slack of an owned run is not handed out. A freed segment that
 * would leave an owned run waits, and the owner retires it. So the memory of a run is released once: by its owner, or with
 * its last segment.
 *
 * The functions that call the driver take one step each, which they undo if it fails. They change only the run, so they need
 * no lock. The thread whose segment alone refers to the run may call them, and the call that owns its segments. The
 * functions that say so need the saver's lock. */
#ifndef TMS_RUN_H
#define TMS_RUN_H

#include "base/address_space.h"
#include "base/descriptors.h"
#include "core/model/segment.h"
#include "device/device.h"

/* The largest run of several segments: larger ones have no neighbours. */
#define TMS_MAX_RUN_BYTES TMS_SPACE_ALONE_BYTES

typedef struct tms_run {
    uint64_t begin, end;
    int device;
    tms_tag_t *tag;
    bool mapped;     /* `handle` is mapped and accessible */
    bool has_handle; /* `handle` must be released */
    CUmemGenericAllocationHandle handle;
    tms_device_mask_t accessible; /* devices that have access, owner included */

    /* Under the saver's lock. */
    tms_span_t *first;      /* the span at `begin` */
    size_t segments;        /* number of references: one of each segment, and one of the call that owns the run */
    bool owned;             /* a call owns the run and its segments */
    bool damaged;           /* its segments are DAMAGED */
    bool releasing;         /* a pause has begun to release it; that pause reads this without the lock */
    bool taken_over;        /* the program has taken its memory over during a pause, which keeps it (allocation/handles.h) */
    tms_segment_t *waiting; /* freed segments that the owner of the run retires at its end */
    tms_status_t refused_status; /* the status of the last failed attempt to repair it that the driver has answered */
    char refused_call[TMS_ERROR_NAME_BYTES]; /* the driver call that failed then, and its result; "": no answer yet */
    int refused_result;

    /* Under the saver's lock if no call owns the run, and without the lock by the call that does, or that has taken the last
     * reference. */
    tms_descriptor_t exported;    /* descriptor of `handle` once exported (export.h); closed before the memory is released */
    uint64_t generation;          /* the number of that export in the process */
    uint64_t mark;                /* mark of the last walk over segments that visited it */
    tms_device_mask_t reached;    /* devices that had access, recorded by the pause that owns it */
    struct tms_run *next_in_call; /* in the list of the call that owns it */
    tms_quarantined_t quarantined; /* used once no segment refers to it */
    tms_quiesced_t quiesced;       /* used then, for the next attempt to unmap it */
} tms_run_t;

static inline uint64_t tms_run_bytes(const tms_run_t *run) { return run->end - run->begin; }
/* Whether something must still be released. */
static inline bool tms_run_has_memory(const tms_run_t *run) { return run->mapped || run->has_handle; }

/* Creates physical memory. The run must have none. */
tms_status_t tms_run_create(tms_run_t *run, const tms_driver_table_t *driver, const tms_device_table_t *devices,
                            const tms_error_context_t *context, tms_error_t *error);
/* Maps the memory that was created at the addresses and grants the owner and `peers` access. On failure the memory is
 * released; if undoing failed too, `has_handle` and `mapped` show what is left. */
tms_status_t tms_run_map(tms_run_t *run, const tms_driver_table_t *driver, tms_device_mask_t peers,
                         const tms_error_context_t *context, tms_error_t *error);
/* Creates the memory and maps it. */
tms_status_t tms_run_populate(tms_run_t *run, const tms_driver_table_t *driver, const tms_device_table_t *devices,
                              tms_device_mask_t peers, const tms_error_context_t *context, tms_error_t *error);
/* Closes the descriptor, unmaps and releases the memory. Does nothing without memory. After a failure `mapped` and
 * `has_handle` show what is left. TMS_INVALID_STATE, with nothing changed, if a device with access is not quiesced. */
tms_status_t tms_run_depopulate(tms_run_t *run, tms_quiesced_t quiesced, const tms_driver_table_t *driver,
                                const tms_error_context_t *context, tms_error_t *error);
/* Grants access to devices of `peers` that lack it. */
tms_status_t tms_run_share(tms_run_t *run, const tms_driver_table_t *driver, tms_device_mask_t peers,
                           const tms_error_context_t *context, tms_error_t *error);
/* Sets the access of devices to addresses. For this module and guard pages. */
tms_status_t tms_run_set_access(uint64_t begin, uint64_t bytes, const tms_driver_table_t *driver, tms_device_mask_t devices,
                                CUmemAccess_flags flags, const tms_error_context_t *context, tms_error_t *error);

/* ---- references ---- */

/* Makes a run of its own for a segment that has no addresses yet. Returns NULL if host memory is short. */
tms_run_t *tms_run_make_unplaced(tms_segment_t *segment, uint64_t bytes);
/* Makes a run for the addresses from `first` up to the end of `last`, which lie side by side. No segment refers to it yet,
 * and it has no memory. Returns NULL if host memory is short. */
tms_run_t *tms_run_make(const tms_segment_t *first, const tms_segment_t *last);
/* Makes the segment refer to the run. Called under the lock, or before either is visible to other threads. */
void tms_run_attach(tms_run_t *run, tms_segment_t *segment);
/* Under the lock: ends the reference of a segment to its run, whose memory stays. Returns whether it was the last. */
bool tms_run_drop_reference(tms_segment_t *segment);
/* Under the lock: ends the reference of a segment to its run, which has lost its memory. Frees the run with the last
 * reference. */
void tms_run_detach(tms_segment_t *segment);
/* Gives a segment that no other thread sees a run of its own with memory (tms_run_populate), if it has none yet. */
tms_status_t tms_run_populate_own(tms_segment_t *segment, const tms_driver_table_t *driver,
                                  const tms_device_table_t *devices, tms_device_mask_t peers,
                                  const tms_error_context_t *context, tms_error_t *error);

/* Under the lock: makes the call that owns the segments of a run the owner of the run, and puts the run on the call's list.
 * Does nothing if the call owns it already. */
void tms_run_own(tms_run_t *run, tms_run_t **list);
/* Under the lock: ends the ownership of a call, and drops its reference. `damaged`: the segments of the run are DAMAGED.
 * Otherwise its free addresses can be handed out again, with its slack if it still has memory. Adds the freed segments that
 * have waited to *freed, linked by `next_in_transition`. */
void tms_run_disown(tms_run_t *run, bool damaged, tms_segment_t **freed);
/* Under the lock: if a call owns the run of a freed segment, makes the segment wait for the end of that call. Returns
 * whether it does. */
bool tms_run_defer_to_owner(tms_segment_t *segment);

static inline bool tms_segment_is_mapped(const tms_segment_t *segment) { return segment->run && segment->run->mapped; }
static inline bool tms_segment_has_memory(const tms_segment_t *segment) {
    return segment->run && tms_run_has_memory(segment->run);
}
/* Returns the devices that have access to a segment's memory or to its guard page. */
static inline tms_device_mask_t tms_segment_accessible(const tms_segment_t *segment) {
    return segment->run ? segment->run->accessible : segment->readers;
}

#endif
