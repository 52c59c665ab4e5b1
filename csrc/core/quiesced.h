/* A value which proves that memory may be unmapped: which devices run nothing that uses it, and since when. What unmaps
 * takes one (segment.h), so that unmapping without having waited does not compile.
 *
 * The three functions below make such a value, and nothing else does: no initialiser, cast or field of one occurs outside of
 * quiesced.c (tools/check_quiesced.py). A value is passed on and kept as it is; it stays true, because memory that is about
 * to be unmapped is out of the program's hands. No lock; any thread. */
#ifndef TMS_QUIESCED_H
#define TMS_QUIESCED_H

#include "device/wait.h"

typedef struct tms_quiesced {
    tms_device_mask_t quiesced_devices; /* that run nothing which was queued before */
    double quiesced_at;                 /* this moment, on tms_wait_now's clock */
} tms_quiesced_t;

/* Waited: tms_wait_for_devices for the devices of `mask`, whose *at_rest it hands on. *quiesced is written on success only.
 */
tms_status_t tms_quiesce(tms_wait_t *wait, tms_devices_t *devices, tms_device_mask_t mask, tms_quiesced_t *quiesced,
                         tms_device_mask_t *at_rest, const tms_log_t *log, const tms_error_context_t *context,
                         tms_error_t *error);
/* Never handed out: memory that the program has not got from this call, or that is not mapped. What the call itself queued
 * on it (copies of a resume) has been waited for: undoing, and retries. */
tms_quiesced_t tms_quiesced_never_handed_out(void);
/* Lost: each of these devices either came to rest or is lost, and a lost one runs nothing any more. All are where the driver
 * itself has gone. */
tms_quiesced_t tms_quiesced_devices_lost(tms_device_mask_t devices);

/* Whether all of these devices are quiesced. */
bool tms_quiesced_covers(tms_quiesced_t quiesced, tms_device_mask_t devices);

#endif
