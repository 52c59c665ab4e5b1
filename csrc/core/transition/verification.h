/* TMS_VERIFY_BACKUPS: checks that what a pause did not copy, because its fingerprints are equal, is what the device holds.
 *
 * Called by a pause after its copies, on its thread and with no lock held. Copies the contents of these segments to other
 * host memory and compares. A file that cannot be read, or whose checksums are wrong, is written again, because the contents
 * are still on the device. The progress of the call counts what is written again, and nothing else of this. */
#ifndef TMS_VERIFICATION_H
#define TMS_VERIFICATION_H

#include "core/transition/transition.h"

/* `live` is what the plan of the pause was made with. TMS_INVALID_STATE if bytes differ: then the backup has no contents. */
tms_status_t tms_verification_check(tms_transition_t *t, const tms_live_t *live, tms_error_t *error);

#endif
