#include "device/wait.h"

#include <errno.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "base/thread.h"
#include "device/synchronize.h"

double tms_wait_now(void) { return (double)tms_clock_nanoseconds() / TMS_NANOSECONDS; }

/* `seconds` is finite and small. */
static struct timespec split(double seconds) {
    time_t whole = (time_t)seconds;
    long rest = (long)((seconds - (double)whole) * TMS_NANOSECONDS);
    return (struct timespec){.tv_sec = whole, .tv_nsec = rest < TMS_NANOSECONDS ? rest : TMS_NANOSECONDS - 1};
}

void tms_wait_begin(tms_wait_t *wait, int32_t (*interrupted)(void *), void *context, double timeout_seconds) {
    double now = tms_wait_now();
    *wait = (tms_wait_t){.interrupted = interrupted,
                         .context = context,
                         .started = now,
                         .deadline = timeout_seconds > 0 ? now + timeout_seconds : now,
                         .polled = now,
                         .process = getpid()};
}

double tms_wait_elapsed(const tms_wait_t *wait) { return wait ? tms_wait_now() - wait->started : 0; }

double tms_wait_remaining(const tms_wait_t *wait) {
    if (!wait) return INFINITY;
    double remaining = wait->deadline - tms_wait_now();
    return remaining > 0 ? remaining : 0;
}

bool tms_wait_interrupted(tms_wait_t *wait) {
    if (!tms_wait_is_interruptible(wait)) return false;
    if (wait->cancelled) return true;
    if (tms_wait_now() - wait->polled < TMS_WAIT_POLL_SECONDS) return false;
    wait->cancelled = wait->interrupted(wait->context) != 0 || getpid() != wait->process;
    wait->polled = tms_wait_now(); /* read after the callback, because the callback may be slow */
    return wait->cancelled;
}

tms_status_t tms_wait_fail_forked(const tms_error_context_t *context, tms_error_t *error) {
    return tms_error_set(error, TMS_FORKED, context, "the call began in the parent process, which owns the memory");
}

tms_status_t tms_wait_check(tms_wait_t *wait, const tms_error_context_t *context, tms_error_t *error) {
    if (!tms_wait_interrupted(wait)) return TMS_OK;
    if (getpid() != wait->process) return tms_wait_fail_forked(context, error);
    tms_error_context_t call = {.operation = context->operation, .device = TMS_NO_DEVICE};
    return tms_error_set(error, TMS_INTERRUPTED, &call, NULL);
}

tms_status_t tms_wait_poll_now(tms_wait_t *wait, const tms_error_context_t *context, tms_error_t *error) {
    if (wait) wait->polled = -INFINITY;
    return tms_wait_check(wait, context, error);
}

tms_status_t tms_wait_sleep(tms_wait_t *wait, double seconds, const tms_error_context_t *context, tms_error_t *error) {
    double limit = tms_wait_remaining(wait);
    double end = tms_wait_now() + (seconds < limit ? seconds : limit);
    for (;;) {
        tms_status_t status = tms_wait_check(wait, context, error);
        double remaining = end - tms_wait_now();
        if (status != TMS_OK || remaining <= 0) return status;
        struct timespec part = split(remaining < TMS_WAIT_POLL_SECONDS ? remaining : TMS_WAIT_POLL_SECONDS);
        (void)nanosleep(&part, NULL); /* a signal ends it early */
    }
}

void tms_wait_condition_init(pthread_cond_t *condition) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

void tms_wait_on_condition(tms_wait_t *wait, pthread_cond_t *condition, pthread_mutex_t *mutex) {
    if (!tms_wait_is_interruptible(wait)) {
        pthread_cond_wait(condition, mutex);
        return;
    }
    struct timespec until = split(tms_wait_now() + TMS_WAIT_POLL_SECONDS);
    (void)pthread_cond_timedwait(condition, mutex, &until);
}

bool tms_wait_until(pthread_cond_t *condition, pthread_mutex_t *mutex, double deadline) {
    if (isinf(deadline)) {
        pthread_cond_wait(condition, mutex);
        return true;
    }
    if (tms_wait_now() >= deadline) return false;
    struct timespec until = split(deadline);
    (void)pthread_cond_timedwait(condition, mutex, &until);
    return true;
}

/* ---- the devices ---- */

