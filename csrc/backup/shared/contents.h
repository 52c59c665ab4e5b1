/* The contents of one segment in the shared store: objects, and the rest in host memory. Used by the thread that owns the
 * segment, without a lock. */
#ifndef TMS_SHARED_CONTENTS_H
#define TMS_SHARED_CONTENTS_H

#include "backup/backup.h"
#include "backup/shared/object.h"

/* Returns the description of `content`: its extents of at least TMS_MIN_OBJECT_BYTES as objects that are named by
 * `fingerprints`, the others as the rest. `fingerprints` NULL: everything is the rest. The objects have one user more each,
 * and those that exist are linked; the rest has no buffer yet. TMS_OUT_OF_HOST_MEMORY, TMS_BACKUP_IO. */
tms_status_t tms_shared_contents_make(tms_shared_store_t *store, const tms_backup_content_t *content,
                                      const tms_fingerprint_t *fingerprints, int device, tms_shared_contents_t **made,
                                      const tms_error_context_t *context, tms_error_t *error);
/* Returns the description of `bytes` bytes that are the object of this name. *found is false, and there is none, if the
 * object does not exist. TMS_OUT_OF_HOST_MEMORY, TMS_BACKUP_IO. */
tms_status_t tms_shared_contents_link(tms_shared_store_t *store, const tms_shared_name_t *name, uint64_t bytes, int device,
                                      tms_shared_contents_t **made, bool *found, const tms_error_context_t *context,
                                      tms_error_t *error);
/* Drops everything; accepts NULL. */
void tms_shared_contents_drop(tms_shared_store_t *store, tms_shared_contents_t *contents);
/* Sets whether the objects are to be registered with the driver. */
void tms_shared_contents_want_registration(tms_shared_store_t *store, tms_shared_contents_t *contents,
                                           bool wants_registration);
/* Drops the objects that no other contents of this process use, so that they need no room beside the ones that replace
 * them. Returns whether there were some. */
bool tms_shared_contents_drop_replaced(tms_shared_store_t *store, tms_shared_contents_t *contents);
/* Drops the private copies. The objects stay. */
void tms_shared_contents_drop_private(tms_shared_contents_t *contents, tms_host_policy_t policy);
/* Fills *missing with the part that a pause has to copy: the rest, and the objects that this process does not have.
 * TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_shared_contents_list_missing(tms_shared_store_t *store, const tms_shared_contents_t *contents,
                                              tms_backup_content_t *missing, const tms_error_context_t *context,
                                              tms_error_t *error);
/* Copies `bytes` at `offset` of the segment to `destination`. False if not all of them are held. */
bool tms_shared_contents_read(const tms_shared_contents_t *contents, uint64_t offset, uint64_t bytes, void *destination);

#endif
