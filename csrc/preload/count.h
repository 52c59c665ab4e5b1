/* Counts allocations of memory that is not managed, as the interposers see them, in the state's ledger (base/ledger.h). They
 * are counted by calling library, which is the library that contains the call's return address.
 *
 * A call inside another interposed call of the same thread (the runtime calls the driver) is not counted again. Nothing is
 * managed, refused or made to wait by being counted; a count costs one look at the loader's list and a short lock.
 *
 * Any thread, with no lock of ours held. Without a state nothing is counted. */
#ifndef TMS_PRELOAD_COUNT_H
#define TMS_PRELOAD_COUNT_H

#include "base/ledger.h"
#include "resolve.h"

/* One call of an interposed function. */
typedef struct tms_count {
    tms_state_t *state; /* or NULL */
    const void *caller; /* an address in the code that called; NULL: the call allocates nothing */
    bool nested;        /* made inside another one: not counted */
} tms_count_t;

/* Called before anything else in the interposed call, and after it. */
tms_count_t tms_count_begin(const void *caller);
void tms_count_end(const tms_count_t *count);

/* Called when the interposed call has allocated. Address 0 is no allocation. */
void tms_count_add(const tms_count_t *count, tms_hook_t hook, uint64_t address, uint64_t bytes);
/* Called before and after the interposed call frees. */
tms_ledger_taken_t tms_count_take(const tms_count_t *count, uint64_t address);
void tms_count_settle(const tms_count_t *count, tms_ledger_taken_t taken, bool gone);

/* Returns the calling thread's device according to the library of the hook, or TMS_NO_DEVICE. `state` may be NULL. */
int tms_count_device(tms_state_t *state, tms_hook_t hook);

/* Returns the ledger, or NULL if the call is not counted. */
static inline tms_ledger_t *tms_count_ledger(const tms_count_t *count) {
    return count->state && !count->nested ? &count->state->ledger : NULL;
}

#endif
