#include "core/transition/pending.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* An event that is recorded after a device's last copy. */
typedef struct last_copy {
    int device;
    CUevent event;
} last_copy_t;

struct tms_pending {
    tms_quarantined_t
        quarantined; /* first; used after both references are dropped, for events that the driver fails to destroy */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int references;
    tms_saver_t *saver;
    pid_t process;
    uint64_t begun;             /* the saver's last mark when the resume was begun */
    tms_selection_t selection;  /* the selection, which refers to `tags` */
    char **tags;                /* a copy in one block; NULL: all */
    tms_device_mask_t expected; /* devices that a stream must wait for; 0: not known yet, or no stream may rely on this
                                   attempt */
    tms_device_mask_t ready;    /* devices that are ready in this attempt */
    tms_device_mask_t recorded; /* devices that have recorded their event in this attempt */
    int count;                  /* number of `last_copies`, including those of earlier attempts */
    last_copy_t last_copies[TMS_MAX_DEVICES];
    bool promised; /* a stream relies on this attempt, which must not be undone */
    bool failed;   /* the attempt has failed, and no further stream may rely on it */
    bool finished;
    bool reported; /* a caller has received the result */
    tms_status_t status;
    tms_report_t report;
    tms_error_t error;
};

/* ---- references ---- */

/* Destroys the events. Returns false if the driver failed to destroy some. */
static bool destroy_events(tms_pending_t *pending) {
    tms_devices_t *devices = pending->saver->devices;
    const tms_driver_table_t *driver = atomic_load(&devices->driver->table);
    int left = 0;
    for (int i = 0; i < pending->count; i++) {
        tms_error_t reason;
        const tms_error_context_t context = {.operation = "resume", .device = pending->last_copies[i].device};
        tms_status_t status = tms_devices_enter(devices, context.device, &context, &reason);
        if (status == TMS_OK) {
            status = TMS_DRIVER_CALL(driver, &context, &reason, cuEventDestroy, pending->last_copies[i].event);
            tms_devices_leave(devices, context.device);
        }
        if (status == TMS_OK || tms_driver_is_gone(&reason)) continue;
        tms_log_write(pending->saver->log, TMS_LOG_WARNING,
                      "%s The event stays allocated; later calls try again to destroy it.", reason.message);
        pending->last_copies[left++] = pending->last_copies[i];
    }
    pending->count = left;
    return left == 0;
}

static void destroy(tms_pending_t *pending) {
    free(pending->tags);
    pthread_cond_destroy(&pending->changed);
    pthread_mutex_destroy(&pending->lock);
    free(pending);
}

static tms_quarantine_mask_t retry(tms_quarantined_t *node) {
    tms_pending_t *pending = (tms_pending_t *)node;
    if (!destroy_events(pending)) return node->holds;
    destroy(pending);
    return 0;
}

static void drop_reference(tms_pending_t *pending) {
    pthread_mutex_lock(&pending->lock);
    bool last = --pending->references == 0;
    pthread_mutex_unlock(&pending->lock);
    if (!last) return;
    if (pending->status != TMS_OK && pending->status != TMS_INTERRUPTED && !pending->reported)
        tms_log_write(pending->saver->log, TMS_LOG_ERROR, "%s This resume ran in the background, and no call waited for it.",
                      pending->error.message);
    if (destroy_events(pending)) {
        destroy(pending);
        return;
    }
    pending->quarantined = (tms_quarantined_t){.retry = retry, .holds = TMS_QUARANTINE_BIT(OTHER)};
    tms_quarantine_add(&pending->saver->quarantine, &pending->quarantined);
}

void tms_pending_release(tms_pending_t *pending) {
    if (!pending || pending->process != getpid()) return; /* in a forked child the other holder exists only in the parent */
    drop_reference(pending);
}

/* ---- the call ---- */

/* Copies the tags into one block: the pointers, then the strings. NULL if memory is short. */
static char **copy_tags(const char *const *tags, size_t count) {
    size_t bytes = (count + 1) * sizeof(char *);
    for (size_t i = 0; i < count; i++) bytes += strlen(tags[i]) + 1;
    char **copies = malloc(bytes);
    if (!copies) return NULL;
    char *end = (char *)(copies + count + 1);
    for (size_t i = 0; i < count; i++) {
        size_t length = strlen(tags[i]) + 1;
        copies[i] = memcpy(end, tags[i], length);
        end += length;
    }
    return copies;
}

static tms_status_t copy_selection(tms_pending_t *pending, const tms_selection_t *selection,
                                   const tms_error_context_t *context, tms_error_t *error) {
    pending->selection = *selection;
    pending->selection.interrupted = tms_pending_resumes_is_cancelled;
    pending->selection.interrupt_context = &pending->saver->pending_resumes;
    pending->selection.find_live = NULL;
    pending->selection.on_progress = NULL;
    pending->selection.tags = NULL;
    if (!selection->tags) return TMS_OK;
    pending->tags = copy_tags(selection->tags, selection->tag_count);
    pending->selection.tags = (const char *const *)pending->tags;
    return pending->tags ? TMS_OK : tms_error_set_os(error, context, "malloc", ENOMEM, NULL);
}

