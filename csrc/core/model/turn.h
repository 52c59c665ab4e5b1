/* The turn: at most one pause or resume runs at a time. A second one waits for its turn on `saver->turn`, which blocks only
 * its caller. The begin of a capture waits for the running one, without taking the turn.
 *
 * Any thread. Every function takes the saver's lock, unless its comment says that the caller holds it. */
#ifndef TMS_TURN_H
#define TMS_TURN_H

#include "core/model/saver.h"
#include "device/wait.h"

/* Begins a pause or resume on this thread. TMS_INVALID_STATE if this thread is inside another one: the call came from a
 * signal handler, a callback or a finaliser. */
tms_status_t tms_turn_enter(const tms_error_context_t *context, tms_error_t *error);
void tms_turn_leave(void);
/* Whether this thread is inside a pause or resume, including one that has released the turn. Implements
 * tms_api_t.in_transition. */
bool tms_turn_is_inside(void);

/* Waits for the turn and takes it. TMS_INTERRUPTED if `wait` was cancelled. */
tms_status_t tms_turn_take(tms_saver_t *saver, tms_wait_t *wait, const tms_error_context_t *context, tms_error_t *error);
void tms_turn_end(tms_saver_t *saver);

/* For the begin of a capture, with the saver's lock held: waits until the call that has the turn has ended. That call has
 * already checked for captures, and would wait for a device during this one. A callback of that call may be waiting for this
 * thread, for example for the GIL. So this fails with TMS_INVALID_STATE after TMS_CALLBACK_PATIENCE_SECONDS in one
 * callback. */
tms_status_t tms_turn_await_end(tms_saver_t *saver, const tms_error_context_t *context, tms_error_t *error);
/* Called around every callback that a call makes while it has the turn. */
void tms_turn_callback_begin(tms_saver_t *saver);
void tms_turn_callback_end(tms_saver_t *saver);

#endif
