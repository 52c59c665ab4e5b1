#include "core/allocation/handles.h"

#include <errno.h>
#include <stdlib.h>

#include "core/allocation/allocation.h"
#include "core/allocation/free.h"
#include "core/allocation/orphans.h"
#include "core/allocation/reclaim.h"
#include "core/model/inspect.h"
#include "core/model/peers.h"

/* The driver's handles are addresses of its own memory or small numbers. No address has these highest bits. */
#define NUMBERS_BEGIN UINT64_C(0x746d730000000000)
#define NUMBERS_END   UINT64_C(0x746d740000000000)

typedef struct tms_handle {
    tms_registry_node_t node; /* first: [number, number + 1), in the saver's `handles` while the program has references */
    uint32_t references;
    bool mapped;
    tms_segment_t *segment; /* its memory; NULL once it was unmapped */
} tms_handle_t;

bool tms_handles_is_ours(uint64_t number) { return number >= NUMBERS_BEGIN && number < NUMBERS_END; }

/* Under the lock. NULL: the program has released it, or never had it. */
static tms_handle_t *find(const tms_saver_t *saver, uint64_t number) {
    return (tms_handle_t *)(void *)tms_registry_find(&saver->handles, number);
}

static tms_status_t fail_unknown(const tms_error_context_t *context, uint64_t number, tms_error_t *error) {
    return tms_error_set(error, TMS_INVALID_ARGUMENT, context, "the handle 0x%llx has been released",
                         (unsigned long long)number);
}

/* ---- create ---- */

static tms_status_t create_memory(tms_saver_t *saver, tms_segment_t *segment, const tms_driver_table_t *driver,
                                  const tms_device_table_t *devices, const tms_error_context_t *context,
                                  tms_error_t *error) {
    tms_run_t *run = segment->run;
    tms_status_t status = tms_run_create(run, driver, devices, context, error);
    if (status != TMS_OUT_OF_DEVICE_MEMORY || !tms_reclaim_is_needed(saver)) return status;
    tms_reclaim_all(saver);
    return tms_run_create(run, driver, devices, context, error);
}

/* Makes a segment with memory and without addresses. */
static tms_status_t make_segment(tms_saver_t *saver, const tms_region_t *region, uint64_t reserved,
                                 const tms_driver_table_t *driver, const tms_device_table_t *devices, tms_segment_t **made,
                                 const tms_error_context_t *context, tms_error_t *error) {
    tms_status_t status = tms_allocation_check_margin(saver, reserved, context, error);
    if (status != TMS_OK) return status;
    tms_segment_t *segment = tms_allocation_make_segment(region, reserved, context->device);
    if (segment) segment->node.end = reserved;
    if (!segment || !tms_run_make_unplaced(segment, reserved)) {
        free(segment);
        return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    }
    status = create_memory(saver, segment, driver, devices, context, error);
    if (status == TMS_OK)
        *made = segment;
    else
        (void)tms_free_release_segment(saver, segment, tms_quiesced_without_users());
    return status;
}

static tms_status_t create(tms_saver_t *saver, const tms_region_t *region, uint64_t bytes, tms_handle_t *handle,
                           tms_error_context_t *context, tms_error_t *error) {
    const tms_driver_table_t *driver = NULL;
    const tms_device_table_t *devices = NULL;
    uint64_t reserved = 0;
    tms_status_t status = tms_allocation_prepare(saver, bytes, &driver, &devices, &reserved, context, error);
    if (status == TMS_OK && reserved != bytes)
        status = tms_error_set(error, TMS_INVALID_ARGUMENT, context, "the size is no multiple of the granularity");
    return status == TMS_OK ? make_segment(saver, region, reserved, driver, devices, &handle->segment, context, error)
                            : status;
}

