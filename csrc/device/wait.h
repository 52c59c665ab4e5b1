/* Waiting: for the devices, for a turn, for memory that others hold. Each wait of a call goes through the call's tms_wait_t,
 * which knows the deadline and the function that says whether the call is cancelled.
 *
 * The caller's `interrupted` is asked on the thread of the call, with no lock of ours held, and at most once in
 * TMS_WAIT_POLL_SECONDS. It may run anything that may be run on that thread (Python's signal handlers, a garbage
 * collection); what it may not do is pause, resume, or begin a capture. During a copy it finds the context of the device
 * that copies current, not the caller's, and the thread's capture mode relaxed (capture_mode.h); what it makes current then
 * is popped with that. Once it has cancelled the call it is not asked again. After its commit point a call cannot be
 * cancelled, and asks no more.
 *
 * A tms_wait_t belongs to one call and is used on its thread only. Every function takes NULL for one that has no limit, is
 * not interruptible and never sleeps. */
#ifndef TMS_WAIT_H
#define TMS_WAIT_H

#include <pthread.h>
#include <stdbool.h>
#include <sys/types.h>

#include "device/device.h"

#define TMS_WAIT_POLL_SECONDS 0.05

typedef struct tms_wait {
    int32_t (*interrupted)(void *); /* NULL: not interruptible */
    void *context;                  /* of `interrupted` */
    double started;                 /* all times: seconds of CLOCK_MONOTONIC */
    double deadline;                /* INFINITY: none */
    double asked;                   /* when `interrupted` was asked last, or the call began */
    bool cancelled;                 /* `interrupted` returned non-zero */
    pid_t process;                  /* where the call began: a signal handler may fork */
} tms_wait_t;

double tms_wait_now(void);

/* `timeout_seconds` from now is the deadline: 0 or less is now, INFINITY never. */
void tms_wait_begin(tms_wait_t *wait, int32_t (*interrupted)(void *), void *context, double timeout_seconds);
double tms_wait_elapsed(const tms_wait_t *wait);   /* seconds since it began */
double tms_wait_remaining(const tms_wait_t *wait); /* seconds until the deadline, not below 0; INFINITY */

static inline bool tms_wait_is_interruptible(const tms_wait_t *wait) { return wait && wait->interrupted; }

/* Whether the call is cancelled. Asks if it is time to. */
bool tms_wait_interrupted(tms_wait_t *wait);
/* The same as a status: TMS_OK, TMS_INTERRUPTED, or TMS_FORKED in a child that `interrupted` forked. */
tms_status_t tms_wait_check(tms_wait_t *wait, const tms_error_context_t *context, tms_error_t *error);

/* tms_wait_check that asks at once. */
tms_status_t tms_wait_ask(tms_wait_t *wait, const tms_error_context_t *context, tms_error_t *error);

/* Sleeps `seconds`, but not beyond the deadline. TMS_INTERRUPTED as soon as the call is cancelled. */
tms_status_t tms_wait_sleep(tms_wait_t *wait, double seconds, const tms_error_context_t *context, tms_error_t *error);

/* A condition variable for tms_wait_on_condition: its timeouts must not follow the wall clock. Also remade in a forked
 * child.
 */
void tms_wait_condition_init(pthread_cond_t *condition);
/* Waits on it, with `mutex` held, once: for as long as it takes where the call is not interruptible, else for the interval
 * between two questions. May wake up early; the caller looks at what it waits for, and asks (without the mutex). */
void tms_wait_on_condition(tms_wait_t *wait, pthread_cond_t *condition, pthread_mutex_t *mutex);
/* The same until `deadline` (tms_wait_now; INFINITY: none). False, at once, where that has passed. */
bool tms_wait_until(pthread_cond_t *condition, pthread_mutex_t *mutex, double deadline);

/* tms_devices_synchronize with this thread's current context, interruptible: a helper thread waits for the devices while
 * this one asks. When the call is cancelled the helper is left to end by itself, and TMS_INTERRUPTED returned, with no
 * device *at_rest. Where the call is not interruptible, or no thread can be had (which is logged), this thread waits itself.
 */
tms_status_t tms_wait_for_devices(tms_wait_t *wait, tms_devices_t *devices, tms_device_mask_t mask,
                                  tms_device_mask_t *at_rest, const tms_log_t *log, const tms_error_context_t *context,
                                  tms_error_t *error);

#endif
