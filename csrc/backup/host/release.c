#include "backup/host/release.h"

#include <stdlib.h>

#include "backup/host/block.h"
#include "backup/host/gaps.h"

/* ---- under the lock ---- */

void tms_host_release_queue(tms_host_chunk_t *chunk, tms_backup_kind_t kind) {
    tms_host_store_t *store = chunk->block->store;
    if (chunk->open) tms_host_gaps_remove(chunk->block, chunk->offset, chunk->offset + chunk->bytes);
    chunk->state = TMS_HOST_CHUNK_WAITING;
    chunk->open = false;
    chunk->kind = kind;
    chunk->next = NULL;
    *(store->last_waiting ? &store->last_waiting->next : &store->waiting) = chunk;
    store->last_waiting = chunk;
}

struct tms_host_block *tms_host_block_forget(struct tms_host_block *block) {
    if (block->first || block->batch || block->left > 0) return NULL;
    if (block->listed) {
        *(block->previous ? &block->previous->next : &block->store->blocks) = block->next;
        if (block->next) block->next->previous = block->previous;
    }
    return block;
}

/* Takes the first waiting chunk (`only_mmap`: of kind MMAP), or NULL. */
static tms_host_chunk_t *take_waiting(tms_host_store_t *store, bool only_mmap) {
    tms_host_chunk_t *before = NULL, *chunk = store->waiting;
    while (chunk && only_mmap && chunk->kind != TMS_BACKUP_MMAP) {
        before = chunk;
        chunk = chunk->next;
    }
    if (!chunk || !tms_host_call_begin(store)) return NULL;
    *(before ? &before->next : &store->waiting) = chunk->next;
    if (store->last_waiting == chunk) store->last_waiting = before;
    chunk->state = TMS_HOST_CHUNK_RELEASING;
    store->releasing[chunk->kind == TMS_BACKUP_MMAP]++;
    return chunk;
}

/* Counts a chunk that has been released. If it was the last chunk of its block, returns the block, which the caller
 * frees. */
static struct tms_host_block *count_out(tms_host_chunk_t *chunk) {
    if (chunk->counted) atomic_fetch_sub(&chunk->block->store->resident_bytes, chunk->bytes);
    chunk->counted = false;
    chunk->state = TMS_HOST_CHUNK_GONE;
    chunk->block->left--;
    return tms_host_block_forget(chunk->block);
}

/* ---- releasing ---- */

static tms_quarantine_mask_t retry(tms_quarantined_t *node) {
    tms_host_chunk_t *chunk = (tms_host_chunk_t *)node;
    tms_host_store_t *store = chunk->block->store;
    struct tms_host_block *forgotten = NULL;
    tms_error_t reason;
    pthread_mutex_lock(&store->lock);
    bool may = tms_host_call_begin(store);
    pthread_mutex_unlock(&store->lock);
    if (!may) return TMS_QUARANTINE_BIT(HOST);
    tms_status_t status = tms_host_chunk_give_back(chunk, &reason);
    pthread_mutex_lock(&store->lock);
    tms_host_call_end(store);
    if (status == TMS_OK) forgotten = count_out(chunk);
    pthread_mutex_unlock(&store->lock);
    tms_host_block_free(forgotten);
    if (status == TMS_OK) return 0;
    tms_log_recurring(store->log, TMS_LOG_QUARANTINED, TMS_LOG_WARNING, &reason,
                      "The host memory is still allocated; later calls try again.");
    return TMS_QUARANTINE_BIT(HOST);
}

/* Releases a chunk from take_waiting. Called and returns with the lock held. */
static void release_chunk(tms_host_store_t *store, tms_host_chunk_t *chunk) {
    bool mmap = chunk->kind == TMS_BACKUP_MMAP;
    struct tms_host_block *forgotten = NULL;
    tms_error_t reason;
    pthread_mutex_unlock(&store->lock);
    tms_status_t status = tms_host_chunk_give_back(chunk, &reason);
    pthread_mutex_lock(&store->lock);
    tms_host_call_end(store);
    if (status == TMS_OK)
        forgotten = count_out(chunk);
    else
        chunk->state = TMS_HOST_CHUNK_REFUSED;
    pthread_mutex_unlock(&store->lock);
    tms_host_block_free(forgotten);
    if (status != TMS_OK) {
        tms_log_recurring(store->log, TMS_LOG_QUARANTINED, TMS_LOG_ERROR, &reason,
                          "The host memory stays allocated; later calls try again to release it.");
        chunk->quarantined = (tms_quarantined_t){.retry = retry, .holds = TMS_QUARANTINE_BIT(HOST)};
        tms_quarantine_add(store->quarantine, &chunk->quarantined);
    }
    pthread_mutex_lock(&store->lock);
    store->releasing[mmap]--;
    pthread_cond_broadcast(&store->changed);
}

/* ---- the thread ---- */

static void *release_all(void *argument) {
    tms_host_store_t *store = argument;
    tms_host_chunk_t *chunk = NULL;
    pthread_detach(pthread_self());
    pthread_mutex_lock(&store->lock);
    while ((chunk = take_waiting(store, false))) release_chunk(store, chunk);
    store->release_thread = false;
    pthread_mutex_unlock(&store->lock);
    tms_host_thread_end(store);
    return NULL;
}

/* Starts a thread unless *running. Called with the lock held, returns without it. */
static void start_one(tms_host_store_t *store, bool *running, bool wanted, void *(*run)(void *)) {
    bool start = wanted && !*running && !store->closing;
    if (start) *running = true;
    pthread_mutex_unlock(&store->lock);
    if (!start || tms_host_thread_detach(store, run, store) == 0) return;
    pthread_mutex_lock(&store->lock);
    *running = false;
    pthread_mutex_unlock(&store->lock);
}

void tms_host_release_start(tms_host_store_t *store) {
    pthread_mutex_lock(&store->lock);
    start_one(store, &store->release_thread, store->waiting, release_all);
}

/* ---- the retrying thread ---- */

static void *retry_all(void *argument) {
    tms_host_store_t *store = argument;
    pthread_detach(pthread_self());
    pthread_mutex_lock(&store->lock);
    bool may = tms_host_call_begin(store); /* checked here, because only the retry of a chunk checks it itself */
    pthread_mutex_unlock(&store->lock);
    if (may) tms_quarantine_retry_part(store->quarantine, true);
    pthread_mutex_lock(&store->lock);
    if (may) tms_host_call_end(store);
    store->retry_thread = false;
    pthread_mutex_unlock(&store->lock);
    tms_host_thread_end(store);
    return NULL;
}

void tms_host_store_retry(tms_host_store_t *store) {
    if (tms_quarantine_held(store->quarantine, TMS_QUARANTINE_HOST) == 0) return;
    pthread_mutex_lock(&store->lock);
    start_one(store, &store->retry_thread, true, retry_all);
}

/* ---- on the caller's thread ---- */

static void release_here(tms_host_store_t *store, bool only_mmap) {
    tms_host_chunk_t *chunk = NULL;
    pthread_mutex_lock(&store->lock);
    do {
        while ((chunk = take_waiting(store, only_mmap))) release_chunk(store, chunk);
        bool others = store->releasing[1] > 0 || (!only_mmap && store->releasing[0] > 0);
        if (!others) break;
        pthread_cond_wait(&store->changed, &store->lock);
    } while (true);
    pthread_mutex_unlock(&store->lock);
}

void tms_host_store_release_now(tms_host_store_t *store) {
    release_here(store, true);
    tms_host_release_start(store); /* releases chunks for which no thread could be started before */
}

void tms_host_store_settle(tms_host_store_t *store) { release_here(store, false); }
