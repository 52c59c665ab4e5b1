#include "saver.h"

#include <stdlib.h>

tms_status_t tms_saver_init(tms_saver_t *saver, const tms_config_t *config, const tms_log_t *log, tms_devices_t *devices,
                            tms_region_defaults_t *regions, tms_error_t *error) {
    *saver = (tms_saver_t){.config = config, .log = log, .devices = devices, .regions = regions};
    saver->stores.devices = devices;
    saver->stores.log = log;
    saver->stores.chunk_bytes = config->disk_backup_chunk_bytes;
    tms_status_t status =
        tms_disk_init(&saver->stores.disk, config->disk_backup_directory, log, &saver->stores.disk_bytes, error);
    if (status != TMS_OK) return status;
    pthread_mutex_init(&saver->lock, NULL);
    pthread_cond_init(&saver->turn, NULL);
    tms_registry_init(&saver->registry);
    tms_capture_init(&saver->capture);
    atomic_init(&saver->retain_backup, config->retain_cpu_backup);
    return TMS_OK;
}

tms_status_t tms_saver_check_process(tms_saver_t *saver, const tms_error_context_t *context, tms_error_t *error) {
    if (!atomic_load(&saver->forked)) return TMS_OK;
    return tms_error_set(error, TMS_FORKED, context, "start workers with the spawn or forkserver method instead");
}

tms_region_t tms_saver_settings(tms_saver_t *saver) {
    int depth = 0;
    tms_region_t region = tms_region_current(saver->regions, &depth);
    if (depth > 0 || !tms_capture_visible(&saver->capture)) return region;
    pthread_mutex_lock(&saver->lock);
    (void)tms_capture_settings(&saver->capture, &region);
    pthread_mutex_unlock(&saver->lock);
    return region;
}

bool tms_saver_owns(tms_saver_t *saver, uint64_t address) {
    pthread_mutex_lock(&saver->lock);
    bool owned = tms_registry_find(&saver->registry, address) != NULL;
    pthread_mutex_unlock(&saver->lock);
    return owned;
}

bool tms_saver_has_segments(tms_saver_t *saver) {
    pthread_mutex_lock(&saver->lock);
    bool any = saver->registry.count > 0;
    pthread_mutex_unlock(&saver->lock);
    return any;
}

void tms_saver_note(tms_saver_t *saver, tms_status_t status, const tms_error_t *reason) {
    if (status != TMS_OK && status != TMS_DRIVER_UNAVAILABLE)
        tms_log_write(saver->log, TMS_LOG_WARNING, "%s", reason->message);
}

static tms_error_context_t context_of(const char *operation, const tms_segment_t *segment) {
    return (tms_error_context_t){.operation = operation,
                                 .device = segment->device,
                                 .bytes = tms_segment_reserved(segment),
                                 .address = tms_segment_address(segment),
                                 .tag = segment->tag->name};
}

/* ---- allocate ---- */

static tms_status_t check_size(tms_saver_t *saver, const tms_driver_table_t *driver, const tms_device_table_t *devices,
                               uint64_t bytes, uint64_t *reserved, const tms_error_context_t *context, tms_error_t *error) {
    if (context->device < 0 || context->device >= devices->count)
        return tms_error_set(error, TMS_INVALID_ARGUMENT, context, "devices 0 to %d exist", devices->count - 1);
    const tms_device_t *device = &devices->device[context->device];
    if (device->granularity == 0)
        return tms_error_set(error, TMS_DRIVER_UNAVAILABLE, context,
                             "this device has no virtual memory management (cuMemCreate)");
    uint64_t rounded = tms_segment_round(bytes, device->granularity);
    if (rounded == 0 || rounded > device->total_bytes)
        return tms_error_set(error, TMS_OUT_OF_DEVICE_MEMORY, context, "the device has %llu bytes in all",
                             (unsigned long long)device->total_bytes);
    uint64_t margin = atomic_load(&saver->memory_margin_bytes);
    if (margin > 0) {
        size_t free_bytes = 0, total_bytes = 0;
        tms_status_t status = tms_devices_enter(saver->devices, context->device, context, error);
        if (status != TMS_OK) return status;
        status = TMS_DRIVER_CALL(driver, context, error, cuMemGetInfo, &free_bytes, &total_bytes);
        tms_devices_leave(saver->devices, context->device);
        if (status != TMS_OK) return status;
        if (free_bytes < rounded || free_bytes - rounded < margin)
            return tms_error_set(error, TMS_OUT_OF_DEVICE_MEMORY, context,
                                 "%zu bytes are free, and memory_margin_bytes keeps %llu of them", free_bytes,
                                 (unsigned long long)margin);
    }
    *reserved = rounded;
    return TMS_OK;
}

