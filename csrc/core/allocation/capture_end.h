/* The ends of captures. The last one runs the deferred frees (reclaim.h).
 *
 * Any thread. Each function takes the saver's lock, and may wait for the devices once no capture is left. */
#ifndef TMS_CAPTURE_END_H
#define TMS_CAPTURE_END_H

#include "core/model/captures.h"

/* End the capture with this identity (0: the last one), or the one that began on this stream. The end of the last capture
 * runs the deferred frees. */
bool tms_capture_end_of(tms_saver_t *saver, uint64_t identity);
void tms_capture_end_on(tms_saver_t *saver, void *stream);
/* Around a call that destroys a stream or (`stream` NULL) the context of a device. take removes the captures that began
 * there, because a destroyed stream must not be queried. taken ends them if `gone`, else restores them. `taken` has room for
 * TMS_CAPTURE_MAX_NESTED. */
size_t tms_capture_end_take(tms_saver_t *saver, void *stream, int device, tms_capture_stream_t *taken);
void tms_capture_end_taken(tms_saver_t *saver, const tms_capture_stream_t *taken, size_t count, bool gone);

#endif
