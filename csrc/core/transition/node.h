/* publish and adopt: contents of device memory that the shared store keeps under a name, for processes that start later
 * (docs/architecture-shared-store.md). The memory need not be managed.
 *
 * Both are calls that pause and resume nothing. They take the turn and wait for the devices of the memory. Until they
 * return, the caller keeps the memory allocated, and nothing writes to it. Memory that is paused, or damaged, is
 * TMS_INVALID_STATE. Objects that the calls have used stay linked until a pause that uses the store has ended
 * (backup/shared/store.h).
 *
 * The calls read only `interrupted`, `on_progress`, `stream` and their contexts of the selection. Any thread that is not
 * inside a pause or resume. Locks as in steps.h. */
#ifndef TMS_NODE_H
#define TMS_NODE_H

#include "core/model/saver.h"

/* Keeps the contents of the pieces as objects, and gives them `name`, which is a valid name of a file, with a manifest that
 * contains the JSON value `contents` (backup/shared/published.h). Checks the limits of host memory and the room in the
 * folder before anything is written. *written: number of bytes that the store did not have. After a failure the name is what
 * it was before. TMS_DRIVER if the fingerprints cannot be computed. */
tms_status_t tms_publish_run(tms_saver_t *saver, const tms_selection_t *selection, const tms_shared_piece_t *pieces,
                             size_t count, const char *name, const char *contents, uint64_t *written, tms_error_t *error);

/* Fills each piece with the object whose name is at its place in `names`, which has TMS_OBJECT_NAME_DIGITS for each. All
 * objects are linked first; *missing becomes the index of the first one that does not exist, or `count`. If there is one,
 * nothing is filled, and the result is TMS_OK.
 *
 * Each object is first copied to scratch memory on the device, and named there by its contents. Only an object that has its
 * own name is copied to its piece. Another one is TMS_BACKUP_IO, with the object in the message, and is rejected
 * (backup/shared/object.h); other pieces may have been filled then. */
tms_status_t tms_adopt_run(tms_saver_t *saver, const tms_selection_t *selection, const tms_shared_piece_t *pieces,
                           size_t count, const char *names, size_t *missing, tms_error_t *error);

#endif