static tms_status_t populate(tms_saver_t *saver, tms_segment_t *segment, const tms_driver_table_t *driver,
                             const tms_device_table_t *devices, const tms_error_context_t *context, tms_error_t *error) {
    tms_device_mask_t peers = 0;
    tms_status_t status = tms_devices_peers(saver->devices, segment->device, &peers, context, error);
    return status == TMS_OK ? tms_segment_populate(segment, driver, devices, peers, context, error) : status;
}

static void publish(tms_saver_t *saver, tms_segment_t *segment) {
    segment->state = TMS_SEGMENT_ACTIVE;
    pthread_mutex_lock(&saver->lock);
    tms_registry_insert(&saver->registry, &segment->node);
    pthread_mutex_unlock(&saver->lock);
    atomic_store_explicit(&segment->tag->used, true, memory_order_relaxed);
    tms_stats_add(&saver->stats.allocations_total, 1);
    tms_stats_add(&saver->stats.resident_bytes, tms_segment_reserved(segment));
}

static bool has_reclaimable(tms_saver_t *saver) {
    pthread_mutex_lock(&saver->lock);
    bool any = saver->quarantine || saver->deferred || saver->damaged;
    pthread_mutex_unlock(&saver->lock);
    return any;
}

/* A segment with memory, not yet published. On failure nothing is left but what the driver refused to take back, in
 * quarantine. */
static tms_status_t make_segment(tms_saver_t *saver, const tms_region_t *region, uint64_t bytes, uint64_t reserved,
                                 const tms_driver_table_t *driver, const tms_device_table_t *devices, tms_segment_t **made,
                                 const tms_error_context_t *context, tms_error_t *error) {
    tms_segment_t *segment = calloc(1, sizeof *segment);
    if (!segment) return tms_error_set(error, TMS_OUT_OF_HOST_MEMORY, context, "no memory to keep track of an allocation");
    segment->bytes = bytes;
    segment->device = context->device;
    segment->tag = (tms_tag_t *)region->tag;
    segment->backup = (tms_backup_t){.kind = region->backup, .bytes = bytes};
    tms_status_t status = tms_segment_reserve(segment, driver, reserved, context, error);
    if (status != TMS_OK) {
        free(segment);
        return status;
    }
    status = populate(saver, segment, driver, devices, context, error);
    if (status == TMS_OUT_OF_DEVICE_MEMORY && has_reclaimable(saver)) {
        tms_saver_reclaim(saver);
        status = populate(saver, segment, driver, devices, context, error);
    }
    if (status != TMS_OK) {
        tms_saver_dispose(saver, segment);
        return status;
    }
    *made = segment;
    return TMS_OK;
}

