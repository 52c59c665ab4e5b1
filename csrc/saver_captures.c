/* Captures as the saver sees them: who may begin one when, and what their end sets free. Declared in saver.h. */

#include "capture_stream.h"
#include "saver.h"
#include "transition.h"

/* ---- callbacks of a pause or resume ---- */

static void note_callback(tms_saver_t *saver, double began) {
    pthread_mutex_lock(&saver->lock);
    saver->callback_began = began;
    pthread_cond_broadcast(&saver->turn); /* a capture that is to begin waits for a callback only so long */
    pthread_mutex_unlock(&saver->lock);
}

void tms_saver_callback_begin(tms_saver_t *saver) { note_callback(saver, tms_wait_now()); }
void tms_saver_callback_end(tms_saver_t *saver) { note_callback(saver, 0); }

/* ---- the begin ---- */

/* Under the lock. A transition under way has asked already whether a capture is visible, and would wait for a device during
 * this one. While it goes on by itself it is waited for; while it waits in a callback it may be waiting for this very
 * thread, which a Python program's may keep from running by holding the GIL. */
static tms_status_t await_transition(tms_saver_t *saver, const tms_error_context_t *context, tms_error_t *error) {
    while (saver->transition_running) {
        if (saver->callback_began == 0) {
            pthread_cond_wait(&saver->turn, &saver->lock);
            continue;
        }
        double end = saver->callback_began + saver->callback_patience_seconds;
        if (tms_wait_now() >= end)
            return tms_error_set(
                error, TMS_INVALID_STATE, context,
                "a pause() or resume() on another thread has been in a callback (for Ctrl-C, live bytes or "
                "progress) for %.1f seconds, perhaps because this thread holds the GIL that it needs: begin "
                "the capture again, without the GIL or when that call has ended",
                saver->callback_patience_seconds);
        (void)tms_wait_until(&saver->turn, &saver->lock, end);
    }
    return TMS_OK;
}

static tms_status_t check_begin(tms_saver_t *saver, const tms_error_context_t *context, tms_error_t *error) {
    tms_status_t status = tms_saver_check_process(saver, context, error);
    if (status != TMS_OK || !tms_transition_is_inside()) return status;
    return tms_error_set(error, TMS_INVALID_STATE, context,
                         "this thread is inside pause() or resume(), which may wait for the device; do not begin a "
                         "capture in signal handlers, callbacks or finalisers");
}

tms_status_t tms_saver_capture_begin(tms_saver_t *saver, const tms_region_t *region, uint64_t *identity,
                                     tms_error_t *error) {
    const tms_error_context_t context = {.operation = "capture_begin", .device = TMS_NO_DEVICE};
    uint64_t unwanted = 0;
    tms_status_t status = check_begin(saver, &context, error);
    if (status != TMS_OK) return status;
    pthread_mutex_lock(&saver->lock);
    status = await_transition(saver, &context, error);
    if (status == TMS_OK)
        status = tms_capture_begin(&saver->capture, region, identity ? identity : &unwanted, &context, error);
    pthread_mutex_unlock(&saver->lock);
    return status;
}

tms_status_t tms_saver_capture_begin_on(tms_saver_t *saver, void *stream, tms_capture_begun_t *begun, tms_error_t *error) {
    const tms_error_context_t context = {.operation = "capture_begin", .device = TMS_NO_DEVICE};
    *begun = (tms_capture_begun_t){.identity = 0};
    tms_status_t status = check_begin(saver, &context, error);
    begun->must_not_begin = status == TMS_INVALID_STATE;
    if (status != TMS_OK) return status;
    const tms_capture_stream_t where = tms_capture_locate(saver->devices, stream);
    pthread_mutex_lock(&saver->lock);
    status = await_transition(saver, &context, error);
    begun->must_not_begin = status == TMS_INVALID_STATE;
    if (status == TMS_OK)
        status = tms_capture_begin_on(&saver->capture, &where, &begun->identity, &begun->known, &context, error);
    pthread_mutex_unlock(&saver->lock);
    return status;
}

