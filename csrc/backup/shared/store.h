/* The folder of the store, and the contents that belong to no segment: those that publish has named, and those that adopt
 * has linked. They stay linked until a pause that keeps something in the store has ended, so that this pause finds their
 * objects.
 *
 * Any thread, without the store's lock. */
#ifndef TMS_SHARED_STORE_H
#define TMS_SHARED_STORE_H

#include "backup/shared/contents.h"

/* A call that has the turn begins to use the store: opens the folder, unless it is open, makes its key the one of the
 * process, and removes what dead processes have left. Objects of another folder stay mapped, but are not found any more.
 * TMS_BACKUP_IO; TMS_INVALID_STATE at exit. */
tms_status_t tms_shared_store_open(tms_shared_store_t *store, const tms_error_context_t *context, tms_error_t *error);
/* If an unlink has failed, tries it again. */
void tms_shared_store_sweep(tms_shared_store_t *store);
/* For tests: removes the holder, and closes the folder. */
void tms_shared_store_close(tms_shared_store_t *store);

/* Keeps the links of the contents, which have nothing private. The store owns the contents from here on. */
void tms_shared_store_keep(tms_shared_store_t *store, tms_shared_contents_t *contents);
/* Drops all of them. */
void tms_shared_store_drop_kept(tms_shared_store_t *store);

#endif