tms_status_t tms_saver_allocate(tms_saver_t *saver, const tms_region_t *region, uint64_t bytes, int device,
                                uint64_t *address, tms_error_t *error) {
    tms_error_context_t context = {.operation = "allocate", .device = device, .bytes = bytes, .tag = region->tag->name};
    const tms_driver_table_t *driver = NULL;
    const tms_device_table_t *devices = NULL;
    tms_segment_t *segment = NULL;
    uint64_t reserved = 0;

    tms_status_t status = tms_saver_check_process(saver, &context, error);
    if (status == TMS_OK && bytes == 0) {
        *address = 0; /* as cudaMalloc has it */
        return TMS_OK;
    }
    if (status == TMS_OK) status = tms_devices_load(saver->devices, &driver, &devices, &context, error);
    if (status == TMS_OK && device == TMS_NO_DEVICE)
        status = tms_devices_current(saver->devices, &context.device, &context, error);
    if (status == TMS_OK) status = check_size(saver, driver, devices, bytes, &reserved, &context, error);
    if (status == TMS_OK) status = make_segment(saver, region, bytes, reserved, driver, devices, &segment, &context, error);
    if (status != TMS_OK) {
        tms_stats_add(&saver->stats.failures_total, 1);
        return status;
    }
    *address = tms_segment_address(segment); /* before publishing: from then on another thread may free it */
    publish(saver, segment);
    if (devices->count > 1) {
        /* A device that came into use since the last look also wants what was allocated before it did. The allocation stands
         * whatever comes of that. */
        tms_error_t reason;
        tms_saver_note(saver, tms_saver_refresh_peers(saver, &reason), &reason);
    }
    return TMS_OK;
}

/* ---- free ---- */

static void keep(tms_saver_t *saver, tms_segment_t **list, tms_segment_t *segment) {
    pthread_mutex_lock(&saver->lock);
    segment->next_in_transition = *list;
    *list = segment;
    pthread_mutex_unlock(&saver->lock);
}

static tms_segment_t *take(tms_saver_t *saver, tms_segment_t **list) {
    pthread_mutex_lock(&saver->lock);
    tms_segment_t *first = *list;
    *list = NULL;
    pthread_mutex_unlock(&saver->lock);
    return first;
}

/* What the driver holds of a segment goes back to it. False: something stayed, the flags of the segment say what. */
static bool give_back(tms_saver_t *saver, tms_segment_t *segment, tms_error_t *error) {
    tms_error_context_t context = context_of("free", segment);
    const tms_driver_table_t *driver = atomic_load(&saver->devices->driver->table);
    tms_status_t status = tms_segment_depopulate(segment, driver, &context, error);
    if (status == TMS_OK) status = tms_segment_unreserve(segment, driver, &context, error);
    /* At process exit the driver may have gone, and everything with it. */
    return status == TMS_OK || status == TMS_DRIVER_UNAVAILABLE;
}

void tms_saver_dispose(tms_saver_t *saver, tms_segment_t *segment) {
    tms_error_t reason;
    tms_backup_destroy(&segment->backup, &saver->stores);
    if (give_back(saver, segment, &reason)) {
        free(segment);
        return;
    }
    tms_log_write(saver->log, TMS_LOG_ERROR, "%s It is kept aside and tried again by later calls.", reason.message);
    keep(saver, &saver->quarantine, segment);
}

/* Waits for the devices that may still use a mapped segment, then disposes of it. Where waiting is forbidden for the moment
 * (a stream capture, seen or not) the segment waits instead. */
void tms_saver_retire(tms_saver_t *saver, tms_segment_t *segment) {
    tms_error_context_t context = context_of("free", segment);
    tms_error_t reason;
    if (segment->mapped) {
        if (tms_capture_visible(&saver->capture)) {
            keep(saver, &saver->deferred, segment);
            return;
        }
        tms_status_t status = tms_devices_synchronize(saver->devices, segment->accessible, &context, &reason);
        if (status == TMS_CAPTURE_IN_PROGRESS) {
            tms_log_write(saver->log, TMS_LOG_INFO, "%s The memory goes back later.", reason.message);
            keep(saver, &saver->deferred, segment);
            return;
        }
        /* A lost device runs nothing that could still use the memory. */
        if (status != TMS_OK && status != TMS_DRIVER_UNAVAILABLE)
            tms_log_write(saver->log, TMS_LOG_WARNING, "%s It is freed all the same.", reason.message);
    }
    tms_saver_dispose(saver, segment);
}

