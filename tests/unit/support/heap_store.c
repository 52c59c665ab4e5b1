#include "heap_store.h"

#include <errno.h>
#include <stdlib.h>

typedef struct heap_block {
    tms_quarantined_t node; /* first */
    heap_store_t *heap;
    _Atomic int references; /* of the backup, and of copiers */
    int device;             /* of the context in which it is pinned */
    bool pinned;
    uint64_t bytes;
    char data[];
} heap_block_t;

typedef struct heap_batch {
    heap_store_t *heap;
} heap_batch_t;

typedef struct heap_relay {
    tms_copier_relay_t relay; /* first */
    heap_store_t *heap;
} heap_relay_t;

static bool fails(heap_store_t *heap, heap_failure_t where) {
    int left = atomic_load(&heap->fail_in[where]);
    while (left > 0 && !atomic_compare_exchange_weak(&heap->fail_in[where], &left, left - 1)) continue;
    return left == 1;
}

static tms_status_t check(heap_store_t *heap, heap_failure_t where, const tms_error_context_t *context, tms_error_t *error) {
    if (!fails(heap, where)) return TMS_OK;
    return tms_error_set(error, TMS_BACKUP_IO, context, "the heap store was made to fail at %d", (int)where);
}

/* ---- blocks ---- */

typedef enum pinning { PAGEABLE, PINNED } pinning_t;

static tms_status_t pin(heap_block_t *block, pinning_t wanted, const tms_error_context_t *context, tms_error_t *error) {
    const bool pinned = wanted == PINNED;
    tms_devices_t *devices = block->heap->devices;
    const tms_driver_table_t *driver;
    if (block->pinned == pinned) return TMS_OK;
    tms_status_t status = tms_devices_load(devices, &driver, NULL, context, error);
    if (status == TMS_OK) status = tms_devices_enter(devices, block->device, context, error);
    if (status != TMS_OK) return status;
    if (pinned)
        status = TMS_DRIVER_CALL(driver, context, error, cuMemHostRegister, block->data, block->bytes,
                                 CU_MEMHOSTREGISTER_PORTABLE);
    else
        status = TMS_DRIVER_CALL(driver, context, error, cuMemHostUnregister, block->data);
    tms_devices_leave(devices, block->device);
    if (status == TMS_OK) block->pinned = pinned;
    return status;
}

static tms_quarantine_mask_t give_back(tms_quarantined_t *node) {
    const tms_error_context_t context = {.operation = "release host memory", .device = TMS_NO_DEVICE};
    heap_block_t *block = (heap_block_t *)node;
    heap_store_t *heap = block->heap;
    tms_error_t reason;
    if (fails(heap, HEAP_GIVE_BACK) || pin(block, PAGEABLE, &context, &reason) != TMS_OK) return TMS_QUARANTINE_BIT(OTHER);
    free(block);
    atomic_fetch_sub(&heap->blocks, 1);
    return 0;
}

static void drop_block(void *held) {
    heap_block_t *block = held;
    if (!block || atomic_fetch_sub(&block->references, 1) != 1) return;
    heap_store_t *heap = block->heap;
    block->node = (tms_quarantined_t){.retry = give_back, .holds = TMS_QUARANTINE_BIT(OTHER)};
    if (give_back(&block->node) != 0) tms_quarantine_add(heap->quarantine, &block->node);
}

static void drop(void **block) {
    drop_block(*block);
    *block = NULL;
}

/* ---- a pause ---- */

static tms_status_t begin(void *store, void **batch, const tms_error_context_t *context, tms_error_t *error) {
    heap_store_t *heap = store;
    tms_status_t status = check(heap, HEAP_BEGIN, context, error);
    heap_batch_t *made = status == TMS_OK ? malloc(sizeof *made) : NULL;
    if (!made) return status == TMS_OK ? tms_error_set_os(error, context, "malloc", ENOMEM, NULL) : status;
    made->heap = heap;
    atomic_fetch_add(&heap->batches, 1);
    *batch = made;
    return TMS_OK;
}

static tms_status_t start(void *batch, const tms_error_context_t *context, tms_error_t *error) {
    heap_store_t *heap = ((heap_batch_t *)batch)->heap;
    atomic_fetch_add(&heap->started, 1);
    return check(heap, HEAP_START, context, error);
}

static bool help(void *batch, int device) {
    (void)device;
    atomic_fetch_add(&((heap_batch_t *)batch)->heap->helped, 1);
    return false;
}

static void end(void *batch) {
    atomic_fetch_sub(&((heap_batch_t *)batch)->heap->batches, 1);
    free(batch);
}

static tms_status_t plan(void *store, void *batch, tms_backup_t *backup, tms_backup_slot_t *slot,
                         const tms_backup_request_t *request, const tms_backup_content_t *content,
                         const tms_error_context_t *context, tms_error_t *error) {
    heap_store_t *heap = store;
    const heap_block_t *kept = slot->kept;
    (void)backup;
    if (!batch) return tms_error_set(error, TMS_INVALID_STATE, context, "begin was not called");
    tms_status_t status = check(heap, HEAP_PLAN, context, error);
    if (status != TMS_OK || content->bytes == 0 || (kept && kept->bytes >= content->bytes)) return status;
    heap_block_t *fresh = malloc(sizeof *fresh + content->bytes);
    if (!fresh) return tms_error_set_os(error, context, "malloc", ENOMEM, NULL);
    *fresh = (heap_block_t){.heap = heap, .references = 1, .device = request->device, .bytes = content->bytes};
    atomic_fetch_add(&heap->blocks, 1);
    slot->fresh = fresh;
    return heap->pins ? pin(fresh, PINNED, context, error) : TMS_OK;
}

