/* Queries a stream for an active capture. Needed for captures whose end was not reported, because the program ended the
 * capture or destroyed the stream through the driver, or reset the context.
 *
 * Passing the handle of a destroyed stream to the driver is undefined behaviour. A stream is destroyed with its context. So
 * the query first checks that the device's primary context is still the one in which the capture began, by its unique
 * identifier (cuCtxGetId). The preload library intercepts cudaStreamDestroy, and torch never destroys its streams. One case
 * remains undetected: a capturing stream that is destroyed by a direct driver call, without a visible end of the capture.
 *
 * Streams of contexts other than primary ones are not queried. Neither are the default streams, whose handles name a
 * different stream on every thread. A query does not load the driver: before its first use a stream cannot be queried. */
#ifndef TMS_CAPTURE_STREAM_H
#define TMS_CAPTURE_STREAM_H

#include "device/capture.h"
#include "device/device.h"

/* Returns the key of a stream: its handle, except for the per-thread default stream, whose handle is the same on every
 * thread. The key of a stream that can be captured is not 0. */
uintptr_t tms_capture_key(void *stream);
/* Determines the context and device of a stream, before a capture begins on it. */
tms_capture_stream_t tms_capture_locate(tms_devices_t *devices, void *stream);
/* Whether the capture that began there is known to have ended. Makes a few driver calls; none blocks. */
bool tms_capture_has_ended(tms_devices_t *devices, const tms_capture_stream_t *where);

#endif
