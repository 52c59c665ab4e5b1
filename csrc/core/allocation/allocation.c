#include "core/allocation/allocation.h"

#include <errno.h>
#include <stdlib.h>

#include "core/allocation/free.h"
#include "core/allocation/reclaim.h"
#include "core/model/inspect.h"
#include "core/model/kinds.h"
#include "core/model/peers.h"
#include "core/model/ranges.h"

/* ---- allocate ---- */

static const double mib = 1 << 20;

static tms_status_t check_size(const tms_device_table_t *devices, uint64_t bytes, uint64_t *reserved,
                               const tms_error_context_t *context, tms_error_t *error) {
    tms_status_t status = tms_devices_check(devices, context, error);
    if (status != TMS_OK) return status;
    const tms_device_t *device = &devices->device[context->device];
    if (device->granularity == 0)
        return tms_error_set(error, TMS_DRIVER_UNAVAILABLE, context,
                             "this device has no virtual memory management (cuMemCreate)");
    uint64_t rounded = tms_segment_round(bytes, device->granularity);
    if (rounded == 0 || rounded > device->total_bytes)
        return tms_error_set(error, TMS_OUT_OF_DEVICE_MEMORY, context, "the device has %.1f MiB in total",
                             (double)device->total_bytes / mib);
    *reserved = rounded;
    return TMS_OK;
}

static tms_status_t compare_with_margin(tms_saver_t *saver, uint64_t reserved, uint64_t margin,
                                        const tms_error_context_t *context, tms_error_t *error) {
    uint64_t free_bytes = 0, total_bytes = 0;
    tms_status_t status = tms_devices_memory(saver->devices, context->device, &free_bytes, &total_bytes, context, error);
    if (status == TMS_OK && (free_bytes < reserved || free_bytes - reserved < margin))
        status = tms_error_set(error, TMS_OUT_OF_DEVICE_MEMORY, context,
                               "%.1f MiB are free, and memory_margin_bytes keeps %.1f MiB of the device free",
                               (double)free_bytes / mib, (double)margin / mib);
    return status;
}

tms_status_t tms_allocation_check_margin(tms_saver_t *saver, uint64_t reserved, const tms_error_context_t *context,
                                         tms_error_t *error) {
    const uint64_t margin = atomic_load(&saver->memory_margin_bytes);
    if (margin == 0) return TMS_OK;
    tms_status_t status = compare_with_margin(saver, reserved, margin, context, error);
    if (status != TMS_OUT_OF_DEVICE_MEMORY || !tms_reclaim_is_needed(saver)) return status;
    tms_reclaim_all(saver);
    return compare_with_margin(saver, reserved, margin, context, error);
}

tms_segment_t *tms_allocation_make_segment(const tms_region_t *region, uint64_t bytes, int device) {
    tms_segment_t *segment = calloc(1, sizeof *segment);
    if (!segment) return NULL;
    segment->bytes = bytes;
    segment->device = device;
    segment->tag = region->tag;
    segment->own_handle = region->own_handles;
    segment->backup = (tms_backup_t){.kind = region->backup, .policy = region->host_policy, .bytes = bytes};
    return segment;
}

/* Gives a segment a run of its own with memory. On failure it has no memory, except for memory whose release failed. */
static tms_status_t populate(tms_saver_t *saver, tms_segment_t *segment, const tms_driver_table_t *driver,
                             const tms_device_table_t *devices, const tms_error_context_t *context, tms_error_t *error) {
    tms_device_mask_t peers = 0;
    tms_status_t status = tms_devices_peers(saver->devices, segment->device, &peers, context, error);
    return status == TMS_OK ? tms_run_populate_own(segment, driver, devices, peers, context, error) : status;
}

void tms_allocation_publish(tms_saver_t *saver, tms_segment_t *segment) {
    atomic_store_explicit(&segment->tag->used, true, memory_order_relaxed);
    tms_stats_add(&saver->stats.allocations_total, 1);
    tms_registry_insert(&saver->registry, &segment->node);
    tms_account_publish(&saver->account, segment);
    tms_shared_page_publish(&saver->shared_page);
}

/* Makes an allocation from the slack of its kind, without a driver call. Returns false if no slack fits. */
static bool reuse_slack(tms_saver_t *saver, const tms_region_t *region, uint64_t bytes, uint64_t reserved, int device,
                        uint64_t *address) {
    bool reused = false;
    if (region->own_handles || tms_stats_read(&saver->account.slack[device]) < reserved) return false;
    tms_segment_t *segment = tms_allocation_make_segment(region, bytes, device);
    if (!segment) return false;
    pthread_mutex_lock(&saver->lock);
    tms_kind_t *kind = tms_kinds_find(region->tag->kinds, region->backup, region->host_policy, device);
    if (kind && tms_kind_take_slack(saver, kind, segment, reserved)) {
        *address = tms_segment_address(segment);
        tms_allocation_publish(saver, segment);
        tms_peers_note_reused(saver, segment->run);
        reused = true;
    }
    pthread_mutex_unlock(&saver->lock);
    if (!reused) free(segment);
    return reused;
}

