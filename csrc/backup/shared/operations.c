#include "backup/shared/operations.h"

#include <math.h>
#include <unistd.h>

#include "backup/host/batch.h"
#include "backup/shared/contents.h"
#include "backup/shared/copy.h"
#include "backup/shared/registrar.h"
#include "backup/shared/store.h"

static void drop(tms_shared_store_t *store, void **contents) {
    tms_shared_contents_drop(store, *contents);
    *contents = NULL;
}

/* ---- a pause ---- */

static tms_status_t begin(void *opaque, void **batch, const tms_error_context_t *context, tms_error_t *error) {
    tms_shared_store_t *store = opaque;
    struct tms_host_batch *made = NULL;
    tms_status_t status = tms_shared_store_open(store, context, error);
    if (status == TMS_OK) status = tms_host_batch_create(&made, store->host, context, error);
    if (status == TMS_OK) *batch = made;
    return status;
}

static tms_status_t plan(void *opaque, void *batch, tms_backup_t *backup, tms_backup_slot_t *slot,
                         const tms_backup_request_t *request, const tms_backup_content_t *content,
                         const tms_error_context_t *context, tms_error_t *error) {
    tms_shared_store_t *store = opaque;
    tms_shared_contents_t *fresh = NULL;
    if (content->bytes == 0) return TMS_OK;
    if (!backup->fingerprints.fresh)
        tms_log_once(store->copying->log, &store->warned_private, TMS_LOG_WARNING,
                     "the fingerprints of shared backups could not be computed, so this process keeps private copies");
    tms_status_t status =
        tms_shared_contents_make(store, content, backup->fingerprints.fresh, request->device, &fresh, context, error);
    if (status != TMS_OK) return status;
    slot->fresh = fresh;
    if (fresh->rest.bytes > 0) {
        const tms_host_request_t wanted = {
            .bytes = fresh->rest.bytes, .device = request->device, .kind = TMS_BACKUP_PINNED, .group = request->group};
        status = tms_host_batch_add(batch, &wanted, &fresh->buffer, context, error);
        if (status == TMS_OK && request->policy == TMS_HOST_POOL) atomic_store(&fresh->buffer->policy, TMS_HOST_POOL);
    }
    if (status == TMS_OK) status = tms_shared_contents_list_missing(store, fresh, &backup->changed, context, error);
    backup->partial = status == TMS_OK;
    return status;
}

static tms_status_t save(void *store, tms_backup_t *backup, tms_backup_slot_t *slot, tms_copier_t *copier,
                         CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error) {
    /* Objects that are replaced need no room beside the new ones. */
    if (slot->kept && tms_shared_contents_drop_replaced(store, slot->kept) && backup->held.kind == TMS_BACKUP_SHARED)
        backup->saved = false;
    return tms_shared_copy_save(store, slot->fresh, copier, address, context, error);
}

static void commit(void *opaque, tms_backup_t *backup, tms_backup_slot_t *slot) {
    tms_shared_store_t *store = opaque;
    /* In this order, so that objects that both have stay registered. */
    if (slot->fresh) tms_shared_contents_want_registration(store, slot->fresh, true);
    if (backup->planned.kind == TMS_BACKUP_SHARED || backup->kind != TMS_BACKUP_SHARED) drop(store, &slot->kept);
    if (!slot->fresh) return;
    slot->kept = slot->fresh;
    slot->fresh = NULL;
    atomic_store(&store->committed, true);
}

static void cancel(void *store, tms_backup_t *backup, tms_backup_slot_t *slot) {
    (void)backup;
    drop(store, &slot->fresh);
}

static void after_pause(void *opaque) {
    tms_shared_store_t *store = opaque;
    if (!atomic_exchange(&store->committed, false)) return;
    tms_shared_store_drop_kept(store);
    tms_shared_registrar_start(store); /* it ends the registrations of what was dropped */
}

/* ---- a resume ---- */

static tms_status_t load(void *store, tms_backup_t *backup, tms_backup_slot_t *slot, tms_copier_t *copier,
                         CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error) {
    (void)backup;
    return tms_shared_copy_load(store, slot->kept, copier, address, context, error);
}

/* The links stay, so that the next pause finds the objects that have not changed. */
static bool discard(void *store, tms_backup_t *backup, tms_backup_slot_t *slot, tms_host_policy_t policy) {
    tms_shared_contents_t *kept = slot->kept;
    if (policy == TMS_HOST_RETAIN && backup->saved && backup->held.kind == TMS_BACKUP_SHARED) return true;
    if (!kept) return false;
    tms_shared_contents_want_registration(store, kept, false);
    tms_shared_contents_drop_private(kept, policy);
    return false;
}

static tms_status_t read_part(void *store, const tms_backup_t *backup, const tms_backup_slot_t *slot, uint64_t offset,
                              uint64_t bytes, void *destination, bool *found, tms_wait_t *wait,
                              const tms_error_context_t *context, tms_error_t *error) {
    (void)store;
    (void)backup;
    (void)wait;
    (void)context;
    (void)error;
    *found = slot->kept && tms_shared_contents_read(slot->kept, offset, bytes, destination);
    return TMS_OK;
}

static void reject(void *opaque, const tms_backup_t *backup, const tms_backup_slot_t *slot, uint64_t offset,
                   tms_error_t *error) {
    tms_shared_store_t *store = opaque;
    const tms_shared_contents_t *kept = slot->kept;
    (void)backup;
    for (size_t i = 0; kept && i < kept->part_count; i++) {
        const tms_shared_part_t *part = &kept->parts[i];
        if (!part->object || offset < part->offset || offset - part->offset >= part->bytes) continue;
        tms_error_append(error, " The object '%s/objects/%s' of the shared store is damaged.", store->folder.path,
                         part->object->name.text);
        tms_shared_object_reject(store, part->object, error);
    }
}

