#include "core/model/captures.h"

#include "core/model/turn.h"
#include "device/capture_stream.h"

/* ---- the begin ---- */

static tms_status_t check_begin(tms_saver_t *saver, const tms_error_context_t *context, tms_error_t *error) {
    tms_status_t status = tms_saver_check_process(saver, context, error);
    if (status != TMS_OK || !tms_turn_is_inside()) return status;
    return tms_error_set(error, TMS_INVALID_STATE, context,
                         "this thread is inside pause() or resume(), which may wait for the device; do not begin a "
                         "capture in signal handlers, callbacks or finalisers");
}

tms_status_t tms_capture_table_begin(tms_saver_t *saver, const tms_region_t *region, uint64_t *identity,
                                     tms_error_t *error) {
    const tms_error_context_t context = {.operation = "capture_begin", .device = TMS_NO_DEVICE};
    uint64_t unwanted = 0;
    tms_status_t status = check_begin(saver, &context, error);
    if (status != TMS_OK) return status;
    pthread_mutex_lock(&saver->lock);
    status = tms_turn_await_end(saver, &context, error);
    if (status == TMS_OK)
        status = tms_capture_begin(&saver->capture, region, identity ? identity : &unwanted, &context, error);
    pthread_mutex_unlock(&saver->lock);
    return status;
}

tms_status_t tms_capture_table_begin_on(tms_saver_t *saver, void *stream, tms_capture_start_t *begun, tms_error_t *error) {
    const tms_error_context_t context = {.operation = "capture_begin", .device = TMS_NO_DEVICE};
    *begun = (tms_capture_start_t){.identity = 0};
    tms_status_t status = check_begin(saver, &context, error);
    begun->must_not_begin = status == TMS_INVALID_STATE;
    if (status != TMS_OK) return status;
    const tms_capture_stream_t where = tms_capture_locate(saver->devices, stream);
    pthread_mutex_lock(&saver->lock);
    status = tms_turn_await_end(saver, &context, error);
    begun->must_not_begin = status == TMS_INVALID_STATE;
    if (status == TMS_OK)
        status = tms_capture_begin_on(&saver->capture, &where, &begun->identity, &begun->known, &context, error);
    pthread_mutex_unlock(&saver->lock);
    return status;
}

void tms_capture_table_begun(tms_saver_t *saver, uint64_t identity) {
    pthread_mutex_lock(&saver->lock);
    tms_capture_note_begin(&saver->capture, identity);
    pthread_mutex_unlock(&saver->lock);
}

/* ---- queries ---- */

static bool has_ended(void *context, const tms_capture_stream_t *where) { return tms_capture_has_ended(context, where); }

bool tms_capture_table_goes_on(tms_saver_t *saver, uint64_t identity) {
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

int tms_capture_table_count(tms_saver_t *saver) {
    if (tms_capture_visible(&saver->capture) == 0 || atomic_load(&saver->forked))
        return tms_capture_visible(&saver->capture);
    pthread_mutex_lock(&saver->lock);
    int dropped = tms_capture_drop(&saver->capture, has_ended, saver->devices);
    int active = tms_capture_visible(&saver->capture);
    pthread_mutex_unlock(&saver->lock);
    if (dropped > 0)
        tms_log_write(
            saver->log, TMS_LOG_INFO,
            "%d stream capture%s ended, which was not reported to this library: frees that waited for %s are carried out",
            dropped, dropped == 1 ? " has" : "s have", dropped == 1 ? "it" : "them");
    return active;
}