/* Creates a segment with memory, not published yet. After a failure nothing is left except quarantined resources. */
static tms_status_t make_segment(tms_saver_t *saver, const tms_region_t *region, uint64_t bytes, uint64_t reserved,
                                 const tms_driver_table_t *driver, const tms_device_table_t *devices, tms_segment_t **made,
                                 const tms_error_context_t *context, tms_error_t *error) {
    tms_segment_t *segment = tms_allocation_make_segment(region, bytes, context->device);
    if (!segment) {
        tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
        return TMS_OUT_OF_HOST_MEMORY;
    }
    tms_status_t status = tms_ranges_take(saver, segment, reserved, driver, context, error);
    if (status != TMS_OK) {
        free(segment);
        return status;
    }
    status = populate(saver, segment, driver, devices, context, error);
    if (status == TMS_OUT_OF_DEVICE_MEMORY && !tms_segment_has_memory(segment) && tms_reclaim_is_needed(saver)) {
        tms_reclaim_all(saver);
        status = populate(saver, segment, driver, devices, context, error);
    }
    if (status != TMS_OK) {
        (void)tms_free_release_segment(saver, segment, tms_quiesced_without_users());
        return status;
    }
    *made = segment;
    return TMS_OK;
}

/* Makes an allocation with memory of its own. */
static tms_status_t allocate_new(tms_saver_t *saver, const tms_region_t *region, uint64_t bytes, uint64_t reserved,
                                 const tms_driver_table_t *driver, const tms_device_table_t *devices, uint64_t *address,
                                 const tms_error_context_t *context, tms_error_t *error) {
    tms_segment_t *segment = NULL;
    tms_status_t status = tms_allocation_check_margin(saver, reserved, context, error);
    if (status != TMS_OK) return status;
    const tms_device_mask_t seen = tms_peers_seen(saver);
    status = make_segment(saver, region, bytes, reserved, driver, devices, &segment, context, error);
    if (status != TMS_OK) return status;
    *address = tms_segment_address(segment); /* before publishing: another thread may free it afterwards */
    pthread_mutex_lock(&saver->lock);
    tms_allocation_publish(saver, segment);
    (void)tms_peers_note_skipped(saver, seen); /* the scan comes next */
    pthread_mutex_unlock(&saver->lock);
    return TMS_OK;
}

static void note_failure(tms_saver_t *saver, const tms_tag_t *tag, tms_status_t status, const tms_error_context_t *context,
                         const tms_error_t *error) {
    tms_stats_add(&saver->stats.failed_allocations, 1);
    tms_events_record(&saver->events, (tms_event_t){.kind = TMS_EVENT_ALLOCATE,
                                                    .status = status,
                                                    .driver_result = error ? error->driver_result : 0,
                                                    .bytes = context->bytes,
                                                    .tag = context->tag,
                                                    .device = context->device});
    if (!tms_shared_page_is_open(&saver->shared_page)) return;
    pthread_mutex_lock(&saver->lock);
    tms_shared_page_fail_allocation(&saver->shared_page, tms_shared_page_row(&saver->shared_page, tag, context->device));
    tms_shared_page_publish(&saver->shared_page);
    pthread_mutex_unlock(&saver->lock);
}

void tms_allocation_fail(tms_saver_t *saver, const tms_tag_t *tag, tms_status_t status, const tms_error_context_t *context,
                         tms_error_t *error) {
    note_failure(saver, tag, status, context, error);
    if (status == TMS_OUT_OF_DEVICE_MEMORY) tms_kinds_explain_slack(saver, context->device, error);
}

tms_status_t tms_allocation_prepare(tms_saver_t *saver, uint64_t bytes, const tms_driver_table_t **driver,
                                    const tms_device_table_t **devices, uint64_t *reserved, tms_error_context_t *context,
                                    tms_error_t *error) {
    tms_status_t status = tms_devices_load(saver->devices, driver, devices, context, error);
    if (status != TMS_OK) return status;
    tms_account_open_page(&saver->account, saver->log, *driver, *devices);
    if (context->device == TMS_NO_DEVICE) status = tms_devices_current(saver->devices, &context->device, context, error);
    return status == TMS_OK ? check_size(*devices, bytes, reserved, context, error) : status;
}

tms_status_t tms_allocation_create(tms_saver_t *saver, const tms_region_t *region, uint64_t bytes, int device,
                                   uint64_t *address, tms_error_t *error) {
    tms_error_context_t context = {.operation = "allocate", .device = device, .bytes = bytes, .tag = region->tag->name};
    const tms_driver_table_t *driver = NULL;
    const tms_device_table_t *devices = NULL;
    uint64_t reserved = 0;

    tms_status_t status = tms_saver_check_process(saver, &context, error);
    if (status == TMS_OK) status = tms_saver_check_settings(saver, error);
    if (status == TMS_OK && bytes == 0) {
        *address = 0; /* like cudaMalloc */
        return TMS_OK;
    }
    if (status == TMS_OK) status = tms_allocation_prepare(saver, bytes, &driver, &devices, &reserved, &context, error);
    if (status == TMS_OK && !reuse_slack(saver, region, bytes, reserved, context.device, address))
        status = allocate_new(saver, region, bytes, reserved, driver, devices, address, &context, error);
    if (status != TMS_OK) {
        tms_allocation_fail(saver, region->tag, status, &context, error);
        return tms_inspect_explain_loss(saver, status, error);
    }
    /* Devices that came into use since the last scan get access to earlier allocations, and to slack that was reused. */
    if (devices->count > 1) tms_peers_refresh_after_allocation(saver);
    return TMS_OK;
}