/* The bytes of the objects, whose links stay after a resume. Objects that other processes hold as well count in full. */
static uint64_t reserved_bytes(const tms_backup_t *backup, const tms_backup_slot_t *slot) {
    const tms_shared_contents_t *kept = slot->kept;
    uint64_t bytes = 0;
    (void)backup;
    for (size_t i = 0; kept && i < kept->part_count; i++) bytes += kept->parts[i].object ? kept->parts[i].bytes : 0;
    return bytes;
}

static void destroy(void *store, tms_backup_t *backup, tms_backup_slot_t *slot) {
    (void)backup;
    drop(store, &slot->fresh);
    drop(store, &slot->kept);
    tms_shared_registrar_start(store); /* it ends the registrations of what was dropped */
}

/* ---- the process ---- */

static void enter_call(void *store) {
    tms_shared_registrar_hold(store);
    tms_shared_store_sweep(store);
}

static void leave_call(void *store) { tms_shared_registrar_let_go(store); }
static void retry(void *store) { tms_shared_registrar_start(store); }

static tms_status_t init(void *opaque, const tms_backup_setup_t *setup, tms_error_t *error) {
    tms_shared_store_t *store = opaque;
    (void)error;
    *store = (tms_shared_store_t){.configured = setup->config->shared_directory,
                                  .copying = setup->copying,
                                  .host = setup->host,
                                  .fingerprinter = setup->fingerprinter,
                                  .patience = TMS_SHARED_PATIENCE,
                                  .folder = {.root = -1}};
    pthread_mutex_init(&store->lock, NULL);
    tms_wait_condition_init(&store->changed);
    return TMS_OK;
}

static void close_store(void *store, double deadline) { tms_shared_registrar_close(store, deadline); }

/* A thread may still be in a pause, which fails at its next object. */
static void at_exit(void *opaque) {
    tms_shared_store_t *store = opaque;
    pthread_mutex_lock(&store->lock);
    tms_shared_objects_withdraw_claims(store);
    tms_shared_folder_leave(&store->folder, store->copying->log);
    pthread_mutex_unlock(&store->lock);
}

/* The registrar ends the registrations of the objects, which have no user any more. */
static void drain(void *opaque) {
    tms_shared_store_t *store = opaque;
    tms_shared_store_drop_kept(store);
    tms_shared_registrar_start(store);
    pthread_mutex_lock(&store->lock);
    while (store->registrar_runs) (void)tms_wait_until(&store->changed, &store->lock, INFINITY);
    pthread_mutex_unlock(&store->lock);
    tms_shared_store_close(store);
}

static void release(void *opaque) {
    tms_shared_store_t *store = opaque;
    pthread_cond_destroy(&store->changed);
    pthread_mutex_destroy(&store->lock);
}

static void count(void *opaque, tms_counters_t *counters) {
    tms_shared_store_t *store = opaque;
    counters->shared_backup_bytes += atomic_load(&store->held_bytes);
    counters->shared_made_bytes += atomic_load(&store->made_bytes);
    counters->shared_file_nanoseconds_total += atomic_load(&store->file_nanoseconds);
    counters->shared_copy_nanoseconds_total += atomic_load(&store->copy_nanoseconds);
    counters->shared_wait_nanoseconds_total += atomic_load(&store->wait_nanoseconds);
}

static void lock(void *store) { pthread_mutex_lock(&((tms_shared_store_t *)store)->lock); }
static void unlock(void *store) { pthread_mutex_unlock(&((tms_shared_store_t *)store)->lock); }

/* The child has not inherited the mappings. */
static void after_fork_in_child(void *opaque) {
    tms_shared_store_t *store = opaque;
    tms_shared_objects_forget_names(store);
    for (tms_shared_object_t *object = store->objects; object; object = object->next) {
        if (object->claim >= 0) close(object->claim); /* else a dead parent would keep the claim */
        object->claim = -1;
        object->memory = NULL;
        object->registered = object->busy = object->being_written = false;
    }
    tms_shared_folder_after_fork_in_child(&store->folder);
    store->registrar_runs = store->in_call = store->left_links = false;
    atomic_store(&store->held_bytes, 0);
    atomic_store(&store->made_bytes, 0);
    pthread_mutex_init(&store->lock, NULL);
    tms_wait_condition_init(&store->changed);
}

const tms_backup_operations_t tms_shared_operations = {.place = "shared memory",
                                                       .by_fingerprint = true,
                                                       .plan = plan,
                                                       .save = save,
                                                       .load = load,
                                                       .read = read_part,
                                                       .reject = reject,
                                                       .reserved_bytes = reserved_bytes,
                                                       .commit = commit,
                                                       .cancel = cancel,
                                                       .discard = discard,
                                                       .destroy = destroy,
                                                       .begin = begin,
                                                       TMS_HOST_BATCH_OPERATIONS,
                                                       .init = init,
                                                       .drain = drain,
                                                       .release = release,
                                                       .enter_call = enter_call,
                                                       .leave_call = leave_call,
                                                       .after_pause = after_pause,
                                                       .retry = retry,
                                                       .count = count,
                                                       .close = close_store,
                                                       .at_exit = at_exit,
                                                       .lock = lock,
                                                       .unlock = unlock,
                                                       .after_fork_in_child = after_fork_in_child};
