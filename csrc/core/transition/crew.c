#include "core/transition/crew.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/thread.h"

/* The shared state of the parts, on the stack of the call, which waits for all of them. */
typedef struct crew {
    tms_transition_t *t;
    tms_crew_work_t work;
    pthread_mutex_t lock;
    pthread_cond_t ended; /* a thread has finished its part */
    int running;
    _Atomic bool stopped;        /* parts that have not ended are cancelled */
    _Atomic bool call_cancelled; /* the reason is that the call was cancelled; set before `stopped` */
} crew_t;

typedef struct part {
    crew_t *crew;
    int device;
    bool has_thread;
    pthread_t thread;
    tms_status_t status;
    tms_error_t error;
} part_t;

static int32_t is_stopped(void *context) { return atomic_load(&((crew_t *)context)->stopped); }

/* Stops the parts that have not ended. `wait` is the one of the calling thread. */
static void stop(crew_t *crew, const tms_wait_t *wait) {
    if (tms_wait_ends_call(wait)) atomic_store(&crew->call_cancelled, true);
    atomic_store(&crew->stopped, true);
}

static void perform(part_t *part, tms_wait_t *wait) {
    tms_error_clear(&part->error);
    part->status = part->crew->work(part->crew->t, part->device, wait, &part->error);
    if (part->status != TMS_OK) stop(part->crew, wait);
}

static void *run(void *argument) {
    part_t *part = argument;
    tms_wait_t wait;
    tms_wait_begin(&wait, is_stopped, part->crew, 0);
    wait.call_cancelled = &part->crew->call_cancelled;
    perform(part, &wait);
    pthread_mutex_lock(&part->crew->lock);
    part->crew->running--;
    pthread_cond_signal(&part->crew->ended);
    pthread_mutex_unlock(&part->crew->lock);
    return NULL;
}

/* Waits for the threads, and checks for cancellation. TMS_INTERRUPTED if the call was cancelled. */
static tms_status_t await_threads(crew_t *crew, const tms_error_context_t *context, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    bool running = true;
    while (running) {
        pthread_mutex_lock(&crew->lock);
        if (crew->running > 0) tms_wait_on_condition(&crew->t->wait, &crew->ended, &crew->lock);
        running = crew->running > 0;
        pthread_mutex_unlock(&crew->lock);
        if (!running || status != TMS_OK) continue;
        status = tms_wait_check(&crew->t->wait, context, error);
        if (status == TMS_FORKED) return status;
        if (status != TMS_OK) stop(crew, &crew->t->wait);
    }
    return status;
}

/* Returns the failure to report. The failure of a cancelled part comes after any other. */
static const part_t *find_failure(const part_t *parts, int count) {
    const part_t *failed = NULL;
    for (int i = 0; i < count; i++) {
        if (parts[i].status == TMS_OK) continue;
        if (!failed || failed->status == TMS_INTERRUPTED) failed = &parts[i];
    }
    return failed;
}

/* Starts a thread for each part except the first, which the thread of the call performs. */
static void start_threads(crew_t *crew, part_t *parts, int count) {
    for (int i = 1; i < count; i++) {
        pthread_mutex_lock(&crew->lock);
        crew->running++;
        pthread_mutex_unlock(&crew->lock);
        int os_error = tms_thread_start(&parts[i].thread, run, &parts[i]);
        parts[i].has_thread = os_error == 0;
        if (parts[i].has_thread) continue;
        pthread_mutex_lock(&crew->lock);
        crew->running--;
        pthread_mutex_unlock(&crew->lock);
        tms_log_write(crew->t->saver->log, TMS_LOG_WARNING,
                      "%s: no thread could be started for device %d (pthread_create: %s), so its memory is handled after "
                      "that of the other devices",
                      crew->t->requested.operation, parts[i].device, TMS_OS_TEXT(os_error));
    }
}

/* A callback of the program may have forked. */
static bool is_forked(const crew_t *crew) { return getpid() != crew->t->wait.process; }

/* The first part runs on this thread. Parts whose thread could not be started follow on it. */
static tms_status_t perform_parts(crew_t *crew, part_t *parts, int count, tms_error_t *error) {
    tms_error_context_t context = tms_transition_context(crew->t, TMS_NO_DEVICE);
    start_threads(crew, parts, count);
    for (int i = 0; i < count && !is_forked(crew); i++) {
        if (parts[i].has_thread) continue;
        if (atomic_load(&crew->stopped)) break;
        perform(&parts[i], &crew->t->wait);
    }
    tms_status_t status = TMS_OK;
    if (!is_forked(crew)) status = await_threads(crew, &context, error);
    if (is_forked(crew)) return tms_wait_fail_forked(&context, error);
    for (int i = 0; i < count; i++) {
        if (parts[i].has_thread) pthread_join(parts[i].thread, NULL);
    }
    const part_t *failed = find_failure(parts, count);
    if (!failed) return status;
    if (status != TMS_OK && failed->status == TMS_INTERRUPTED) return status;
    if (error) *error = failed->error;
    return failed->status;
}

tms_status_t tms_crew_perform(tms_transition_t *t, tms_device_mask_t devices, tms_crew_work_t work, tms_error_t *error) {
    const tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    crew_t crew = {.t = t, .work = work};
    int count = 0;
    if (devices == 0) return TMS_OK;
    if ((devices & (devices - 1)) == 0) return work(t, __builtin_ctzll(devices), &t->wait, error);
    part_t *parts = calloc((size_t)__builtin_popcountll(devices), sizeof *parts);
    if (!parts) return tms_error_set_os(error, &context, "calloc", ENOMEM, NULL);
    for (int device = 0; device < t->devices->count; device++) {
        if (devices >> device & 1) parts[count++] = (part_t){.crew = &crew, .device = device};
    }
    pthread_mutex_init(&crew.lock, NULL);
    tms_wait_condition_init(&crew.ended);
    tms_status_t status = perform_parts(&crew, parts, count, error);
    if (status != TMS_FORKED) { /* in a forked child the threads that hold them exist only in the parent */
        pthread_cond_destroy(&crew.ended);
        pthread_mutex_destroy(&crew.lock);
    }
    free(parts);
    return status;
}
