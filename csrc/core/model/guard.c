#include "core/model/guard.h"

#include <stddef.h>

tms_segment_t *tms_guard_hold(tms_guard_t *guard, int device) {
    if (guard->by_device[device].page) guard->by_device[device].references++;
    return guard->by_device[device].page;
}

void tms_guard_install(tms_guard_t *guard, tms_segment_t *page) {
    guard->by_device[page->device].page = page;
    guard->by_device[page->device].references = 1;
}

tms_segment_t *tms_guard_drop(tms_guard_t *guard, int device) {
    tms_segment_t *page = guard->by_device[device].page;
    if (--guard->by_device[device].references > 0) return NULL;
    guard->by_device[device].page = NULL;
    return page;
}

/* ---- driver calls ---- */

tms_status_t tms_guard_map(tms_segment_t *segment, CUmemGenericAllocationHandle page, uint64_t page_bytes,
                           tms_device_mask_t devices, const tms_driver_table_t *driver, const tms_error_context_t *context,
                           tms_error_t *error) {
    tms_status_t status = TMS_OK;
    tms_error_t undoing;
    const uint64_t reserved = tms_segment_reserved(segment);
    while (segment->guarded < reserved && status == TMS_OK) {
        CUdeviceptr address = tms_segment_address(segment) + segment->guarded;
        status = TMS_DRIVER_CALL(driver, context, error, cuMemMap, address, page_bytes, 0, page, 0);
        if (status == TMS_OK) segment->guarded += page_bytes;
    }
    if (status == TMS_OK)
        status = tms_run_set_access(tms_segment_address(segment), reserved, driver, devices, CU_MEM_ACCESS_FLAGS_PROT_READ,
                                    context, error);
    if (status == TMS_OK) {
        segment->readers = devices;
        return TMS_OK;
    }
    /* No device has access yet. If undoing fails too, `guarded` records what is left. */
    if (tms_guard_unmap(segment, tms_quiesced_without_users(), driver, context, &undoing) != TMS_OK)
        tms_error_append_undoing(error, &undoing);
    return status;
}

tms_status_t tms_guard_unmap(tms_segment_t *segment, tms_quiesced_t quiesced, const tms_driver_table_t *driver,
                             const tms_error_context_t *context, tms_error_t *error) {
    if (segment->guarded == 0) return TMS_OK;
    if (!tms_quiesced_covers(quiesced, segment->readers))
        return tms_error_set(error, TMS_INVALID_STATE, context, "a device with access has not been synchronized");
    tms_status_t status =
        TMS_DRIVER_CALL(driver, context, error, cuMemUnmap, tms_segment_address(segment), segment->guarded);
    if (status != TMS_OK) return status;
    segment->guarded = 0;
    segment->readers = 0;
    return TMS_OK;
}
