#include "saver.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "transition.h"

tms_status_t tms_saver_init(tms_saver_t *saver, const tms_config_t *config, const tms_log_t *log, tms_devices_t *devices,
                            tms_region_defaults_t *regions, tms_error_t *error) {
    const tms_error_context_t context = {.operation = "start", .device = TMS_NO_DEVICE};
    *saver = (tms_saver_t){.config = config, .log = log, .devices = devices, .regions = regions};
    saver->stores.devices = devices;
    saver->stores.log = log;
    saver->stores.quarantine = &saver->quarantine;
    saver->stores.copy_chunk_bytes = TMS_COPY_CHUNK_BYTES;
    saver->stores.chunk_bytes = config->disk_backup_chunk_bytes;
    tms_status_t status = tms_quarantine_init(&saver->quarantine, error);
    if (status != TMS_OK) return status;
    status = tms_disk_init(&saver->stores.disk, config->disk_backup_directory, log, &saver->stores.disk_bytes, error);
    if (status != TMS_OK) goto release_quarantine;
    saver->stores.disk.quarantine = &saver->quarantine;
    status = tms_host_store_init(&saver->stores.host, devices, log, &saver->quarantine, config->host_memory_limit_bytes,
                                 config->host_pool_limit_bytes, error);
    if (status != TMS_OK) goto release_disk;
    saver->stores.disk.host = &saver->stores.host;
    status = tms_device_locks_init(&saver->device_locks, config, devices, error);
    if (status != TMS_OK) goto release_host;
    if (pthread_mutex_init(&saver->lock, NULL) != 0) {
        status = tms_error_set_os(error, &context, "pthread_mutex_init", ENOMEM, NULL);
        goto destroy_device_locks;
    }
    tms_wait_condition_init(&saver->turn);
    tms_pendings_init(&saver->pendings);
    tms_registry_init(&saver->registry);
    tms_registry_init(&saver->aside);
    tms_capture_init(&saver->capture);
    saver->callback_patience_seconds = TMS_CALLBACK_PATIENCE_SECONDS;
    atomic_init(&saver->host_policy, config->retain_cpu_backup ? TMS_HOST_RETAIN : config->host_policy);
    return TMS_OK;

destroy_device_locks:
    tms_device_locks_destroy(&saver->device_locks);
release_host:
    tms_host_store_release(&saver->stores.host);
release_disk:
    tms_disk_release(&saver->stores.disk);
release_quarantine:
    tms_quarantine_release(&saver->quarantine);
    return status;
}

tms_status_t tms_saver_check_process(tms_saver_t *saver, const tms_error_context_t *context, tms_error_t *error) {
    if (!atomic_load(&saver->forked)) return TMS_OK;
    return tms_error_set(error, TMS_FORKED, context, "start workers with the spawn or forkserver method instead");
}

