/* A call of publish or adopt: ranges of device memory become, or are filled from, objects of the shared store
 * (docs/architecture-shared-store.md). The memory need not be managed.
 *
 * Both calls pause and resume nothing. They take the turn and wait for the devices of the memory. Until they return, the
 * caller keeps the memory allocated, and nothing writes to it. Memory that is paused, or damaged, is TMS_INVALID_STATE.
 * Objects that the calls have used stay linked until a pause that uses the store has ended (backup/shared/store.h).
 *
 * The calls read only `interrupted`, `on_progress`, `stream` and their contexts of the selection. Any thread that is not
 * inside a pause or resume. Locks as in steps.h. */
#ifndef TMS_OBJECT_CALL_H
#define TMS_OBJECT_CALL_H

#include "backup/shared/store.h"
#include "core/transition/transition.h"

/* A range of memory, and the object that it is, or becomes. */
typedef struct tms_object_range {
    const tms_shared_piece_t *memory;
    tms_backup_t backup; /* temporary: its `planned` content and its fingerprints, for a pass */
    tms_shared_contents_t *contents;
    tms_shared_name_t name;
    CUdeviceptr scratch; /* adopt: where the object is checked */
} tms_object_range_t;

typedef struct tms_object_call {
    tms_transition_t t; /* first */
    const tms_shared_piece_t *memory;
    size_t count;
    bool aligned; /* the memory must be aligned, because its fingerprints are computed in place */
    tms_object_range_t *list;
} tms_object_call_t;

static inline tms_shared_store_t *tms_object_call_store(const tms_object_call_t *call) {
    return &call->t.saver->stores.shared;
}
tms_error_context_t tms_object_call_context(const tms_object_call_t *call, const tms_object_range_t *range);

/* Performs the call, which selects no allocation and has the callbacks of `selection`. */
tms_status_t tms_object_call_perform(tms_object_call_t *call, tms_saver_t *saver, const tms_selection_t *selection,
                                     const char *operation, tms_status_t (*act)(tms_transition_t *t, tms_error_t *error),
                                     tms_error_t *error);

/* The functions below are for `act`, which begins with the first and ends with tms_object_call_finish, except in a forked
 * child.
 */
/* Makes and checks the list, opens the store, and waits for the devices. */
tms_status_t tms_object_call_prepare(tms_object_call_t *call, tms_error_t *error);
/* Names a range by its fingerprints, which a pass has computed. TMS_DRIVER if it could not. */
tms_status_t tms_object_call_name(const tms_object_call_t *call, const tms_object_range_t *range, tms_shared_name_t *name,
                                  tms_error_t *error);
/* Gives the contents to the store (`keep`), or drops them. Frees the list. */
void tms_object_call_finish(tms_object_call_t *call, bool keep);

#endif
