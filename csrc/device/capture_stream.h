/* Asking a stream whether its capture goes on: for captures whose end was not seen, because the driver was called for it,
 * the stream was destroyed there, or its context was reset.
 *
 * The driver must not be given the handle of a stream that is gone: what it does then is undefined. A stream is gone with
 * its context, so before it is asked its device's primary context has to be the one in which the capture began, by the
 * identifier that no other context ever has (cuCtxGetId). What a program destroys one by one it destroys with
 * cudaStreamDestroy, which the preload library sees, and torch keeps its streams for ever. What remains is a stream that was
 * captured, and destroyed by a direct call of the driver, without any end of the capture that we could see.
 *
 * Streams of other contexts than primary ones are not asked, nor are the default streams, whose handles mean another stream
 * on every thread. Nothing is loaded for this: before the driver's first use a stream cannot be asked. */
#ifndef TMS_CAPTURE_STREAM_H
#define TMS_CAPTURE_STREAM_H

#include "device/capture.h"
#include "device/device.h"

/* What a stream is called here: its handle, but for the thread's own default stream, which has the same one on every thread.
 * Not 0 for any stream that can be captured. */
uintptr_t tms_capture_key(void *stream);
/* Finds out where a stream is, before a capture begins on it. */
tms_capture_stream_t tms_capture_locate(tms_devices_t *devices, void *stream);
/* Whether the capture that was begun there is known to have ended. A few driver calls that wait for nothing. */
bool tms_capture_has_ended(tms_devices_t *devices, const tms_capture_stream_t *where);

#endif
