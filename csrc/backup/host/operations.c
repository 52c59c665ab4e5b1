#include "backup/host/operations.h"

#include "backup/host/batch.h"
#include "backup/host/copy.h"

static bool on_host(tms_backup_kind_t kind) { return kind == TMS_BACKUP_PINNED || kind == TMS_BACKUP_MMAP; }

static void drop(void **buffer) {
    tms_host_buffer_drop(*buffer);
    *buffer = NULL;
}

/* ---- a pause ---- */

static tms_status_t begin(void *store, void **batch, const tms_error_context_t *context, tms_error_t *error) {
    struct tms_host_batch *made = NULL;
    tms_status_t status = tms_host_batch_create(&made, store, context, error);
    if (status == TMS_OK) *batch = made;
    return status;
}

static tms_status_t plan(void *store, void *batch, tms_backup_t *backup, tms_backup_slot_t *slot,
                         const tms_backup_request_t *request, const tms_backup_content_t *content,
                         const tms_error_context_t *context, tms_error_t *error) {
    const tms_host_buffer_t *kept = slot->kept;
    tms_host_buffer_t *fresh = NULL;
    (void)store;
    (void)backup;
    if (content->bytes == 0 || (kept && kept->bytes >= content->bytes && kept->kind == content->kind)) return TMS_OK;
    const tms_host_request_t wanted = {
        .bytes = content->bytes, .device = request->device, .kind = content->kind, .group = request->group};
    tms_status_t status = tms_host_batch_add(batch, &wanted, &fresh, context, error);
    if (status != TMS_OK) return status;
    if (request->policy == TMS_HOST_POOL) atomic_store(&fresh->policy, TMS_HOST_POOL);
    slot->fresh = fresh;
    return TMS_OK;
}

/* A program that had access to the buffer may have written to it. */
static uint64_t block_bytes(void *store, const tms_backup_t *backup, const tms_backup_slot_t *slot) {
    tms_host_buffer_t *kept = slot->kept;
    (void)store;
    (void)backup;
    return kept && !slot->fresh && !atomic_load(&kept->handed_out) ? 1 : 0;
}

/* ---- copies ---- */

static tms_status_t save(void *store, tms_backup_t *backup, tms_backup_slot_t *slot, tms_copier_t *copier,
                         CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error) {
    tms_host_buffer_t *buffer = slot->fresh ? slot->fresh : slot->kept;
    uint64_t begun = copier->begun;
    (void)store;
    tms_status_t status = tms_host_copy_save(buffer, tms_backup_copied(backup), copier, address, context, error);
    /* The contents of a retained buffer are being overwritten. */
    if (!slot->fresh && copier->begun != begun) backup->saved = false;
    return status;
}

static tms_status_t load(void *store, tms_backup_t *backup, tms_backup_slot_t *slot, tms_copier_t *copier,
                         CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error) {
    (void)store;
    return tms_host_copy_load(slot->kept, &backup->held, copier, address, context, error);
}

/* ---- ends ---- */

static void commit(void *store, tms_backup_t *backup, tms_backup_slot_t *slot) {
    bool needed = on_host(backup->planned.kind) && backup->planned.bytes > 0;
    (void)store;
    if (!needed || slot->fresh) drop(&slot->kept);
    if (slot->fresh) slot->kept = slot->fresh;
    slot->fresh = NULL;
    /* Everything was copied, unless only changes were. A program that still has a reference can write again. */
    tms_host_buffer_t *kept = slot->kept;
    if (kept && !backup->partial) atomic_store(&kept->handed_out, atomic_load(&kept->references) > 1);
}

/* A retained buffer stays at its address even without contents. If the device could not be synchronized, it may still write
 * to the buffer; the next pause waits for the device before it copies. */
static void cancel(void *store, tms_backup_t *backup, tms_backup_slot_t *slot) {
    (void)store;
    (void)backup;
    drop(&slot->fresh);
}

static bool discard(void *store, tms_backup_t *backup, tms_backup_slot_t *slot, tms_host_policy_t policy) {
    tms_host_buffer_t *kept = slot->kept;
    (void)store;
    if (policy == TMS_HOST_RETAIN && backup->saved && on_host(backup->held.kind)) return true;
    if (kept) atomic_store(&kept->policy, policy == TMS_HOST_POOL ? TMS_HOST_POOL : TMS_HOST_RELEASE);
    drop(&slot->kept);
    return false;
}

static void *find(void *store, const tms_backup_t *backup, const tms_backup_slot_t *slot, uint64_t offset, uint64_t bytes,
                  tms_host_buffer_t **buffer) {
    tms_host_buffer_t *kept = slot->kept;
    const tms_backup_content_t *held = &backup->held;
    char *found = NULL;
    (void)store;
    if (!kept) return NULL;
    if (held->bytes == backup->bytes) found = (char *)kept->memory + offset;
    for (size_t i = 0; i < held->extent_count && !found; i++) {
        const tms_extent_t *extent = &held->extents[i];
        if (offset >= extent->offset && offset - extent->offset <= extent->bytes &&
            bytes <= extent->bytes - (offset - extent->offset))
            found = (char *)kept->memory + extent->packed + (offset - extent->offset);
    }
    if (found && buffer) {
        tms_host_buffer_acquire(kept);
        *buffer = kept;
    }
    return found;
}

static void destroy(void *store, tms_backup_t *backup, tms_backup_slot_t *slot) {
    (void)store;
    (void)backup;
    drop(&slot->fresh);
    drop(&slot->kept);
}

/* ---- the process ---- */

static tms_status_t init(void *store, const tms_backup_setup_t *setup, tms_error_t *error) {
    const tms_copying_t *copying = setup->copying;
    return tms_host_store_init(store, copying->devices, copying->log, copying->quarantine,
                               setup->config->host_memory_limit_bytes, setup->config->host_pool_limit_bytes, error);
}

static void drain(void *store) { tms_host_store_release(store); }
static void after_resume(void *store) { tms_host_store_release_now(store); }
static void retry(void *store) { tms_host_store_retry(store); }
static void close_store(void *store, double deadline) { tms_host_store_close(store, deadline); }
static void lock(void *store) { pthread_mutex_lock(&((tms_host_store_t *)store)->lock); }
static void unlock(void *store) { pthread_mutex_unlock(&((tms_host_store_t *)store)->lock); }
static void after_fork_in_child(void *store) { tms_host_store_after_fork_in_child(store); }

static void count(void *store, tms_counters_t *counters) {
    tms_host_store_t *host = store;
    counters->host_backup_bytes += atomic_load(&host->buffer_bytes);
    counters->host_resident_bytes += atomic_load(&host->resident_bytes);
    counters->host_pooled_bytes += atomic_load(&host->pooled_bytes);
}

const tms_backup_operations_t tms_host_operations = {.place = "host memory",
                                                     .plan = plan,
                                                     .block_bytes = block_bytes,
                                                     .save = save,
                                                     .load = load,
                                                     .commit = commit,
                                                     .cancel = cancel,
                                                     .discard = discard,
                                                     .find = find,
                                                     .destroy = destroy,
                                                     .begin = begin,
                                                     TMS_HOST_BATCH_OPERATIONS,
                                                     .init = init,
                                                     .drain = drain,
                                                     .after_resume = after_resume,
                                                     .retry = retry,
                                                     .count = count,
                                                     .close = close_store,
                                                     .lock = lock,
                                                     .unlock = unlock,
                                                     .after_fork_in_child = after_fork_in_child};