tms_status_t tms_handles_create(tms_saver_t *saver, const tms_region_t *region, uint64_t bytes, int device, uint64_t *number,
                                tms_error_t *error) {
    tms_error_context_t context = {.operation = "allocate", .device = device, .bytes = bytes, .tag = region->tag->name};
    tms_status_t status = tms_saver_check_process(saver, &context, error);
    if (status == TMS_OK) status = tms_saver_check_settings(saver, error);
    if (status != TMS_OK) return status;
    tms_handle_t *handle = calloc(1, sizeof *handle);
    status = handle ? create(saver, region, bytes, handle, &context, error)
                    : tms_error_set_os(error, &context, "calloc", ENOMEM, NULL);
    if (!handle || status != TMS_OK) {
        free(handle);
        tms_allocation_fail(saver, region->tag, status, &context, error);
        return tms_inspect_explain_loss(saver, status, error);
    }
    handle->references = 1;
    pthread_mutex_lock(&saver->lock);
    *number = handle->node.begin = NUMBERS_BEGIN + ++saver->handles_made;
    handle->node.end = handle->node.begin + 1;
    tms_registry_insert(&saver->handles, &handle->node);
    pthread_mutex_unlock(&saver->lock);
    return TMS_OK;
}

/* ---- map ---- */

/* The memory at the addresses of a map. */
typedef enum place { FREE, TAKEN_OVER, BUSY, IN_USE } place_t;

/* Under the lock: makes the segment the memory of a mapped handle. */
static void attach(tms_handle_t *handle, tms_segment_t *segment) {
    handle->segment = segment;
    handle->mapped = true;
    segment->handle = handle;
}

/* Under the lock: takes over the memory of an orphan, if the pause that owns it has not begun to release memory. *spare
 * becomes the handle's own memory, which was never mapped. */
static place_t take_over(tms_saver_t *saver, tms_handle_t *handle, uint64_t address, uint64_t bytes, tms_run_t **spare) {
    tms_registry_node_t *node = tms_registry_overlapping(&saver->registry, address, address + bytes);
    if (!node) return FREE;
    tms_segment_t *segment = tms_segment_of(node), *successor = handle->segment;
    if (!tms_segment_is_of_program(segment) || !segment->free_requested || segment->successor) return IN_USE;
    bool fits = node->begin == address && node->end == address + bytes && segment->device == successor->device;
    if (!fits || segment->state != TMS_SEGMENT_PAUSING || segment->run->releasing) return BUSY;
    segment->run->taken_over = true;
    segment->successor = successor;
    *spare = successor->run;
    tms_run_drop_reference(successor);
    successor->node.begin = address;
    successor->node.end = address + bytes;
    attach(handle, successor);
    return TAKEN_OVER;
}

void tms_handles_hand_over(tms_saver_t *saver, tms_segment_t *orphan) {
    tms_segment_t *successor = orphan->successor;
    if (!successor) return;
    tms_run_t *run = orphan->run;
    tms_run_attach(run, successor);
    tms_run_drop_reference(orphan);
    run->tag = successor->tag;
    orphan->successor = NULL;
    tms_allocation_publish(saver, successor);
}

/* Maps memory of its own at addresses where nothing managed is, and publishes the segment. A map that has failed has
 * released the memory, which is then created again. */
static tms_status_t map_own(tms_saver_t *saver, tms_handle_t *handle, uint64_t address, tms_error_context_t *context,
                            tms_error_t *error) {
    const tms_driver_table_t *driver = atomic_load(&saver->devices->driver->table);
    const tms_device_table_t *devices = atomic_load(&saver->devices->table);
    tms_segment_t *segment = handle->segment;
    tms_run_t *run = segment->run;
    const uint64_t bytes = tms_run_bytes(run);
    const tms_device_mask_t seen = tms_peers_seen(saver);
    tms_device_mask_t peers = 0;
    tms_status_t status = tms_devices_peers(saver->devices, segment->device, &peers, context, error);
    if (status != TMS_OK) return status;
    if (run->mapped) { /* a map before has failed, and so has undoing it */
        status = tms_run_depopulate(run, tms_quiesced_without_users(), driver, context, error);
        if (status != TMS_OK) return status;
    }
    run->begin = address;
    run->end = address + bytes;
    status = run->has_handle ? tms_run_map(run, driver, peers, context, error)
                             : tms_run_populate(run, driver, devices, peers, context, error);
    if (status != TMS_OK) return status;
    segment->node.begin = run->begin;
    segment->node.end = run->end;
    pthread_mutex_lock(&saver->lock);
    attach(handle, segment);
    tms_allocation_publish(saver, segment);
    (void)tms_peers_note_skipped(saver, seen); /* the scan comes next */
    pthread_mutex_unlock(&saver->lock);
    if (devices->count > 1) tms_peers_refresh_after_allocation(saver);
    return TMS_OK;
}