/* Under the lock: takes a segment that its owner gives up out of the books. */
void tms_saver_unpublish(tms_saver_t *saver, tms_segment_t *segment) {
    tms_registry_remove(&saver->registry, &segment->node);
    if (segment->state == TMS_SEGMENT_ACTIVE) {
        tms_stats_subtract(&saver->stats.resident_bytes, tms_segment_reserved(segment));
    } else {
        atomic_fetch_sub_explicit(&segment->tag->paused, 1, memory_order_relaxed);
        if (segment->state == TMS_SEGMENT_PAUSED)
            tms_stats_subtract(&saver->stats.paused_bytes, tms_segment_reserved(segment));
        else
            saver->damaged--;
        if (segment->mapped) tms_stats_subtract(&saver->stats.resident_bytes, tms_segment_reserved(segment));
    }
    tms_stats_add(&saver->stats.frees_total, 1);
}

tms_status_t tms_saver_free(tms_saver_t *saver, uint64_t address, tms_error_t *error) {
    tms_segment_t *retired = NULL;
    pthread_mutex_lock(&saver->lock);
    tms_registry_node_t *node = tms_registry_find(&saver->registry, address);
    tms_segment_t *segment = node ? tms_segment_of(node) : NULL;
    bool freed_before = segment && segment->free_requested;
    bool at_start = segment && tms_segment_address(segment) == address;
    tms_error_context_t context = {.operation = "free", .device = TMS_NO_DEVICE, .address = address};
    if (segment) context = context_of("free", segment);
    if (at_start && !freed_before && !atomic_load(&saver->forked)) {
        if (segment->state == TMS_SEGMENT_PAUSING || segment->state == TMS_SEGMENT_RESUMING) {
            segment->free_requested = true; /* whoever owns the transition finishes it */
        } else {
            tms_saver_unpublish(saver, segment);
            retired = segment;
        }
    }
    pthread_mutex_unlock(&saver->lock);

    if (!segment) {
        if (error) {
            tms_error_clear(error);
            error->status = TMS_NOT_MANAGED;
        }
        return TMS_NOT_MANAGED;
    }
    if (atomic_load(&saver->forked)) return TMS_OK; /* the memory is the parent's */
    if (!at_start)
        return tms_error_set(error, TMS_INVALID_ARGUMENT, &context,
                             "address 0x%llx lies inside an allocation that starts at 0x%llx", (unsigned long long)address,
                             (unsigned long long)context.address);
    if (freed_before) return tms_error_set(error, TMS_INVALID_ARGUMENT, &context, "it has been freed already");
    if (retired) tms_saver_retire(saver, retired);
    return TMS_OK;
}

/* ---- what waits ---- */

static void retry_damaged(tms_saver_t *saver) {
    /* At most one caller at a time may touch a damaged segment, and none while a transition owns the rest: both hold because
     * this runs with the lock held. It is a few driver calls on a path that is not supposed to be taken. */
    const tms_driver_table_t *driver = atomic_load(&saver->devices->driver->table);
    pthread_mutex_lock(&saver->lock);
    for (tms_registry_node_t *node = saver->damaged ? saver->registry.first : NULL; node; node = node->next) {
        tms_segment_t *segment = tms_segment_of(node);
        if (segment->state != TMS_SEGMENT_DAMAGED) continue;
        tms_error_context_t context = context_of("reclaim", segment);
        bool was_mapped = segment->mapped;
        if (tms_segment_depopulate(segment, driver, &context, NULL) != TMS_OK) continue;
        if (was_mapped) tms_stats_subtract(&saver->stats.resident_bytes, tms_segment_reserved(segment));
        segment->state = TMS_SEGMENT_PAUSED;
        saver->damaged--;
        tms_stats_add(&saver->stats.paused_bytes, tms_segment_reserved(segment));
        tms_log_write(saver->log, TMS_LOG_INFO, "an allocation of %llu bytes with tag '%s' is whole again: paused",
                      (unsigned long long)segment->bytes, segment->tag->name);
    }
    pthread_mutex_unlock(&saver->lock);
}

