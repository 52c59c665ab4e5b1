#include "core/model/turn.h"

/* Whether this thread is inside a pause or resume, including one that has released the turn to wait for memory. Code that
 * runs inside the call (signal handlers, finalisers) must not begin another. */
static _Thread_local bool inside;

bool tms_turn_is_inside(void) { return inside; }

tms_status_t tms_turn_enter(const tms_error_context_t *context, tms_error_t *error) {
    if (inside)
        return tms_error_set(error, TMS_INVALID_STATE, context,
                             "this thread is inside pause() or resume() already; do not call them from signal handlers, "
                             "callbacks or finalisers");
    inside = true;
    return TMS_OK;
}

void tms_turn_leave(void) { inside = false; }

tms_status_t tms_turn_take(tms_saver_t *saver, tms_wait_t *wait, const tms_error_context_t *context, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    pthread_mutex_lock(&saver->lock);
    while (saver->transition_running && status == TMS_OK) {
        tms_wait_on_condition(wait, &saver->turn, &saver->lock);
        if (!saver->transition_running || !tms_wait_is_interruptible(wait)) continue;
        pthread_mutex_unlock(&saver->lock);
        status = tms_wait_check(wait, context, error);
        pthread_mutex_lock(&saver->lock);
    }
    if (status == TMS_OK) saver->transition_running = true;
    pthread_mutex_unlock(&saver->lock);
    return status;
}

void tms_turn_end(tms_saver_t *saver) {
    pthread_mutex_lock(&saver->lock);
    saver->transition_running = false;
    pthread_cond_broadcast(&saver->turn); /* not a signal: a waiting begin of a capture would consume it without taking the
                                             turn */
    pthread_mutex_unlock(&saver->lock);
}

/* ---- begins of captures ---- */

tms_status_t tms_turn_await_end(tms_saver_t *saver, const tms_error_context_t *context, tms_error_t *error) {
    while (saver->transition_running) {
        if (saver->callback_began == 0) {
            pthread_cond_wait(&saver->turn, &saver->lock);
            continue;
        }
        double end = saver->callback_began + saver->callback_patience_seconds;
        if (tms_wait_now() >= end)
            return tms_error_set(
                error, TMS_INVALID_STATE, context,
                "a pause() or resume() on another thread has been in a callback (for Ctrl-C, live blocks or "
                "progress) for %.1f seconds, perhaps because this thread holds the GIL, which the callback "
                "needs. Begin the capture again when that call has ended, or release the GIL first",
                saver->callback_patience_seconds);
        (void)tms_wait_until(&saver->turn, &saver->lock, end);
    }
    return TMS_OK;
}

static void note_callback(tms_saver_t *saver, double began) {
    pthread_mutex_lock(&saver->lock);
    saver->callback_began = began;
    pthread_cond_broadcast(&saver->turn); /* the begin of a capture waits for a callback with a limit */
    pthread_mutex_unlock(&saver->lock);
}

void tms_turn_callback_begin(tms_saver_t *saver) { note_callback(saver, tms_wait_now()); }
void tms_turn_callback_end(tms_saver_t *saver) { note_callback(saver, 0); }