/* The work of a helper thread. The caller and the helper hold a reference each; the last one dropped frees it. A cancelled
 * caller drops its reference first. */
typedef struct job {
    pthread_mutex_t lock;
    pthread_cond_t finished_condition;
    int references;
    bool finished;
    tms_devices_t *devices;
    tms_device_mask_t mask, idle;
    tms_current_context_t current; /* the caller's context; the helper has none */
    tms_error_context_t context;
    tms_status_t status;
    tms_error_t error;
} job_t;

static void drop_reference(job_t *job) {
    pthread_mutex_lock(&job->lock);
    bool last = --job->references == 0;
    pthread_mutex_unlock(&job->lock);
    if (!last) return;
    pthread_cond_destroy(&job->finished_condition);
    pthread_mutex_destroy(&job->lock);
    free(job);
}

static void *run_helper(void *argument) {
    job_t *job = argument;
    tms_error_t error;
    tms_device_mask_t idle = 0;
    tms_error_clear(&error);
    tms_status_t status = tms_devices_synchronize(job->devices, job->mask, &job->current, &idle, &job->context, &error);
    atomic_fetch_sub(&job->devices->helpers, 1);
    pthread_mutex_lock(&job->lock);
    job->status = status;
    job->idle = idle;
    job->error = error;
    job->finished = true;
    pthread_cond_signal(&job->finished_condition);
    pthread_mutex_unlock(&job->lock);
    drop_reference(job);
    return NULL;
}

/* Waits for the helper and checks for cancellation, without holding the lock. */
static tms_status_t await_helper(tms_wait_t *wait, job_t *job, const tms_error_context_t *context, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    bool finished = false;
    while (status == TMS_OK && !finished) {
        pthread_mutex_lock(&job->lock);
        if (!job->finished) tms_wait_on_condition(wait, &job->finished_condition, &job->lock);
        finished = job->finished;
        pthread_mutex_unlock(&job->lock);
        if (!finished) status = tms_wait_check(wait, context, error);
    }
    return status;
}

/* Starts a job with a helper, with both references held. NULL if memory or a thread is not available. */
static job_t *begin_job(pthread_t *thread, tms_devices_t *devices, tms_device_mask_t mask,
                        const tms_current_context_t *current, const tms_log_t *log, const tms_error_context_t *context) {
    job_t *job = calloc(1, sizeof *job);
    int os_error = ENOMEM;
    if (job) {
        *job = (job_t){.references = 2, .devices = devices, .mask = mask, .current = *current, .context = *context};
        pthread_mutex_init(&job->lock, NULL);
        tms_wait_condition_init(&job->finished_condition);
        atomic_fetch_add(&devices->helpers, 1);
        os_error = tms_thread_start(thread, run_helper, job);
        if (os_error == 0) return job;
        atomic_fetch_sub(&devices->helpers, 1);
    }
    tms_log_write(
        log, TMS_LOG_WARNING,
        "%s: no thread could be started to wait for the devices (%s: %s): the call cannot be interrupted while it waits",
        context->operation, job ? "pthread_create" : "calloc", TMS_OS_TEXT(os_error));
    if (job) {
        job->references = 1;
        drop_reference(job);
    }
    return NULL;
}

tms_status_t tms_wait_for_devices(tms_wait_t *wait, tms_devices_t *devices, tms_device_mask_t mask, tms_device_mask_t *idle,
                                  const tms_log_t *log, const tms_error_context_t *context, tms_error_t *error) {
    pthread_t thread;
    tms_current_context_t current;
    tms_error_t own;
    if (idle) *idle = 0;
    tms_status_t status = tms_devices_current_context(devices, &current, context, error);
    if (status != TMS_OK) return status;
    job_t *job = tms_wait_is_interruptible(wait) ? begin_job(&thread, devices, mask, &current, log, context) : NULL;
    if (!job) return tms_devices_synchronize(devices, mask, &current, idle, context, error ? error : &own);
    status = await_helper(wait, job, context, error);
    if (status == TMS_OK) {
        pthread_join(thread, NULL);
        status = job->status;
        if (idle) *idle = job->idle;
        if (status != TMS_OK && error) *error = job->error;
    } else if (status == TMS_FORKED) {
        return status; /* the helper exists only in the parent, and may hold the lock */
    } else {
        pthread_detach(thread);
    }
    drop_reference(job);
    return status;
}