/* ---- copies ---- */

static tms_status_t wait_for_relay(tms_copier_relay_t *relay, tms_error_t *error) {
    const tms_error_context_t context = {.operation = "pause", .device = TMS_NO_DEVICE};
    return check(((heap_relay_t *)relay)->heap, HEAP_WAIT, &context, error);
}

static void release_relay(tms_copier_relay_t *relay, const tms_driver_table_t *driver, const tms_wait_t *wait) {
    (void)driver;
    (void)wait;
    atomic_fetch_sub(&((heap_relay_t *)relay)->heap->relays, 1);
    free(relay);
}

static const tms_copier_relay_table_t as_relay = {.wait = wait_for_relay, .release = release_relay};

static tms_status_t need_relay(heap_store_t *heap, tms_copier_t *copier, const tms_error_context_t *context,
                               tms_error_t *error) {
    if (tms_copier_find_relay(copier, &as_relay)) return TMS_OK;
    heap_relay_t *made = malloc(sizeof *made);
    if (!made) return tms_error_set_os(error, context, "malloc", ENOMEM, NULL);
    *made = (heap_relay_t){.relay = {.table = &as_relay}, .heap = heap};
    atomic_fetch_add(&heap->relays, 1);
    tms_copier_add_relay(copier, &made->relay);
    return TMS_OK;
}

static tms_status_t save(void *store, tms_backup_t *backup, tms_backup_slot_t *slot, tms_copier_t *copier,
                         CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error) {
    heap_block_t *block = slot->fresh ? slot->fresh : slot->kept;
    uint64_t begun = copier->begun;
    tms_extent_t whole;
    size_t count;
    const tms_extent_t *extents = tms_backup_extents(&backup->planned, &whole, &count);
    tms_status_t status = check(store, HEAP_SAVE, context, error);
    if (status == TMS_OK) status = need_relay(store, copier, context, error);
    if (status == TMS_OK) status = tms_copier_hold(copier, block, drop_block, context, error);
    if (status == TMS_OK) atomic_fetch_add(&block->references, 1);
    for (size_t i = 0; i < count && status == TMS_OK; i++)
        status = tms_copier_to_host(copier, block->data + extents[i].packed, address + extents[i].offset, extents[i].bytes,
                                    context, error);
    if (!slot->fresh && copier->begun != begun) backup->saved = false;
    return status == TMS_OK ? check(store, HEAP_SAVED, context, error) : status;
}

static tms_status_t load(void *store, tms_backup_t *backup, tms_backup_slot_t *slot, tms_copier_t *copier,
                         CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error) {
    const heap_block_t *block = slot->kept;
    tms_extent_t whole;
    size_t count;
    const tms_extent_t *extents = tms_backup_extents(&backup->held, &whole, &count);
    tms_status_t status = check(store, HEAP_LOAD, context, error);
    if (status == TMS_OK) status = need_relay(store, copier, context, error);
    for (size_t i = 0; i < count && status == TMS_OK; i++)
        status = tms_copier_to_device(copier, address + extents[i].offset, block->data + extents[i].packed, extents[i].bytes,
                                      context, error);
    return status == TMS_OK ? check(store, HEAP_LOADED, context, error) : status;
}

/* ---- ends ---- */

static void commit(void *store, tms_backup_t *backup, tms_backup_slot_t *slot) {
    bool needed = backup->planned.kind == HEAP_BACKUP && backup->planned.bytes > 0;
    (void)store;
    if (!needed || slot->fresh) drop(&slot->kept);
    if (slot->fresh) slot->kept = slot->fresh;
    slot->fresh = NULL;
}

static void cancel(void *store, tms_backup_t *backup, tms_backup_slot_t *slot) {
    (void)store;
    (void)backup;
    drop(&slot->fresh);
}

static bool discard(void *store, tms_backup_t *backup, tms_backup_slot_t *slot, tms_host_policy_t policy) {
    (void)store;
    if (policy == TMS_HOST_RETAIN && backup->saved && backup->held.kind == HEAP_BACKUP) return true;
    drop(&slot->kept);
    return false;
}

static void *find(void *store, const tms_backup_t *backup, const tms_backup_slot_t *slot, uint64_t offset, uint64_t bytes,
                  tms_host_buffer_t **buffer) {
    heap_block_t *block = slot->kept;
    (void)bytes;
    (void)buffer; /* it has none to return */
    if (!block || backup->held.bytes != backup->bytes || fails(store, HEAP_FIND)) return NULL;
    return block->data + offset;
}

static void destroy(void *store, tms_backup_t *backup, tms_backup_slot_t *slot) {
    (void)store;
    (void)backup;
    drop(&slot->fresh);
    drop(&slot->kept);
}

const tms_backup_operations_t heap_operations = {.place = "the heap",
                                                 .plan = plan,
                                                 .save = save,
                                                 .load = load,
                                                 .commit = commit,
                                                 .cancel = cancel,
                                                 .discard = discard,
                                                 .find = find,
                                                 .destroy = destroy,
                                                 .begin = begin,
                                                 .start = start,
                                                 .help = help,
                                                 .end = end};

void heap_store_add(heap_store_t *heap, tms_backup_stores_t *stores) {
    *heap = (heap_store_t){.devices = stores->copying.devices, .quarantine = stores->copying.quarantine};
    tms_backup_stores_add(stores, &heap_operations, heap, 1u << HEAP_BACKUP);
}