/* Under the lock: whether the handle can be mapped. */
static tms_status_t check_map(const tms_handle_t *handle, uint64_t bytes, uint64_t number,
                              const tms_error_context_t *context, tms_error_t *error) {
    if (!handle) return fail_unknown(context, number, error);
    if (handle->mapped || !handle->segment)
        return tms_error_set(error, TMS_INVALID_STATE, context,
                             "the handle 0x%llx was mapped before, and a managed handle can be mapped only once",
                             (unsigned long long)number);
    if (tms_run_bytes(handle->segment->run) != bytes)
        return tms_error_set(error, TMS_INVALID_ARGUMENT, context, "a handle is mapped as a whole");
    return TMS_OK;
}

tms_status_t tms_handles_map(tms_saver_t *saver, uint64_t address, uint64_t bytes, uint64_t number, bool *busy,
                             tms_error_t *error) {
    tms_error_context_t context = {.operation = "map", .device = TMS_NO_DEVICE, .bytes = bytes, .address = address};
    place_t place = FREE;
    tms_run_t *spare = NULL;
    *busy = false;
    tms_status_t status = tms_saver_check_process(saver, &context, error);
    if (status != TMS_OK) return status;
    pthread_mutex_lock(&saver->lock);
    tms_handle_t *handle = find(saver, number);
    status = check_map(handle, bytes, number, &context, error);
    tms_segment_t *own = status == TMS_OK ? handle->segment : NULL;
    if (own) {
        context.device = own->device;
        context.tag = own->tag->name;
        place = take_over(saver, handle, address, bytes, &spare);
    }
    const bool orphans = saver->orphans > 0;
    pthread_mutex_unlock(&saver->lock);
    if (!own) return status;
    switch (place) {
    case FREE: break;
    case TAKEN_OVER: tms_free_release_run(saver, spare, tms_quiesced_without_users()); return TMS_OK;
    case BUSY:
        *busy = true;
        return tms_error_set(error, TMS_INVALID_STATE, &context, "a pause or resume still uses the addresses");
    case IN_USE: return tms_error_set(error, TMS_INVALID_ARGUMENT, &context, "managed memory is mapped at the addresses");
    }
    status = map_own(saver, handle, address, &context, error);
    *busy = status == TMS_DRIVER && orphans; /* an orphan that is about to be unmapped may be there */
    return status;
}

/* ---- unmap ---- */

/* Under the lock: the segment of the handle that is mapped at the addresses of a segment in the registry. */
static tms_segment_t *mapped_at(tms_registry_node_t *node) {
    tms_segment_t *segment = tms_segment_of(node);
    return segment->successor ? segment->successor : segment;
}

/* Under the lock: separates a segment from its handle. Returns the handle if the program has no reference to it either. */
static tms_handle_t *detach(tms_segment_t *segment) {
    tms_handle_t *handle = segment->handle;
    segment->handle = NULL;
    handle->segment = NULL;
    handle->mapped = false;
    return handle->references == 0 ? handle : NULL;
}

