/* The ends of captures, and what they set free: the last one finishes what had to wait for it (reclaim.h).
 *
 * Any thread. Each takes the saver's lock, and may wait for the devices once no capture is left. */
#ifndef TMS_CAPTURE_END_H
#define TMS_CAPTURE_END_H

#include "core/captures.h"

/* Ends what has this identity (0: the last one), or began on this stream. The end of the last one finishes the deferred
 * frees. */
bool tms_saver_capture_end(tms_saver_t *saver, uint64_t identity);
void tms_saver_capture_end_on(tms_saver_t *saver, void *stream);
/* For a call that destroys a stream, or (`stream` NULL) the context of a device: before it, what began there is taken out,
 * because a stream that is gone must not be asked; after it `gone` tells what became of it. `taken` has room for
 * TMS_CAPTURE_MAX_NESTED. */
size_t tms_saver_capture_take(tms_saver_t *saver, void *stream, int device, tms_capture_stream_t *taken);
void tms_saver_capture_taken(tms_saver_t *saver, const tms_capture_stream_t *taken, size_t count, bool gone);

#endif
