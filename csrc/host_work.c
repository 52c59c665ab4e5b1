/* The work of a batch: pieces are allowed to be touched, touched in parts, and page-locked. Declared in host_batch.h.
 *
 * Statics are called with the store's lock held, and give it up around what they do. */

#include <inttypes.h>
#include <string.h>

#include "host_batch.h"
#include "thread.h"

/* How many pieces ahead of those that are being touched it is asked whether they may be: nobody waits for the answer. */
enum { LOOKAHEAD = 2 };

static void say_no_thread(tms_host_store_t *store, int os_error) {
    tms_log_once(store->log, &store->said_no_threads, TMS_LOG_WARNING,
                 "there are not all the threads that host memory is made ready with (pthread_create: %s): it takes longer",
                 strerror(os_error));
}

int tms_host_thread_detach(tms_host_store_t *store, void *(*run)(void *), void *argument) {
    pthread_t thread;
    pthread_mutex_lock(&store->lock);
    store->threads++;
    pthread_mutex_unlock(&store->lock);
    int os_error = tms_thread_start(&thread, run, argument);
    if (os_error == 0) return 0;
    tms_host_thread_end(store);
    say_no_thread(store, os_error);
    return os_error;
}

void tms_host_thread_end(tms_host_store_t *store) {
    pthread_mutex_lock(&store->lock);
    store->threads--;
    pthread_cond_broadcast(&store->changed);
    pthread_mutex_unlock(&store->lock);
}

static bool is_over(const struct tms_host_batch *batch) { return batch->stop || batch->failed || batch->store->closing; }

static void fail(struct tms_host_batch *batch, const tms_error_t *error) {
    batch->failed = true;
    for (size_t i = 0; i < batch->block_count; i++) {
        batch->blocks[i]->failed = true;
        batch->blocks[i]->failure = *error;
    }
}

/* ---- allowing ---- */

static void allow(struct tms_host_batch *batch, tms_host_piece_t *piece) {
    tms_host_store_t *store = batch->store;
    store->planned_bytes -= piece->bytes;
    store->in_flight_bytes += piece->bytes;
    atomic_fetch_add(&store->resident_bytes, piece->bytes);
    piece->in_flight = piece->counted = true;
    piece->state = TMS_PIECE_TOUCHING;
    batch->allowed++;
    batch->allowed_below = UINT64_MAX;
}

static bool may_ask(const struct tms_host_batch *batch) {
    return batch->allowed < batch->entry_count && batch->allowed < batch->touching + LOOKAHEAD && !batch->store->checking &&
           batch->store->in_flight_bytes < batch->allowed_below;
}

/* Asks whether the next piece may be touched. One thread of the store at a time, so that two do not count on the same room.
 */
static void ask(struct tms_host_batch *batch) {
    tms_host_store_t *store = batch->store;
    tms_host_piece_t *piece = tms_host_entry_piece(&batch->entries[batch->allowed]);
    uint64_t in_flight = store->in_flight_bytes;
    tms_host_headroom_t headroom;
    tms_error_t error;
    store->checking = true;
    pthread_mutex_unlock(&store->lock);
    bool fits = tms_host_store_fits(store, piece->bytes, &headroom);
    /* What others are touching may be counted twice at the moment; only with nothing in flight it is sure. */
    if (!fits && in_flight == 0) {
        fits = tms_host_store_make_room(store, piece->bytes, &headroom);
        if (!fits) (void)tms_host_headroom_fail(&headroom, piece->bytes, &batch->context, &error);
    }
    pthread_mutex_lock(&store->lock);
    store->checking = false;
    if (fits)
        allow(batch, piece);
    else if (in_flight == 0)
        fail(batch, &error);
    else
        batch->allowed_below = in_flight;
    pthread_cond_broadcast(&store->changed);
}

/* ---- touching ---- */

static void touch_part(struct tms_host_batch *batch) {
    tms_host_store_t *store = batch->store;
    tms_host_piece_t *piece = tms_host_entry_piece(&batch->entries[batch->touching]);
    uint64_t from = batch->touch_offset, rest = piece->bytes - from;
    uint64_t bytes = rest < TMS_HOST_TOUCH_BYTES ? rest : TMS_HOST_TOUCH_BYTES;
    batch->touch_offset += bytes;
    if (bytes == rest) {
        batch->touching++;
        batch->touch_offset = 0;
        if (may_ask(batch)) pthread_cond_broadcast(&store->changed);
    }
    pthread_mutex_unlock(&store->lock);
    tms_host_piece_touch(piece, from, bytes);
    pthread_mutex_lock(&store->lock);
    piece->untouched -= bytes;
    if (piece->untouched > 0) return;
    piece->state = TMS_PIECE_TOUCHED;
    piece->in_flight = false;
    store->in_flight_bytes -= piece->bytes;
    pthread_cond_broadcast(&store->changed);
}

