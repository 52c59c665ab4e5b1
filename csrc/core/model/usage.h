/* How much physical memory is mapped: in all, by device, and by tag; and the most that there was.
 *
 * Counts each segment of the registry while its memory is mapped. The caller holds the saver's lock, and calls these
 * functions where a segment is published or removed, and where the state of a published one settles. So memory that a failed
 * call has mapped and unmapped again is not in the peaks. The numbers may be read at any time on any thread. */
#ifndef TMS_USAGE_H
#define TMS_USAGE_H

#include "core/model/run.h"

typedef struct tms_usage {
    tms_level_t mapped;
    tms_level_t by_device[TMS_MAX_DEVICES];
    _Atomic uint64_t slack[TMS_MAX_DEVICES]; /* of runs, in no level; written by kinds.c */
} tms_usage_t;

/* Counts a published segment if its memory is mapped, and no longer if it is not. */
void tms_usage_update(tms_usage_t *usage, tms_segment_t *segment);
/* Counts a segment no longer, because it leaves the registry. */
void tms_usage_remove(tms_usage_t *usage, tms_segment_t *segment);
/* The peaks of all and of the devices become what is mapped now. Those of the tags: tms_tag_reset_peaks. */
void tms_usage_reset_peaks(tms_usage_t *usage);

#endif
