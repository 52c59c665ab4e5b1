/* The bookkeeping of runs (core/run.h): which segments refer to them, their slack, and their end.
 *
 * A call that moves segments owns their runs until it ends. Slack of an owned run is not handed out. A freed segment that
 * would leave an owned run waits, and the owner retires it. So the memory of a run is released once: by its owner, or with
 * its last segment.
 *
 * Any thread. A comment says which functions need the saver's lock; the others must not hold it. */
#ifndef TMS_RUNS_H
#define TMS_RUNS_H

#include "core/saver.h"

/* A run for the addresses from `first` up to the end of `last`, which lie side by side; no segment refers to it yet, and it
 * has no memory. NULL: out of host memory. */
tms_run_t *tms_runs_make(const tms_segment_t *first, const tms_segment_t *last);
/* The segment refers to the run. Under the lock, or before either is visible to other threads. */
void tms_runs_attach(tms_run_t *run, tms_segment_t *segment);
/* Under the lock: a segment whose run has lost its memory refers to it no longer. Frees the run with the last reference. */
void tms_runs_detach(tms_segment_t *segment);

/* Gives a segment that no other thread sees a run of its own with memory (tms_run_populate), if it has none yet. */
tms_status_t tms_runs_populate_own(tms_segment_t *segment, const tms_driver_table_t *driver,
                                   const tms_device_table_t *devices, tms_device_mask_t peers,
                                   const tms_error_context_t *context, tms_error_t *error);

/* Under the lock: the part of a run's slack that fits, for a segment whose size is `bytes`. False: there is none. */
bool tms_runs_take_slack(tms_saver_t *saver, struct tms_kind *kind, tms_segment_t *segment, uint64_t bytes);

/* Under the lock: a call that owns the segments of a run owns it, and puts it on its list. Does nothing if it does. */
void tms_runs_own(tms_run_t *run, tms_run_t **list);
/* Under the lock: the call ends. `damaged`: the segments of the run are DAMAGED. Slack is handed out again if the run still
 * has memory, and gone if not. Adds the freed segments that have waited to *freed, linked by `next_in_transition`. */
void tms_runs_disown(tms_saver_t *saver, tms_run_t *run, bool damaged, tms_segment_t **freed);

/* Under the lock: if a call owns the segment's run, the segment, which was freed, waits for the end of that call. */
bool tms_runs_leave_to_owner(tms_segment_t *segment);

/* What became of a freed segment's share of a run. */
typedef enum tms_leaving {
    TMS_LEFT,         /* the segment holds neither memory nor addresses any more */
    TMS_MUST_WAIT,    /* nothing has changed: a device that has got access since the wait must be waited for */
    TMS_OWNER_RETIRES /* a call owns the run and retires the segment at its end */
} tms_leaving_t;
/* Takes memory and addresses from a freed segment without a guard page. Memory becomes slack, or is released with the last
 * segment of the run. What the driver fails to release is quarantined, with a log line. */
tms_leaving_t tms_runs_leave(tms_saver_t *saver, tms_segment_t *segment, tms_quiesced_t quiesced);

#endif