/* One step; false where there is nothing to do now. */
static bool touch_step(struct tms_host_batch *batch) {
    if (is_over(batch)) return false;
    if (may_ask(batch))
        ask(batch);
    else if (batch->touching < batch->allowed)
        touch_part(batch);
    else
        return false;
    return true;
}

static void *touch_all(void *argument) {
    struct tms_host_batch *batch = argument;
    pthread_mutex_lock(&batch->store->lock);
    while (!is_over(batch) && batch->touching < batch->entry_count) {
        if (!touch_step(batch)) pthread_cond_wait(&batch->store->changed, &batch->store->lock);
    }
    pthread_mutex_unlock(&batch->store->lock);
    return NULL;
}

/* ---- page-locking ----
 *
 * By whoever waits for the piece, which is who copies into it next. A thread of its own held the driver's lock, which is not
 * fair, nearly all the time, and most copies came after it was done (first pause of 32 x 512 MiB on an H200, medians: 0.60 s
 * so, 0.54 s this way). Nor did it help that the threads that touch a piece page-lock it (0.53 s with two of them at it at a
 * time, 0.54 with four, 0.68 with eight or more, against 0.52 this way in the same process). */

static void lock_piece(struct tms_host_batch *batch, tms_host_piece_t *piece) {
    tms_host_store_t *store = batch->store;
    tms_error_t error;
    if (!tms_host_call_begin(store)) return;
    piece->state = TMS_PIECE_LOCKING;
    pthread_mutex_unlock(&store->lock);
    tms_status_t status = tms_host_piece_lock(piece, &batch->context, &error);
    pthread_mutex_lock(&store->lock);
    tms_host_call_end(store);
    if (status == TMS_OK) {
        piece->state = TMS_PIECE_USABLE;
        if (piece->reserved) store->reserving_bytes -= piece->bytes;
        piece->reserved = false;
        if (piece->open && piece->buffers == 0) tms_host_pool_take(piece);
    } else {
        piece->state = TMS_PIECE_TOUCHED;
        fail(batch, &error);
    }
    pthread_cond_broadcast(&store->changed);
}

bool tms_host_batch_help(struct tms_host_batch *batch, int device) {
    tms_host_store_t *store = batch->store;
    tms_host_piece_t *found = NULL;
    pthread_mutex_lock(&store->lock);
    for (size_t i = 0; i < batch->allowed && !found && !is_over(batch); i++) {
        tms_host_piece_t *piece = tms_host_entry_piece(&batch->entries[i]);
        if (batch->entries[i].block->device == device && piece->state == TMS_PIECE_TOUCHED) found = piece;
    }
    if (found) lock_piece(batch, found);
    pthread_mutex_unlock(&store->lock);
    return found;
}

/* ---- threads ---- */

void tms_host_work_start(struct tms_host_batch *batch) {
    tms_host_store_t *store = batch->store;
    int os_error = 0, touchers = 0;
    for (int wanted = tms_host_batch_touchers(batch); touchers < wanted && os_error == 0;) {
        os_error = tms_thread_start(&batch->touchers[touchers], touch_all, batch);
        if (os_error == 0) touchers++;
    }
    pthread_mutex_lock(&store->lock);
    batch->toucher_count = touchers;
    pthread_mutex_unlock(&store->lock);
    if (os_error) say_no_thread(store, os_error);
}

void tms_host_work_stop(struct tms_host_batch *batch) {
    pthread_mutex_lock(&batch->store->lock);
    batch->stop = true;
    pthread_cond_broadcast(&batch->store->changed);
    pthread_mutex_unlock(&batch->store->lock);
    for (int i = 0; i < batch->toucher_count; i++) pthread_join(batch->touchers[i], NULL);
}

bool tms_host_work_help(struct tms_host_batch *batch, tms_host_piece_t *piece) {
    if (is_over(batch)) return false;
    if (piece->state == TMS_PIECE_TOUCHED) {
        lock_piece(batch, piece);
        return true;
    }
    return piece->state < TMS_PIECE_TOUCHED && batch->toucher_count == 0 && touch_step(batch);
}

void tms_host_work_through(struct tms_host_batch *batch) {
    tms_host_store_t *store = batch->store;
    pthread_mutex_lock(&store->lock);
    for (size_t i = 0; i < batch->entry_count;) {
        tms_host_piece_t *piece = tms_host_entry_piece(&batch->entries[i]);
        if (piece->state >= TMS_PIECE_USABLE)
            i++;
        else if (is_over(batch))
            break;
        else if (!tms_host_work_help(batch, piece))
            pthread_cond_wait(&store->changed, &store->lock);
    }
    pthread_mutex_unlock(&store->lock);
}
