/* The thread that registers objects with the driver while the memory is paused, and ends the registrations that no contents
 * wish any more. It makes one driver call at a time, each for one object, and runs only while there is something to do.
 *
 * A copy from memory that is not registered yet goes through the ring, so no call waits for this thread. While a call has
 * the turn, this thread begins no driver call, because a registration takes what the call needs: the driver's locks, which
 * are not fair, and those of the address space. It begins no registration for TMS_SHARED_QUIET_SECONDS after a call, because
 * it would hold up the other replicas, which pause at the same time and release their memory (measured,
 * benchmarks/h200_shared.md). Ending one waits for the device and blocks launches of other threads until then; an object is
 * small enough for that to be short.
 *
 * If the driver fails to register an object, no other one is tried until the next pause, and a warning is logged once. If it
 * fails to end a registration, the memory stays mapped and registered, and the next call tries again.
 *
 * Any thread, without the store's lock unless stated otherwise. */
#ifndef TMS_SHARED_REGISTRAR_H
#define TMS_SHARED_REGISTRAR_H

#include "backup/shared/types.h"

/* Starts the thread if there is something to do and it does not run. Registrations that could not be ended are tried again.
 */
void tms_shared_registrar_start(tms_shared_store_t *store);
/* A call has the turn: the thread begins no driver call. It may be in one, which is for one object. */
void tms_shared_registrar_hold(tms_shared_store_t *store);
/* The call has ended: starts the thread as above. */
void tms_shared_registrar_let_go(tms_shared_store_t *store);
/* The thread begins no further call. Waits until `deadline` (tms_wait_now) for the one that is in flight. */
void tms_shared_registrar_close(tms_shared_store_t *store, double deadline);

#endif
