/* Adopt: fills device memory with objects of the shared store. object_call.h describes the call and its memory. */
#ifndef TMS_ADOPT_H
#define TMS_ADOPT_H

#include "core/model/saver.h"

/* Fills each piece with the object whose name is at its place in `names`, which has TMS_OBJECT_NAME_DIGITS for each. All
 * objects are linked first; *missing becomes the index of the first one that does not exist, or `count`. If there is one,
 * nothing is filled, and the result is TMS_OK.
 *
 * Each object is first copied to scratch memory on the device, and named there by its contents. Only an object that has its
 * own name is copied to its piece. Another one is TMS_BACKUP_IO, with the object in the message, and is rejected
 * (backup/shared/object.h); other pieces may have been filled then. */
tms_status_t tms_adopt_perform(tms_saver_t *saver, const tms_selection_t *selection, const tms_shared_piece_t *pieces,
                               size_t count, const char *names, size_t *missing, tms_error_t *error);

#endif