tms_status_t tms_pending_create(tms_saver_t *saver, const tms_selection_t *selection, tms_pending_t **pending,
                                const tms_error_context_t *context, tms_error_t *error) {
    tms_pending_t *made = calloc(1, sizeof *made);
    if (!made) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    made->saver = saver;
    made->process = getpid();
    made->references = 2;
    pthread_mutex_lock(&saver->lock);
    made->begun = saver->marks;
    pthread_mutex_unlock(&saver->lock);
    pthread_mutex_init(&made->lock, NULL);
    tms_wait_condition_init(&made->changed);
    tms_status_t status = copy_selection(made, selection, context, error);
    if (status != TMS_OK) {
        destroy(made);
        return status;
    }
    *pending = made;
    return TMS_OK;
}

tms_saver_t *tms_pending_saver(const tms_pending_t *pending) { return pending->saver; }

const tms_selection_t *tms_pending_selection(const tms_pending_t *pending) { return &pending->selection; }

uint64_t tms_pending_begun(const tms_pending_t *pending) { return pending->begun; }

void tms_pending_end(tms_pending_t *pending, tms_status_t status, const tms_report_t *report, const tms_error_t *error) {
    pthread_mutex_lock(&pending->lock);
    pending->status = status;
    pending->report = *report;
    pending->error = *error;
    pending->finished = true;
    pthread_cond_broadcast(&pending->changed);
    pthread_mutex_unlock(&pending->lock);
    drop_reference(pending);
}

/* ---- the resuming thread ---- */

void tms_pending_expect(tms_pending_t *pending, tms_device_mask_t devices) {
    if (!pending) return;
    pthread_mutex_lock(&pending->lock);
    pending->expected = devices;
    pending->ready = pending->recorded = 0;
    pending->failed = false;
    pthread_cond_broadcast(&pending->changed);
    pthread_mutex_unlock(&pending->lock);
}

/* Gets the device's event, which is created unless an earlier attempt has created it. Called on this device's thread
 * only. */
static tms_status_t need_event(tms_pending_t *pending, const tms_copier_t *copier, CUevent *event,
                               const tms_error_context_t *context, tms_error_t *error) {
    pthread_mutex_lock(&pending->lock);
    for (int i = 0; i < pending->count; i++) {
        if (pending->last_copies[i].device == copier->device) *event = pending->last_copies[i].event;
    }
    pthread_mutex_unlock(&pending->lock);
    if (*event) return TMS_OK;
    tms_status_t status = TMS_DRIVER_CALL(copier->driver, context, error, cuEventCreate, event, CU_EVENT_DISABLE_TIMING);
    if (status != TMS_OK) return status;
    pthread_mutex_lock(&pending->lock);
    pending->last_copies[pending->count++] = (last_copy_t){.device = copier->device, .event = *event};
    pthread_mutex_unlock(&pending->lock);
    return TMS_OK;
}

tms_status_t tms_pending_ready(tms_pending_t *pending, int device, const tms_copier_t *copier,
                               const tms_error_context_t *context, tms_error_t *error) {
    const tms_device_mask_t bit = (tms_device_mask_t)1 << device;
    CUevent event = NULL;
    tms_status_t status = TMS_OK;
    if (!pending) return TMS_OK;
    if (copier) status = need_event(pending, copier, &event, context, error);
    if (event && status == TMS_OK)
        status = TMS_DRIVER_CALL(copier->driver, context, error, cuEventRecord, event, copier->stream);
    if (status != TMS_OK) return status;
    pthread_mutex_lock(&pending->lock);
    pending->ready |= bit;
    if (event) pending->recorded |= bit;
    pthread_cond_broadcast(&pending->changed);
    pthread_mutex_unlock(&pending->lock);
    return TMS_OK;
}

bool tms_pending_may_undo(tms_pending_t *pending) {
    if (!pending) return true;
    pthread_mutex_lock(&pending->lock);
    bool may = !pending->promised;
    pending->failed = true;
    pthread_mutex_unlock(&pending->lock);
    return may;
}

/* ---- the caller ---- */

int32_t tms_pending_done(tms_pending_t *pending) {
    if (pending->process != getpid()) return 1;
    pthread_mutex_lock(&pending->lock);
    bool finished = pending->finished;
    pthread_mutex_unlock(&pending->lock);
    return finished;
}

static bool is_finished(const tms_pending_t *pending) { return pending->finished; }
static bool is_ready(const tms_pending_t *pending) {
    return pending->finished || (pending->expected != 0 && pending->ready == pending->expected && !pending->failed);
}

