/* What find_live answered last, and whether the next pause may expect the same answer.
 *
 * PyTorch takes milliseconds to describe thousands of blocks (docs/performance.md). A program that pauses the same segments
 * again mostly has the same bytes in use. So a pause copies what was live the last time while it asks what is live now
 * (pause.c). What was copied counts only if the answer is the same.
 *
 * Nothing is expected of segments that were not all together in the last search, nor after two searches of the same segments
 * with different answers, until two are the same. Nor is it of segments with retained host memory (pause.c).
 *
 * Owned by the saver. Used on the thread of the pause that has the turn, with the list of its segments; no lock. */
#ifndef TMS_EXPECTATION_H
#define TMS_EXPECTATION_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

struct tms_segment;

typedef struct tms_expectation {
    tms_live_t live; /* a copy of the last answer, in one block that begins with its ranges; all zero: none is kept */
    uint64_t search; /* number of the last search; its segments have it, too */
    size_t segments; /* in that search */
    bool varies;     /* the last two searches of the same segments had different answers */
} tms_expectation_t;

/* The answer that the pause may expect, or NULL. Valid until the next tms_expectation_note. */
const tms_live_t *tms_expectation_find(const tms_expectation_t *expectation, const struct tms_segment *first);
/* After find_live: keeps its answer, NULL if it has none. *same: it is that of the last search, which had the same segments.
 * TMS_OUT_OF_HOST_MEMORY: nothing is kept, and *same is false. */
tms_status_t tms_expectation_note(tms_expectation_t *expectation, struct tms_segment *first, const tms_live_t *answer,
                                  bool *same, const tms_error_context_t *context, tms_error_t *error);
void tms_expectation_release(tms_expectation_t *expectation);

#endif
