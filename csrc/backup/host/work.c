/* Static functions are called with the store's lock held and release it during system and driver calls. */

#include "backup/host/work.h"

#include <sched.h>
#include <unistd.h>

#include "backup/host/block.h"
#include "backup/host/pool.h"
#include "backup/host/room.h"
#include "base/thread.h"

/* The number of chunks allowed ahead of prefaulting, so that no thread waits for the headroom. */
enum { LOOKAHEAD = 2 };

static bool is_over(const struct tms_host_batch *batch) {
    return batch->cancelled || batch->failed || batch->store->closing;
}

static void fail(struct tms_host_batch *batch, const tms_error_t *error) {
    batch->failed = true;
    for (size_t i = 0; i < batch->block_count; i++) {
        struct tms_host_block *block = batch->blocks[i];
        block->failed = true;
        block->failure = *error;
        for (size_t k = 0; block->for_pool && k < block->chunk_count; k++) tms_host_pool_give_up_unusable(&block->chunks[k]);
    }
}

/* ---- allowing ---- */

static void allow(struct tms_host_batch *batch, tms_host_chunk_t *chunk) {
    tms_host_store_t *store = batch->store;
    store->planned_bytes -= chunk->bytes;
    store->in_flight_bytes += chunk->bytes;
    atomic_fetch_add(&store->resident_bytes, chunk->bytes);
    chunk->in_flight = chunk->counted = true;
    chunk->state = TMS_HOST_CHUNK_PREFAULTING;
    batch->allowed++;
    batch->allowed_below = UINT64_MAX;
}

static bool may_check(const struct tms_host_batch *batch) {
    return batch->allowed < batch->entry_count && batch->allowed < batch->prefaulting + LOOKAHEAD &&
           !batch->store->checking && batch->store->in_flight_bytes < batch->allowed_below;
}

/* Checks for room for the next chunk. One thread of the store at a time, so that two do not rely on the same room. */
static void check_room(struct tms_host_batch *batch) {
    tms_host_store_t *store = batch->store;
    tms_host_chunk_t *chunk = tms_host_entry_chunk(&batch->entries[batch->allowed]);
    uint64_t in_flight = store->in_flight_bytes;
    tms_host_headroom_t headroom;
    tms_error_t error;
    store->checking = true;
    pthread_mutex_unlock(&store->lock);
    bool fits = tms_host_store_fits(store, chunk->bytes, &headroom);
    /* Chunks in flight may be counted twice. The result is certain only if nothing is in flight. */
    if (!fits && in_flight == 0) {
        fits = tms_host_store_make_room(store, chunk->bytes, &headroom);
        if (!fits) (void)tms_host_headroom_fail(&headroom, chunk->bytes, &batch->context, &error);
    }
    pthread_mutex_lock(&store->lock);
    store->checking = false;
    if (fits)
        allow(batch, chunk);
    else if (in_flight == 0)
        fail(batch, &error);
    else
        batch->allowed_below = in_flight;
    pthread_cond_broadcast(&store->changed);
}

/* ---- prefaulting ---- */

static void prefault_part(struct tms_host_batch *batch) {
    tms_host_store_t *store = batch->store;
    tms_host_chunk_t *chunk = tms_host_entry_chunk(&batch->entries[batch->prefaulting]);
    uint64_t from = batch->prefault_offset, rest = chunk->bytes - from;
    uint64_t bytes = rest < TMS_HOST_PREFAULT_BYTES ? rest : TMS_HOST_PREFAULT_BYTES;
    batch->prefault_offset += bytes;
    if (bytes == rest) {
        batch->prefaulting++;
        batch->prefault_offset = 0;
        if (may_check(batch)) pthread_cond_broadcast(&store->changed);
    }
    pthread_mutex_unlock(&store->lock);
    tms_host_chunk_prefault(chunk, from, bytes);
    pthread_mutex_lock(&store->lock);
    chunk->not_prefaulted -= bytes;
    if (chunk->not_prefaulted > 0) return;
    chunk->state = TMS_HOST_CHUNK_PREFAULTED;
    chunk->in_flight = false;
    store->in_flight_bytes -= chunk->bytes;
    pthread_cond_broadcast(&store->changed);
}

/* Does one step. Returns false if there is nothing to do now. */
static bool prefault_step(struct tms_host_batch *batch) {
    if (is_over(batch)) return false;
    if (may_check(batch))
        check_room(batch);
    else if (batch->prefaulting < batch->allowed)
        prefault_part(batch);
    else
        return false;
    return true;
}

