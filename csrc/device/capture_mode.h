/* The capture mode of a thread during the library's driver calls.
 *
 * A stream capture in the driver's default (global) mode forbids every other thread in default mode to wait for streams and
 * events, to copy, and to pin host memory; such a call invalidates the capture. The library's calls have nothing to do with
 * any capture, so they are made in relaxed mode, which leaves captures valid. Only waiting for a whole device
 * (cuCtxSynchronize) invalidates them in any mode. tms_devices_enter and tms_devices_leave change the mode, because each of
 * these calls needs a context.
 *
 * Relaxing nests; the outermost restore puts back the mode that the thread had before. Failures are logged. A mode that
 * could not be relaxed stays unchanged. A mode that could not be restored is retried by the thread's next restore or settle.
 * A driver without cuThreadExchangeStreamCaptureMode has no captures of this kind. The state is thread-local; no lock. */
#ifndef TMS_CAPTURE_MODE_H
#define TMS_CAPTURE_MODE_H

#include "device/driver.h"

void tms_capture_mode_relax(const tms_driver_table_t *driver, tms_log_t *log);
void tms_capture_mode_restore(const tms_driver_table_t *driver, tms_log_t *log);
/* Retries a failed restore. Cheap when there is none. */
void tms_capture_mode_settle(const tms_driver_table_t *driver);

#endif
