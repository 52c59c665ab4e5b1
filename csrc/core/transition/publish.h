/* Publish: keeps contents of device memory in the shared store under a name, for processes that start later.
 * object_call.h describes the call and its memory. */
#ifndef TMS_PUBLISH_H
#define TMS_PUBLISH_H

#include "core/model/saver.h"

/* Keeps the contents of the pieces as objects, and gives them `name`, which is a valid name of a file, with a manifest that
 * contains the JSON value `contents` (backup/shared/published.h). Checks the limits of host memory and the room in the
 * folder before anything is written. *written: number of bytes that the store did not have. After a failure the name is what
 * it was before. TMS_DRIVER if the fingerprints cannot be computed. */
tms_status_t tms_publish_perform(tms_saver_t *saver, const tms_selection_t *selection, const tms_shared_piece_t *pieces,
                                 size_t count, const char *name, const char *contents, uint64_t *written,
                                 tms_error_t *error);

#endif
