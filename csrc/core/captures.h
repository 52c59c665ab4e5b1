/* Captures as the saver sees them: when one may begin, and how many are under way. Their ends are in capture_end.h.
 *
 * Any thread, with or without the GIL. Each takes the saver's lock. */
#ifndef TMS_CAPTURES_H
#define TMS_CAPTURES_H

#include "core/saver.h"

/* tms_api_t.capture_begin and the like. A begin waits for a transition that is under way, but not for longer than
 * TMS_CALLBACK_PATIENCE_SECONDS for one of its callbacks, which may need what the caller holds (the GIL): then, and on a
 * thread that is itself inside a transition, it is TMS_INVALID_STATE. `identity` may be NULL. */
tms_status_t tms_saver_capture_begin(tms_saver_t *saver, const tms_region_t *region, uint64_t *identity, tms_error_t *error);
/* A capture is about to begin on this stream; not the legacy one, which cannot be captured. */
typedef struct tms_capture_begun {
    uint64_t identity;   /* 0 where it was not announced */
    bool known;          /* it is that of a capture whose end was not seen */
    bool must_not_begin; /* on failure: a transition under way would break the capture, and the capture that */
} tms_capture_begun_t;
tms_status_t tms_saver_capture_begin_on(tms_saver_t *saver, void *stream, tms_capture_begun_t *begun, tms_error_t *error);
/* The call that was to begin it on the stream has returned: without an error, or with one for what was `known`. From now on
 * the stream is asked. */
void tms_saver_capture_begun(tms_saver_t *saver, uint64_t identity);
/* Whether the stream on which this one began says that it captures. */
bool tms_saver_capture_goes_on(tms_saver_t *saver, uint64_t identity);
/* How many captures are under way. Asks the streams first, and drops those whose capture has ended without our knowing.
 * Holds the lock while it asks, so that no stream is destroyed then. */
int tms_saver_captures(tms_saver_t *saver);

#endif
