/* The check of what a resume has restored, against the fingerprints of the pause: for stores that plan by fingerprint, whose
 * contents other processes may have written (backup/backup.h).
 *
 * Called on the thread of a device's part, with no lock held, after the last copy is queued, and before a stream of the
 * program may rely on the memory. The call owns the segments. */
#ifndef TMS_INTEGRITY_H
#define TMS_INTEGRITY_H

#include "core/transition/transition.h"

/* Waits for the copies of the copier and checks the segments of its device, if there are segments to check. Otherwise it
 * makes no driver call. TMS_BACKUP_IO if contents differ. If the kernel cannot run, this is logged and nothing is checked.
 */
tms_status_t tms_integrity_check(tms_transition_t *t, tms_copier_t *copier, tms_wait_t *wait, tms_error_t *error);

#endif
