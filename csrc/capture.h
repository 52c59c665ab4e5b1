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
    _Atomic int visible;                           /* captures announced and not ended */
    tms_region_t settings[TMS_CAPTURE_MAX_NESTED]; /* of each of them; `managed` is false where there are none */
} tms_capture_t;

void tms_capture_init(tms_capture_t *capture);
static inline int tms_capture_visible(const tms_capture_t *capture) {
    return atomic_load(&((tms_capture_t *)capture)->visible);
}

/* Announces one more capture; `region` (NULL: none) is for allocations of threads outside any region. TMS_INVALID_STATE
 * beyond TMS_CAPTURE_MAX_NESTED. */
tms_status_t tms_capture_begin(tms_capture_t *capture, const tms_region_t *region, const tms_error_context_t *context,
                               tms_error_t *error);
/* Ends the one announced last; false where none is under way. */
bool tms_capture_end(tms_capture_t *capture);
/* The settings of the innermost capture that has any; false where none has. */
bool tms_capture_settings(const tms_capture_t *capture, tms_region_t *region);

#endif