tms_status_t tms_handles_unmap(tms_saver_t *saver, uint64_t address, uint64_t bytes, tms_error_t *error) {
    tms_error_context_t context = {.operation = "unmap", .device = TMS_NO_DEVICE, .bytes = bytes, .address = address};
    tms_segment_t *unmapped = NULL;
    tms_handle_t *last = NULL;
    tms_status_t status = TMS_OK;
    pthread_mutex_lock(&saver->lock);
    tms_registry_node_t *node = tms_registry_overlapping(&saver->registry, address, address + bytes);
    tms_segment_t *orphan = node && tms_segment_of(node)->successor ? tms_segment_of(node) : NULL;
    tms_segment_t *segment = node ? mapped_at(node) : NULL;
    if (!segment) {
        status = TMS_NOT_MANAGED;
    } else if (!segment->handle || node->begin != address || node->end != address + bytes) {
        status =
            tms_error_set(error, TMS_INVALID_ARGUMENT, &context, "this is not one mapping of a managed handle as a whole");
    } else if (!atomic_load(&saver->forked)) {
        last = detach(segment);
        if (orphan) {
            orphan->successor = NULL;
            unmapped = segment;
        } else if (tms_segment_has_owner(segment)) {
            segment->free_requested = true; /* the owner finishes it */
            tms_orphans_add(saver);
        } else {
            tms_saver_unpublish(saver, segment);
            tms_shared_page_publish(&saver->shared_page);
            unmapped = segment;
        }
    }
    pthread_mutex_unlock(&saver->lock);
    free(last);
    if (unmapped) (void)tms_free_release_segment(saver, unmapped, tms_quiesced_by_program());
    return status;
}

/* ---- references ---- */

tms_status_t tms_handles_release(tms_saver_t *saver, uint64_t number, tms_error_t *error) {
    const tms_error_context_t context = {.operation = "release", .device = TMS_NO_DEVICE};
    tms_segment_t *released = NULL;
    tms_handle_t *last = NULL;
    if (atomic_load(&saver->forked)) return TMS_OK;
    pthread_mutex_lock(&saver->lock);
    tms_handle_t *handle = find(saver, number);
    if (handle && --handle->references == 0) {
        tms_registry_remove(&saver->handles, &handle->node);
        if (!handle->mapped) {
            released = handle->segment;
            last = handle;
        }
    }
    pthread_mutex_unlock(&saver->lock);
    if (!handle) return fail_unknown(&context, number, error);
    if (released) (void)tms_free_release_segment(saver, released, tms_quiesced_without_users());
    free(last);
    return TMS_OK;
}

bool tms_handles_retain(tms_saver_t *saver, uint64_t address, uint64_t *number) {
    pthread_mutex_lock(&saver->lock);
    tms_registry_node_t *node = tms_registry_find(&saver->registry, address);
    tms_handle_t *handle = node ? mapped_at(node)->handle : NULL;
    if (handle) {
        if (handle->references++ == 0) tms_registry_insert(&saver->handles, &handle->node);
        *number = handle->node.begin;
    }
    pthread_mutex_unlock(&saver->lock);
    return handle != NULL;
}

tms_status_t tms_handles_memory(tms_saver_t *saver, uint64_t number, CUmemGenericAllocationHandle *memory,
                                tms_error_t *error) {
    const tms_error_context_t context = {.operation = "find memory", .device = TMS_NO_DEVICE};
    tms_status_t status = TMS_OK;
    pthread_mutex_lock(&saver->lock);
    const tms_handle_t *handle = find(saver, number);
    const tms_segment_t *segment = handle ? handle->segment : NULL;
    if (segment && !tms_segment_has_owner(segment) && segment->run && segment->run->has_handle)
        *memory = segment->run->handle;
    else if (handle)
        status = tms_error_set(error, TMS_INVALID_STATE, &context,
                               "the memory of the handle 0x%llx is paused, or being paused or resumed",
                               (unsigned long long)number);
    else
        status = fail_unknown(&context, number, error);
    pthread_mutex_unlock(&saver->lock);
    return status;
}

bool tms_handles_find(tms_saver_t *saver, uint64_t *begin, uint64_t *end) {
    pthread_mutex_lock(&saver->lock);
    const tms_registry_node_t *first = *end > *begin ? tms_registry_overlapping(&saver->registry, *begin, *end) : NULL;
    if (first) {
        if (first->begin > *begin) *begin = first->begin;
        if (first->end < *end) *end = first->end;
    }
    pthread_mutex_unlock(&saver->lock);
    return first != NULL;
}