tms_status_t tms_saver_check_settings(const tms_saver_t *saver, tms_error_t *error) {
    const tms_error_t *malformed = &saver->config->malformed;
    if (malformed->status != TMS_OK && error) *error = *malformed;
    return malformed->status;
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

tms_host_policy_t tms_saver_host_policy(const tms_saver_t *saver, tms_host_policy_t policy) {
    if (policy != TMS_HOST_DEFAULT) return policy;
    return (tms_host_policy_t)atomic_load(&((tms_saver_t *)saver)->host_policy);
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
        tms_log_recurring(saver->log, TMS_LOG_NO_PEER_ACCESS, TMS_LOG_WARNING, reason, "");
}

tms_error_context_t tms_saver_context(const char *operation, const tms_segment_t *segment) {
    return (tms_error_context_t){.operation = operation,
                                 .device = segment->device,
                                 .bytes = tms_segment_reserved(segment),
                                 .address = tms_segment_address(segment),
                                 .tag = segment->tag->name};
}

/* ---- allocate ---- */

static tms_status_t check_size(tms_saver_t *saver, const tms_device_table_t *devices, uint64_t bytes, uint64_t *reserved,
                               const tms_error_context_t *context, tms_error_t *error) {
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
        uint64_t free_bytes = 0, total_bytes = 0;
        tms_status_t status = tms_devices_memory(saver->devices, context->device, &free_bytes, &total_bytes, context, error);
        if (status != TMS_OK) return status;
        if (free_bytes < rounded || free_bytes - rounded < margin)
            return tms_error_set(error, TMS_OUT_OF_DEVICE_MEMORY, context,
                                 "%llu bytes are free, and memory_margin_bytes keeps %llu of them",
                                 (unsigned long long)free_bytes, (unsigned long long)margin);
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

/* `seen`: the devices that looks for peers had seen when the segment was not made yet. */
static void publish(tms_saver_t *saver, tms_segment_t *segment, tms_device_mask_t seen) {
    segment->state = TMS_SEGMENT_ACTIVE;
    atomic_store_explicit(&segment->tag->used, true, memory_order_relaxed);
    pthread_mutex_lock(&saver->lock);
    /* Under the lock: from here on another thread may pause or free it, and take these away again. */
    tms_stats_add(&saver->stats.allocations_total, 1);
    tms_stats_add(&saver->stats.resident_bytes, tms_segment_reserved(segment));
    tms_registry_insert(&saver->registry, &segment->node);
    (void)tms_peers_note_passed_over(saver, seen); /* allocate looks next */
    pthread_mutex_unlock(&saver->lock);
}

/* A segment with memory, not yet published. On failure nothing is left but what the driver refused to take back, in
 * quarantine. */
static tms_status_t make_segment(tms_saver_t *saver, const tms_region_t *region, uint64_t bytes, uint64_t reserved,
                                 const tms_driver_table_t *driver, const tms_device_table_t *devices, tms_segment_t **made,
                                 const tms_error_context_t *context, tms_error_t *error) {
    tms_segment_t *segment = calloc(1, sizeof *segment);
    if (!segment) {
        tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
        return TMS_OUT_OF_HOST_MEMORY;
    }
    segment->bytes = bytes;
    segment->device = context->device;
    segment->tag = (tms_tag_t *)region->tag;
    segment->backup = (tms_backup_t){.kind = region->backup, .policy = region->host_policy, .bytes = bytes};
    tms_status_t status = tms_segment_reserve(segment, driver, reserved, context, error);
    if (status != TMS_OK) {
        free(segment);
        return status;
    }
    status = tms_saver_claim_range(saver, segment, context, error);
    if (status != TMS_OK) {
        free(segment); /* and not the range, which is somebody else's */
        return status;
    }
    status = populate(saver, segment, driver, devices, context, error);
    if (status == TMS_OUT_OF_DEVICE_MEMORY && !segment->mapped && !segment->has_handle && tms_saver_has_reclaimable(saver)) {
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
    tms_device_mask_t seen = 0;
    uint64_t reserved = 0;

    tms_status_t status = tms_saver_check_process(saver, &context, error);
    if (status == TMS_OK) status = tms_saver_check_settings(saver, error);
    if (status == TMS_OK && bytes == 0) {
        *address = 0; /* as cudaMalloc has it */
        return TMS_OK;
    }
    if (status == TMS_OK) status = tms_devices_load(saver->devices, &driver, &devices, &context, error);
    if (status == TMS_OK && device == TMS_NO_DEVICE)
        status = tms_devices_current(saver->devices, &context.device, &context, error);
    if (status == TMS_OK) status = check_size(saver, devices, bytes, &reserved, &context, error);
    if (status == TMS_OK) {
        seen = tms_peers_seen(saver);
        status = make_segment(saver, region, bytes, reserved, driver, devices, &segment, &context, error);
    }
    if (status != TMS_OK) {
        tms_stats_add(&saver->stats.failures_total, 1);
        return tms_saver_explain_loss(saver, status, error);
    }
    *address = tms_segment_address(segment); /* before publishing: from then on another thread may free it */
    publish(saver, segment, seen);
    /* A device that came into use since the last look also wants what was allocated before it did. */
    if (devices->count > 1) tms_peers_refresh_after_allocation(saver);
    return TMS_OK;
}

/* ---- free ---- */

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
    if (segment) context = tms_saver_context("free", segment);
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
    if (retired) tms_saver_retire(saver, retired, NULL);
    return TMS_OK;
}

/* ---- the end ---- */

void tms_saver_release(tms_saver_t *saver) {
    tms_pendings_close(&saver->pendings, INFINITY);
    while (tms_saver_capture_end(saver, 0)) continue;
    while (saver->registry.first) (void)tms_saver_free(saver, saver->registry.first->begin, NULL);
    tms_saver_reclaim(saver);
    tms_device_locks_destroy(&saver->device_locks);
    tms_host_store_release(&saver->stores.host);
    tms_quarantine_release(&saver->quarantine); /* which may hold what the next one lets go */
    tms_disk_release(&saver->stores.disk);
    pthread_cond_destroy(&saver->pendings.ended);
    pthread_mutex_destroy(&saver->pendings.lock);
    pthread_cond_destroy(&saver->turn);
    pthread_mutex_destroy(&saver->lock);
}