void tms_saver_capture_begun(tms_saver_t *saver, uint64_t identity) {
    pthread_mutex_lock(&saver->lock);
    tms_capture_begun(&saver->capture, identity);
    pthread_mutex_unlock(&saver->lock);
}

/* ---- the end ---- */

/* The last end finishes what had to wait for it. */
static void after_end(tms_saver_t *saver, bool ended) {
    if (ended && !tms_capture_visible(&saver->capture) && !atomic_load(&saver->forked)) tms_saver_reclaim(saver);
}

bool tms_saver_capture_end(tms_saver_t *saver, uint64_t identity) {
    pthread_mutex_lock(&saver->lock);
    bool ended = identity ? tms_capture_end(&saver->capture, identity) : tms_capture_end_last(&saver->capture);
    pthread_mutex_unlock(&saver->lock);
    after_end(saver, ended);
    return ended;
}

void tms_saver_capture_end_on(tms_saver_t *saver, void *stream) {
    pthread_mutex_lock(&saver->lock);
    bool ended = tms_capture_end(&saver->capture, tms_capture_find(&saver->capture, tms_capture_key(stream)));
    pthread_mutex_unlock(&saver->lock);
    after_end(saver, ended);
}

/* ---- streams that go ---- */

size_t tms_saver_capture_take(tms_saver_t *saver, void *stream, int device, tms_capture_stream_t *taken) {
    uintptr_t key = stream ? tms_capture_key(stream) : 0;
    size_t count = 0;
    pthread_mutex_lock(&saver->lock);
    for (int i = tms_capture_visible(&saver->capture); i-- > 0;) {
        const tms_capture_entry_t *entry = &saver->capture.entries[i];
        bool meant = key ? entry->where.key == key : entry->where.device == device;
        if (!entry->begun || !meant) continue;
        taken[count++] = entry->where;
        (void)tms_capture_end(&saver->capture, entry->begun);
    }
    pthread_mutex_unlock(&saver->lock);
    return count;
}

void tms_saver_capture_taken(tms_saver_t *saver, const tms_capture_stream_t *taken, size_t count, bool gone) {
    const tms_error_context_t context = {.operation = "capture_begin", .device = TMS_NO_DEVICE};
    uint64_t identity;
    bool known;
    pthread_mutex_lock(&saver->lock);
    for (size_t i = 0; i < count && !gone; i++) { /* the room that they had is enough, unless others have begun since */
        if (tms_capture_begin_on(&saver->capture, &taken[i], &identity, &known, &context, NULL) == TMS_OK)
            tms_capture_begun(&saver->capture, identity);
    }
    pthread_mutex_unlock(&saver->lock);
    after_end(saver, gone && count > 0);
}

/* ---- asking ---- */

static bool has_ended(void *context, const tms_capture_stream_t *where) { return tms_capture_has_ended(context, where); }

bool tms_saver_capture_goes_on(tms_saver_t *saver, uint64_t identity) {
    bool goes_on = false;
    pthread_mutex_lock(&saver->lock);
    for (int i = tms_capture_visible(&saver->capture); i-- > 0;) {
        const tms_capture_entry_t *entry = &saver->capture.entries[i];
        if (entry->begun == identity)
            goes_on = entry->where.device != TMS_NO_DEVICE && !tms_capture_has_ended(saver->devices, &entry->where);
    }
    pthread_mutex_unlock(&saver->lock);
    return goes_on;
}

int tms_saver_captures(tms_saver_t *saver) {
    if (tms_capture_visible(&saver->capture) == 0 || atomic_load(&saver->forked))
        return tms_capture_visible(&saver->capture);
    pthread_mutex_lock(&saver->lock);
    int dropped = tms_capture_drop(&saver->capture, has_ended, saver->devices);
    int left = tms_capture_visible(&saver->capture);
    pthread_mutex_unlock(&saver->lock);
    if (dropped > 0)
        tms_log_write(saver->log, TMS_LOG_INFO,
                      "%d stream capture%s ended without a call that could be seen: what had to wait for %s need not any "
                      "longer",
                      dropped, dropped == 1 ? " has" : "s have", dropped == 1 ? "it" : "them");
    return left;
}
