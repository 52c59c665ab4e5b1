/* The copies of the shared store. They are gathered in a relay of the copier (device/copier.h), whose `wait` moves the
 * objects that the driver cannot reach by itself, on the threads of a ring.
 *
 * A pause writes the objects that do not exist, beginning at a random one, so that replicas that pause together write
 * different ones. It leaves the objects that another process is writing for the end, where this thread waits for them: it
 * links what is finished, writes what a dead process has left, and keeps a private copy of what does not grow for
 * TMS_SHARED_PATIENCE polls. */
#ifndef TMS_SHARED_COPY_H
#define TMS_SHARED_COPY_H

#include "backup/shared/contents.h"
#include "backup/shared/ring.h"

/* Begin to copy from, or to, the segment at `address`. The copies are complete once the copier has waited. `contents` stays
 * until then, and the rest has a buffer. */
tms_status_t tms_shared_copy_save(tms_shared_store_t *store, tms_shared_contents_t *contents, tms_copier_t *copier,
                                  CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_shared_copy_load(tms_shared_store_t *store, tms_shared_contents_t *contents, tms_copier_t *copier,
                                  CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error);

#endif
