/* The stream captures that we can see: begun by `cuda_graph()`, by an interposed runtime call, or on the caller's own
 * stream.
 *
 * While one is under way nothing may synchronise a context, so pause and resume fail with a clear error before anything
 * changes, and frees of ACTIVE memory are deferred (saver.h). There is no driver query for "some capture is under way", so
 * this is a count, and captures begun behind our back stay unseen.
 *
 * Every call needs the saver's lock, except tms_capture_visible, which reads one atomic. */
#ifndef TMS_CAPTURE_H
#define TMS_CAPTURE_H

#include <stdatomic.h>

#include "region.h"

enum { TMS_CAPTURE_MAX_NESTED = 16 };

typedef struct tms_capture {
    _Atomic int visible; /* captures announced and not ended */
    int settings_count;
    tms_region_t settings[TMS_CAPTURE_MAX_NESTED]; /* of announced captures, for threads outside any region */
} tms_capture_t;

void tms_capture_init(tms_capture_t *capture);
static inline int tms_capture_visible(const tms_capture_t *capture) {
    return atomic_load(&((tms_capture_t *)capture)->visible);
}

#endif
