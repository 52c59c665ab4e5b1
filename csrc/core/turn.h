/* The turn: at most one pause or resume runs at a time. A second one waits for its turn on `saver->turn`, which
 * costs only its caller. The begin of a capture waits for the one that runs, without taking the turn.
 *
 * Every function takes the saver's lock, except where it says that the caller holds it. */
#ifndef TMS_TURN_H
#define TMS_TURN_H

#include "core/saver.h"
#include "device/wait.h"

/* A call of pause or resume begins on this thread. TMS_INVALID_STATE where it is inside another: a signal handler, a
 * callback or a finaliser has made the call. */
tms_status_t tms_turn_enter(const tms_error_context_t *context, tms_error_t *error);
void tms_turn_leave(void);
/* Whether this thread is inside one, also while that has given its turn away. tms_api_t.in_transition. */
bool tms_turn_is_inside(void);

/* Waits for the turn and takes it. What `wait` says. */
tms_status_t tms_turn_take(tms_saver_t *saver, tms_wait_t *wait, const tms_error_context_t *context, tms_error_t *error);
void tms_turn_end(tms_saver_t *saver);

/* With the saver's lock held, for a capture that is to begin: waits until the call that has the turn has ended. That call
 * has asked already whether a capture is visible, and would wait for a device during this one. A callback of it may in turn
 * wait for this thread, for example for the GIL. So after TMS_CALLBACK_PATIENCE_SECONDS in one callback this is
 * TMS_INVALID_STATE. */
tms_status_t tms_turn_await_end(tms_saver_t *saver, const tms_error_context_t *context, tms_error_t *error);
/* Around every callback that a call makes while it has the turn. */
void tms_turn_callback_begin(tms_saver_t *saver);
void tms_turn_callback_end(tms_saver_t *saver);

#endif