void tms_saver_reclaim(tms_saver_t *saver) {
    if (!has_reclaimable(saver)) return;
    for (tms_segment_t *next, *segment = take(saver, &saver->quarantine); segment; segment = next) {
        next = segment->next_in_transition;
        if (give_back(saver, segment, NULL))
            free(segment);
        else
            keep(saver, &saver->quarantine, segment);
    }
    if (!tms_capture_visible(&saver->capture)) {
        for (tms_segment_t *next, *segment = take(saver, &saver->deferred); segment; segment = next) {
            next = segment->next_in_transition;
            tms_saver_retire(saver, segment);
        }
    }
    retry_damaged(saver);
}

/* ---- captures and peers ---- */

tms_status_t tms_saver_capture_begin(tms_saver_t *saver, const tms_region_t *region, tms_error_t *error) {
    tms_error_context_t context = {.operation = "capture_begin", .device = TMS_NO_DEVICE};
    tms_status_t status = tms_saver_check_process(saver, &context, error);
    if (status != TMS_OK) return status;
    pthread_mutex_lock(&saver->lock);
    status = tms_capture_begin(&saver->capture, region, &context, error);
    pthread_mutex_unlock(&saver->lock);
    return status;
}

void tms_saver_capture_end(tms_saver_t *saver) {
    pthread_mutex_lock(&saver->lock);
    bool ended = tms_capture_end(&saver->capture);
    pthread_mutex_unlock(&saver->lock);
    if (ended && !tms_capture_visible(&saver->capture) && !atomic_load(&saver->forked)) tms_saver_reclaim(saver);
}

tms_status_t tms_saver_refresh_peers(tms_saver_t *saver, tms_error_t *error) {
    tms_error_context_t context = {.operation = "enable_peer_access", .device = TMS_NO_DEVICE};
    const tms_driver_table_t *driver = NULL;
    const tms_device_table_t *devices = NULL;
    tms_device_mask_t active = 0;
    tms_status_t status = tms_saver_check_process(saver, &context, error);
    if (status == TMS_OK) status = tms_devices_load(saver->devices, &driver, &devices, &context, error);
    if (status != TMS_OK || devices->count == 1) return status;
    status = tms_devices_active(saver->devices, &active, &context, error);
    if (status != TMS_OK) return status;

    pthread_mutex_lock(&saver->lock);
    bool grown = (active & ~saver->devices_in_use) != 0;
    for (tms_registry_node_t *node = grown ? saver->registry.first : NULL; node && status == TMS_OK; node = node->next) {
        tms_segment_t *segment = tms_segment_of(node);
        tms_device_mask_t peers = 0;
        if (segment->state != TMS_SEGMENT_ACTIVE) continue; /* a resume looks for itself */
        tms_error_context_t here = context_of(context.operation, segment);
        status = tms_devices_peers(saver->devices, segment->device, &peers, &here, error);
        if (status == TMS_OK) status = tms_segment_share(segment, driver, peers, &here, error);
    }
    if (status == TMS_OK) saver->devices_in_use = active;
    pthread_mutex_unlock(&saver->lock);
    return status;
}

void tms_saver_release(tms_saver_t *saver) {
    while (tms_capture_visible(&saver->capture)) tms_saver_capture_end(saver);
    while (saver->registry.first) (void)tms_saver_free(saver, saver->registry.first->begin, NULL);
    tms_saver_reclaim(saver);
    tms_disk_release(&saver->stores.disk);
    pthread_cond_destroy(&saver->turn);
    pthread_mutex_destroy(&saver->lock);
}