/* Waits until the condition holds. Returns with the lock held on success. */
static tms_status_t await(tms_pending_t *pending, bool (*holds)(const tms_pending_t *), int32_t (*interrupted)(void *),
                          void *interrupt_context, tms_error_t *error) {
    const tms_error_context_t context = {.operation = "resume", .device = TMS_NO_DEVICE};
    tms_wait_t wait;
    tms_wait_begin(&wait, interrupted, interrupt_context, INFINITY);
    if (pending->process != getpid()) return tms_wait_fail_forked(&context, error);
    pthread_mutex_lock(&pending->lock);
    while (!holds(pending)) {
        tms_wait_on_condition(&wait, &pending->changed, &pending->lock);
        if (holds(pending) || !tms_wait_is_interruptible(&wait)) continue;
        pthread_mutex_unlock(&pending->lock);
        tms_status_t status = tms_wait_check(&wait, &context, error);
        if (status != TMS_OK) return status;
        pthread_mutex_lock(&pending->lock);
    }
    return TMS_OK;
}

/* Returns the result of the resume to a caller, with the lock held. */
static tms_status_t outcome(tms_pending_t *pending, tms_error_t *error) {
    pending->reported = true;
    if (pending->status != TMS_OK && error) *error = pending->error;
    return pending->status;
}

tms_status_t tms_pending_wait(tms_pending_t *pending, int32_t (*interrupted)(void *), void *context, tms_report_t *report,
                              tms_error_t *error) {
    tms_status_t status = await(pending, is_finished, interrupted, context, error);
    if (status != TMS_OK) return status;
    status = outcome(pending, error);
    if (status == TMS_OK && report) *report = pending->report;
    pthread_mutex_unlock(&pending->lock);
    return status;
}

tms_status_t tms_pending_await(tms_pending_t *pending, int32_t (*interrupted)(void *), void *context, tms_error_t *error) {
    tms_status_t status = await(pending, is_finished, interrupted, context, error);
    if (status == TMS_OK) pthread_mutex_unlock(&pending->lock);
    return status;
}

/* ---- streams ---- */

/* Enters a context for the calls on the stream if the thread has none; *entered is its device, else TMS_NO_DEVICE. The
 * default streams are then those of device 0, as in the CUDA runtime. */
static tms_status_t enter_if_outside(const tms_pending_t *pending, const void *stream, int *entered,
                                     const tms_error_context_t *context, tms_error_t *error) {
    tms_devices_t *devices = pending->saver->devices;
    const tms_driver_table_t *driver = atomic_load(&devices->driver->table);
    tms_device_mask_t active = 0;
    CUdevice current;
    bool by_default = tms_is_default_stream(stream);
    int device = by_default ? 0 : __builtin_ctzll(pending->recorded);
    *entered = TMS_NO_DEVICE;
    CUresult result = driver->cuCtxGetDevice ? driver->cuCtxGetDevice(&current) : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS) return TMS_OK;
    if (result != CUDA_ERROR_INVALID_CONTEXT) return tms_driver_fail(driver, context, "cuCtxGetDevice", result, error);
    tms_status_t status = by_default ? tms_devices_active(devices, &active, context, error) : TMS_OK;
    if (status == TMS_OK && by_default && !(active & 1))
        return tms_error_set(error, TMS_INVALID_STATE, context,
                             "this thread has no CUDA context, and device 0, whose default stream it would use, is not in "
                             "use; make a device current first (torch.cuda.set_device), or call wait()");
    if (status == TMS_OK) status = tms_devices_enter(devices, device, context, error);
    if (status == TMS_OK) *entered = device;
    return status;
}

/* Makes the stream wait for the events. With the lock held, when every device is ready. */
static tms_status_t make_stream_wait(const tms_pending_t *pending, void *stream, tms_error_t *error) {
    const tms_error_context_t context = {.operation = "resume", .device = TMS_NO_DEVICE};
    const tms_driver_table_t *driver = atomic_load(&pending->saver->devices->driver->table);
    int entered = TMS_NO_DEVICE;
    if (pending->recorded == 0) return TMS_OK; /* the memory is mapped, and nothing is copied into it */
    tms_status_t status = enter_if_outside(pending, stream, &entered, &context, error);
    for (int i = 0; i < pending->count && status == TMS_OK; i++) {
        if (!(pending->recorded >> pending->last_copies[i].device & 1)) continue;
        status = TMS_DRIVER_CALL(driver, &context, error, cuStreamWaitEvent, stream, pending->last_copies[i].event, 0);
    }
    if (entered != TMS_NO_DEVICE) tms_devices_leave(pending->saver->devices, entered);
    return status;
}

tms_status_t tms_pending_wait_stream(tms_pending_t *pending, void *stream, int32_t (*interrupted)(void *), void *context,
                                     tms_error_t *error) {
    tms_status_t status = await(pending, is_ready, interrupted, context, error);
    if (status != TMS_OK) return status;
    if (pending->finished) {
        status = outcome(pending, error); /* the contents are complete, or the resume has failed */
    } else {
        status = make_stream_wait(pending, stream, error);
        /* This is set last, because a caller that gets an error must not rely on the contents. The call cannot have begun to
         * undo, because that needs the lock. */
        if (status == TMS_OK) pending->promised = true;
    }
    pthread_mutex_unlock(&pending->lock);
    return status;
}
