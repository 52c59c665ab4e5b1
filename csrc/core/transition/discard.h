/* The part of pause(backup="discard") that concerns allocations which are paused already: it discards their backups, so that
 * a resume brings the memory back without contents. It is the remedy if a backup file is lost or damaged.
 *
 * Nothing is discarded unless the pause succeeds. The states of these allocations and the numbers in the report of the pause
 * do not change. The space of a backup is released at once. Damaged allocations lose their contents as well, but keep the
 * space until they are repaired and resumed or freed, because a device may still be reading it.
 *
 * On the thread of the call, which has the turn. Backups of allocations that no call owns change under the saver's lock;
 * their space is released without it. */
#ifndef TMS_TRANSITION_DISCARD_H
#define TMS_TRANSITION_DISCARD_H

#include "core/transition/transition.h"

typedef struct tms_discard {
    tms_backup_t *backups; /* taken from their segments; room for `most` of them. NULL: there is nothing to discard */
    size_t most, count;
} tms_discard_t;

/* Called before the pause changes anything: makes room for the backups that it will discard, if there are any.
 * TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_discard_prepare(const tms_transition_t *t, tms_discard_t *discard, tms_error_t *error);
/* Called after the pause: discards the backups if the pause has succeeded. */
void tms_discard_end(tms_transition_t *t, tms_discard_t *discard, bool succeeded);

#endif
