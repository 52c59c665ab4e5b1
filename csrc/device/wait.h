/* Waiting: for the devices, for a turn, for memory held by other processes. Each wait of a call goes through the call's
 * tms_wait_t, which contains the deadline and the callback that cancels the call.
 *
 * The caller's `interrupted` is called on the thread of the call, with no lock of the library held, at most once in
 * TMS_WAIT_POLL_SECONDS except by tms_wait_poll_now. It may run any code (Python's signal handlers, a garbage collection),
 * but it must not pause, resume, or begin a capture. During a copy the current context is that of the copying device, not
 * the caller's, and the thread's capture mode is relaxed (capture_mode.h). A context that it makes current is popped
 * together with these. Once it has cancelled the call, it is not called again. After the commit point a call cannot be
 * cancelled, and `interrupted` is no longer called.
 *
 * A tms_wait_t belongs to one call and is used on its thread only. No lock. Every function but tms_wait_begin accepts NULL,
 * which has no deadline and is not interruptible. */
#ifndef TMS_WAIT_H
#define TMS_WAIT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "base/clock.h"
#include "device/device.h"

#define TMS_WAIT_POLL_SECONDS 0.05

typedef struct tms_wait {
    int32_t (*interrupted)(void *); /* NULL: not interruptible */
    void *context;                  /* argument of `interrupted` */
    double started;                 /* all times: seconds of CLOCK_MONOTONIC */
    double deadline;                /* INFINITY: none */
    double polled;                  /* when `interrupted` was called last, or the call began */
    bool cancelled;                 /* `interrupted` returned non-zero */
    _Atomic bool *call_cancelled;   /* for a part of a call: whether the call itself is cancelled; else NULL */
    pid_t process;                  /* the process that made the call: a signal handler may fork */
} tms_wait_t;

double tms_wait_now(void);

/* `timeout_seconds` from now is the deadline: 0 or less is now, INFINITY never. */
void tms_wait_begin(tms_wait_t *wait, int32_t (*interrupted)(void *), void *context, double timeout_seconds);
double tms_wait_elapsed(const tms_wait_t *wait);   /* seconds since it began */
double tms_wait_remaining(const tms_wait_t *wait); /* seconds until the deadline, not below 0; INFINITY */

static inline bool tms_wait_is_interruptible(const tms_wait_t *wait) { return wait && wait->interrupted; }
/* Whether the call itself was cancelled, so that it must end at once. False for a part that was cancelled because another
 * part of the call has failed. Does not call `interrupted`. */
static inline bool tms_wait_ends_call(const tms_wait_t *wait) {
    return wait && wait->cancelled && (!wait->call_cancelled || atomic_load(wait->call_cancelled));
}

/* Whether the call is cancelled. Calls `interrupted` if the interval has passed. */
bool tms_wait_interrupted(tms_wait_t *wait);
/* Returns the answer of tms_wait_interrupted as a status: TMS_OK, TMS_INTERRUPTED, or TMS_FORKED in a child that
 * `interrupted` forked. */
tms_status_t tms_wait_check(tms_wait_t *wait, const tms_error_context_t *context, tms_error_t *error);

/* Fills *error for a call that continues in a forked child. Returns TMS_FORKED. */
tms_status_t tms_wait_fail_forked(const tms_error_context_t *context, tms_error_t *error);

/* Calls `interrupted` at once, and otherwise does what tms_wait_check does. */
tms_status_t tms_wait_poll_now(tms_wait_t *wait, const tms_error_context_t *context, tms_error_t *error);

/* Sleeps `seconds`, but not beyond the deadline: not at all in a call without a timeout, whose deadline is its beginning.
 * TMS_INTERRUPTED as soon as the call is cancelled. */
tms_status_t tms_wait_sleep(tms_wait_t *wait, double seconds, const tms_error_context_t *context, tms_error_t *error);

/* Initialises a condition variable for tms_wait_on_condition, with timeouts on the monotonic clock. A forked child calls it
 * as well.
 */
void tms_wait_condition_init(pthread_cond_t *condition);
/* Waits once on the condition, with `mutex` held: without limit if the call is not interruptible, else for the polling
 * interval. May wake up early. The caller checks its predicate and, without the mutex, for cancellation. */
void tms_wait_on_condition(tms_wait_t *wait, pthread_cond_t *condition, pthread_mutex_t *mutex);
/* Waits once until `deadline` (tms_wait_now; INFINITY: none). Returns false at once if the deadline has passed. */
bool tms_wait_until(pthread_cond_t *condition, pthread_mutex_t *mutex, double deadline);

/* tms_devices_synchronize with this thread's current context, interruptible: a helper thread waits for the devices while
 * this one checks for cancellation. If the call is cancelled, returns TMS_INTERRUPTED with an empty *idle, and the helper
 * ends by itself. If the call is not interruptible, or no thread can be started (which is logged), this thread waits itself.
 */
tms_status_t tms_wait_for_devices(tms_wait_t *wait, tms_devices_t *devices, tms_device_mask_t mask, tms_device_mask_t *idle,
                                  const tms_log_t *log, const tms_error_context_t *context, tms_error_t *error);

#endif
