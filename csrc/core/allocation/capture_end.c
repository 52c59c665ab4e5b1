#include "core/allocation/capture_end.h"

#include "core/allocation/reclaim.h"
#include "device/capture_stream.h"

/* The end of the last capture runs the frees that were deferred until then. */
static void after_end(tms_saver_t *saver, bool ended) {
    if (ended && !tms_capture_visible(&saver->capture) && !atomic_load(&saver->forked)) tms_reclaim_all(saver);
}

bool tms_capture_end_of(tms_saver_t *saver, uint64_t identity) {
    pthread_mutex_lock(&saver->lock);
    bool ended = identity ? tms_capture_end(&saver->capture, identity) : tms_capture_end_last(&saver->capture);
    pthread_mutex_unlock(&saver->lock);
    after_end(saver, ended);
    return ended;
}

void tms_capture_end_on(tms_saver_t *saver, void *stream) {
    pthread_mutex_lock(&saver->lock);
    bool ended = tms_capture_end(&saver->capture, tms_capture_find(&saver->capture, tms_capture_key(stream)));
    pthread_mutex_unlock(&saver->lock);
    after_end(saver, ended);
}

/* ---- destroyed streams ---- */

size_t tms_capture_end_take(tms_saver_t *saver, void *stream, int device, tms_capture_stream_t *taken) {
    uintptr_t key = stream ? tms_capture_key(stream) : 0;
    size_t count = 0;
    pthread_mutex_lock(&saver->lock);
    for (int i = tms_capture_visible(&saver->capture); i-- > 0;) {
        const tms_capture_entry_t *entry = &saver->capture.entries[i];
        bool matches = key ? entry->where.key == key : entry->where.device == device;
        if (!entry->begun || !matches) continue;
        taken[count++] = entry->where;
        (void)tms_capture_end(&saver->capture, entry->begun);
    }
    pthread_mutex_unlock(&saver->lock);
    return count;
}

void tms_capture_end_taken(tms_saver_t *saver, const tms_capture_stream_t *taken, size_t count, bool gone) {
    const tms_error_context_t context = {.operation = "capture_begin", .device = TMS_NO_DEVICE};
    uint64_t identity;
    bool known;
    pthread_mutex_lock(&saver->lock);
    for (size_t i = 0; i < count && !gone; i++) { /* the table has room for them, unless other captures have begun */
        if (tms_capture_begin_on(&saver->capture, &taken[i], &identity, &known, &context, NULL) == TMS_OK)
            tms_capture_note_begin(&saver->capture, identity);
    }
    pthread_mutex_unlock(&saver->lock);
    after_end(saver, gone && count > 0);
}
