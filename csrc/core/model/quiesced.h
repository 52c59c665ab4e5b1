/* A value that says why memory may be unmapped: the devices that run nothing that uses it. The functions that unmap require
 * one (run.h, segment.h), so unmapping without having waited, or having said why there is nothing to wait for, does not
 * compile.
 *
 * Only the four functions below create such a value: no initialiser, cast or field access occurs outside quiesced.c
 * (tools/check_quiesced.py). Other code only copies a value. A value stays valid, because the program cannot use memory that
 * is about to be unmapped. No lock; any thread. */
#ifndef TMS_QUIESCED_H
#define TMS_QUIESCED_H

#include "device/wait.h"

typedef struct tms_quiesced {
    tms_device_mask_t quiesced_devices; /* devices that have finished all work queued before */
} tms_quiesced_t;

/* Makes a value by waiting: calls tms_wait_for_devices for the devices of `mask`, and returns its *idle. *quiesced is
 * written on success only.
 */
tms_status_t tms_quiesce(tms_wait_t *wait, tms_devices_t *devices, tms_device_mask_t mask, tms_quiesced_t *quiesced,
                         tms_device_mask_t *idle, const tms_log_t *log, const tms_error_context_t *context,
                         tms_error_t *error);
/* Makes a value for memory that no device can use: it was never handed out, no device has access to it, or it is not mapped.
 * The call's own work on the memory (copies of a resume) has finished. */
tms_quiesced_t tms_quiesced_without_users(void);
/* Makes a value for memory that the program unmaps with the driver's function, which waits for nothing: the program has
 * waited. */
tms_quiesced_t tms_quiesced_by_program(void);
/* Makes a value for devices that are idle or lost. A lost device runs nothing. If the driver has shut down, all devices
 * are lost. */
tms_quiesced_t tms_quiesced_idle_or_lost(tms_device_mask_t devices);

/* Whether all of these devices are quiesced. */
bool tms_quiesced_covers(tms_quiesced_t quiesced, tms_device_mask_t devices);

#endif
