/* The visible captures: when one may begin, and how many are active. Their ends are in capture_end.h.
 *
 * Any thread may call these functions, with or without the GIL. Each takes the saver's lock. */
#ifndef TMS_CAPTURES_H
#define TMS_CAPTURES_H

#include "core/model/saver.h"

/* tms_api_t.capture_begin and the like. A begin waits for a running transition, but at most TMS_CALLBACK_PATIENCE_SECONDS
 * for one of its callbacks, which may need a lock of the caller's (the GIL). After that time, and on a thread that is itself
 * inside a transition, it fails with TMS_INVALID_STATE. `identity` may be NULL. */
tms_status_t tms_capture_table_begin(tms_saver_t *saver, const tms_region_t *region, uint64_t *identity, tms_error_t *error);
/* The result of tms_capture_table_begin_on. That function is called when a capture is about to begin on a stream, but not
 * for the legacy stream, which cannot be captured. */
typedef struct tms_capture_start {
    uint64_t identity;   /* 0: not announced */
    bool known;          /* it belongs to a capture without a recorded end */
    bool must_not_begin; /* on failure: a running transition and the capture would break each other */
} tms_capture_start_t;
tms_status_t tms_capture_table_begin_on(tms_saver_t *saver, void *stream, tms_capture_start_t *begun, tms_error_t *error);
/* Called when the call that begins the capture has returned: successfully, or with an error if the capture was `known`. From
 * now on the stream is queried. */
void tms_capture_table_begun(tms_saver_t *saver, uint64_t identity);
/* Whether the stream of this capture reports an active capture. */
bool tms_capture_table_goes_on(tms_saver_t *saver, uint64_t identity);
/* Returns the number of active captures. First queries the streams, and drops captures that ended unseen. Holds the lock
 * during the queries, so that no stream is destroyed during one. */
int tms_capture_table_count(tms_saver_t *saver);

#endif
