/* The capture mode of a thread while it makes driver calls of ours.
 *
 * A stream capture of another thread in the driver's default (global) mode forbids waits for streams and events, copies and
 * the pinning of host memory to every thread whose own mode is the default, and is lost if one makes such a call. Ours have
 * nothing to do with any capture, so they are made in relaxed mode, which spares all captures; only waiting for a
 * whole device (cuCtxSynchronize) spares none. tms_devices_enter and tms_devices_leave are where this happens, because every
 * one of those calls needs a context.
 *
 * Relaxing nests; the outermost restore puts back the mode that the thread had before. What the driver refuses is logged: a
 * mode that could not be relaxed stays as it was, and one that could not be restored is tried again by the next restore or
 * settle of the thread. A driver without cuThreadExchangeStreamCaptureMode has no captures of this kind. The state is the
 * thread's own; no lock. */
#ifndef TMS_CAPTURE_MODE_H
#define TMS_CAPTURE_MODE_H

#include "device/driver.h"

void tms_capture_mode_relax(const tms_driver_table_t *driver, tms_log_t *log);
void tms_capture_mode_restore(const tms_driver_table_t *driver, tms_log_t *log);
/* Tries again to restore what could not be. Cheap when there is nothing. */
void tms_capture_mode_settle(const tms_driver_table_t *driver);

#endif