static void *prefault_all(void *argument) {
    struct tms_host_batch *batch = argument;
    pthread_mutex_lock(&batch->store->lock);
    while (!is_over(batch) && batch->prefaulting < batch->entry_count) {
        if (!prefault_step(batch)) pthread_cond_wait(&batch->store->changed, &batch->store->lock);
    }
    pthread_mutex_unlock(&batch->store->lock);
    return NULL;
}

/* ---- pinning ----
 *
 * The thread that waits for a chunk pins it and copies into it next. Other threads would delay the copies by holding the
 * driver's lock, which is not fair (docs/performance.md). */

static void pin_chunk(struct tms_host_batch *batch, tms_host_chunk_t *chunk) {
    tms_host_store_t *store = batch->store;
    tms_error_t error;
    if (!tms_host_call_begin(store)) return;
    chunk->state = TMS_HOST_CHUNK_PINNING;
    pthread_mutex_unlock(&store->lock);
    tms_status_t status = tms_host_chunk_pin(chunk, &batch->context, &error);
    pthread_mutex_lock(&store->lock);
    tms_host_call_end(store);
    if (status == TMS_OK) {
        chunk->state = TMS_HOST_CHUNK_USABLE;
        if (chunk->reserved) store->reserving_bytes -= chunk->bytes;
        chunk->reserved = false;
        if (chunk->open && chunk->buffers == 0) tms_host_pool_take(chunk);
    } else {
        chunk->state = TMS_HOST_CHUNK_PREFAULTED;
        fail(batch, &error);
    }
    pthread_cond_broadcast(&store->changed);
}

/* ---- threads ---- */

static int count_processors(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    long online = sysconf(_SC_NPROCESSORS_ONLN); /* more processors than the set can hold */
    return online > 0 && online < CPU_SETSIZE ? (int)online : 1;
}

static int count_prefaulters(const struct tms_host_batch *batch) {
    uint64_t parts = 0;
    for (size_t i = 0; i < batch->block_count; i++)
        parts += (batch->blocks[i]->bytes + TMS_HOST_PREFAULT_BYTES - 1) / TMS_HOST_PREFAULT_BYTES;
    int most = batch->store->prefaulting_threads > 0 ? batch->store->prefaulting_threads : count_processors() - 1;
    if (most > TMS_HOST_PREFAULTING_THREADS) most = TMS_HOST_PREFAULTING_THREADS;
    if (most < 1) most = 1;
    return parts < (uint64_t)most ? (int)parts : most;
}

void tms_host_work_start(struct tms_host_batch *batch) {
    tms_host_store_t *store = batch->store;
    int os_error = 0, prefaulters = 0;
    for (int wanted = count_prefaulters(batch); prefaulters < wanted && os_error == 0;) {
        os_error = tms_thread_start(&batch->prefaulters[prefaulters], prefault_all, batch);
        if (os_error == 0) prefaulters++;
    }
    pthread_mutex_lock(&store->lock);
    batch->prefaulter_count = prefaulters;
    pthread_mutex_unlock(&store->lock);
    if (os_error) tms_host_warn_no_thread(store, os_error);
}

void tms_host_work_stop(struct tms_host_batch *batch) {
    pthread_mutex_lock(&batch->store->lock);
    batch->cancelled = true;
    pthread_cond_broadcast(&batch->store->changed);
    pthread_mutex_unlock(&batch->store->lock);
    for (int i = 0; i < batch->prefaulter_count; i++) pthread_join(batch->prefaulters[i], NULL);
}

bool tms_host_work_help(struct tms_host_batch *batch, tms_host_chunk_t *chunk) {
    if (is_over(batch)) return false;
    if (chunk->state == TMS_HOST_CHUNK_PREFAULTED) {
        pin_chunk(batch, chunk);
        return true;
    }
    return chunk->state < TMS_HOST_CHUNK_PREFAULTED && batch->prefaulter_count == 0 && prefault_step(batch);
}

void tms_host_work_through(struct tms_host_batch *batch) {
    tms_host_store_t *store = batch->store;
    pthread_mutex_lock(&store->lock);
    for (size_t i = 0; i < batch->entry_count;) {
        tms_host_chunk_t *chunk = tms_host_entry_chunk(&batch->entries[i]);
        if (chunk->state >= TMS_HOST_CHUNK_USABLE)
            i++;
        else if (is_over(batch))
            break;
        else if (!tms_host_work_help(batch, chunk))
            pthread_cond_wait(&store->changed, &store->lock);
    }
    pthread_mutex_unlock(&store->lock);
}
