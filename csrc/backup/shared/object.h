/* The objects that this process holds, one for each name, however many segments keep it.
 *
 * An object has its memory once the file is linked and mapped; until then it is only named. The mapping stays until the last
 * user drops the object, even if the folder is deleted. A forked child does not inherit it.
 *
 * The functions take the store's lock, unless they say that it is held. Any thread. */
#ifndef TMS_SHARED_OBJECT_H
#define TMS_SHARED_OBJECT_H

#include "backup/shared/types.h"

/* Returns the object of this name, with one user more, or NULL if memory is short. It may have no memory yet. */
tms_shared_object_t *tms_shared_object_use(tms_shared_store_t *store, const tms_shared_name_t *name, uint64_t bytes,
                                           int device);
/* Removes a user. The last one gives up the link, and removes the object if no other process links it. Memory that is
 * registered is unmapped by the registrar. */
void tms_shared_object_drop(tms_shared_store_t *store, tms_shared_object_t *object);
/* Removes the last user, which may want registration. Returns false, with nothing changed, if there are others. */
bool tms_shared_object_drop_last(tms_shared_store_t *store, tms_shared_object_t *object, bool wants_registration);
/* The contents of the object are not those that its name says: no later call finds it, so it is written again. Its users
 * keep its memory. Appends a sentence to the error, which says what follows. */
void tms_shared_object_reject(tms_shared_store_t *store, tms_shared_object_t *object, tms_error_t *error);
/* Whether the object does not have its memory yet, and this is its first user. */
bool tms_shared_object_is_new(tms_shared_store_t *store, const tms_shared_object_t *object);
/* Whether the object has its memory, and whether the driver can copy from it. */
bool tms_shared_object_is_here(tms_shared_store_t *store, const tms_shared_object_t *object);
bool tms_shared_object_is_registered(tms_shared_store_t *store, const tms_shared_object_t *object);

/* Links and maps the object if it exists. `claim`: if it does not exist, attempt->state becomes CLAIMED, and the caller
 * writes to object->claim and calls `finish` or `abandon`. BUSY with `here`: another thread of this process is writing it. A
 * fork waits for this call, so the child knows all claims. TMS_INVALID_STATE at exit. */
tms_status_t tms_shared_object_try(tms_shared_store_t *store, tms_shared_object_t *object, bool claim,
                                   tms_shared_attempt_t *attempt, bool *here, const tms_error_context_t *context,
                                   tms_error_t *error);
tms_status_t tms_shared_object_finish(tms_shared_store_t *store, tms_shared_object_t *object,
                                      const tms_error_context_t *context, tms_error_t *error);
void tms_shared_object_abandon(tms_shared_store_t *store, tms_shared_object_t *object);

/* With the lock held, at exit: removes the files that threads of this process are writing. They cannot finish them. */
void tms_shared_objects_withdraw_claims(tms_shared_store_t *store);
/* With the lock held: whether this process has an object of this name, which has TMS_SHARED_NAME_DIGITS digits. */
bool tms_shared_objects_have(const tms_shared_store_t *store, const char *name);
/* With the lock held: no object is found by its name any more, because another folder was opened. */
void tms_shared_objects_forget_names(tms_shared_store_t *store);
/* With the lock held: frees an object that has no user and is not registered. */
void tms_shared_object_free(tms_shared_store_t *store, tms_shared_object_t *object);

#endif
