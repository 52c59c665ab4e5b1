#include "core/segment.h"

uint64_t tms_segment_round(uint64_t bytes, size_t granularity) {
    uint64_t rest = bytes % granularity;
    if (rest == 0) return bytes;
    uint64_t missing = granularity - rest;
    return bytes > UINT64_MAX - missing ? 0 : bytes + missing;
}

static tms_status_t set_access(tms_segment_t *segment, const tms_driver_table_t *driver, tms_device_mask_t devices,
                               CUmemAccess_flags flags, const tms_error_context_t *context, tms_error_t *error) {
    CUmemAccessDesc access[TMS_MAX_DEVICES];
    size_t count = 0;
    for (int i = 0; i < TMS_MAX_DEVICES; i++) {
        if (!(devices >> i & 1)) continue;
        access[count++] = (CUmemAccessDesc){.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = i}, .flags = flags};
    }
    return TMS_DRIVER_CALL(driver, context, error, cuMemSetAccess, tms_segment_address(segment),
                           tms_segment_reserved(segment), access, count);
}

tms_status_t tms_segment_create(tms_segment_t *segment, const tms_driver_table_t *driver, const tms_device_table_t *devices,
                                const tms_error_context_t *context, tms_error_t *error) {
    const tms_device_t *device = &devices->device[segment->device];
    /* Neither costs anything where it is not used. */
    CUmemAllocationProp properties = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = device->exportable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = segment->device},
        .allocFlags = {.gpuDirectRDMACapable = device->rdma_capable},
    };
    tms_status_t status = TMS_DRIVER_CALL(driver, context, error, cuMemCreate, &segment->handle,
                                          tms_segment_reserved(segment), &properties, 0);
    if (status == TMS_OK) segment->has_handle = true;
    return status;
}

tms_status_t tms_segment_map(tms_segment_t *segment, const tms_driver_table_t *driver, tms_device_mask_t peers,
                             const tms_error_context_t *context, tms_error_t *error) {
    uint64_t size = tms_segment_reserved(segment);
    tms_device_mask_t accessible = peers | (tms_device_mask_t)1 << segment->device;
    tms_status_t status =
        TMS_DRIVER_CALL(driver, context, error, cuMemMap, tms_segment_address(segment), size, 0, segment->handle, 0);
    if (status != TMS_OK) goto undo;
    segment->mapped = true;
    status = set_access(segment, driver, accessible, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, context, error);
    if (status != TMS_OK) goto undo;
    segment->accessible = accessible;
    return TMS_OK;

undo:
    /* Reports the first failure. If undoing fails too, the segment's flags record what is left. */
    (void)tms_segment_depopulate(segment, tms_quiesced_never_handed_out(), driver, context, NULL);
    return status;
}

tms_status_t tms_segment_populate(tms_segment_t *segment, const tms_driver_table_t *driver,
                                  const tms_device_table_t *devices, tms_device_mask_t peers,
                                  const tms_error_context_t *context, tms_error_t *error) {
    tms_status_t status = tms_segment_create(segment, driver, devices, context, error);
    return status == TMS_OK ? tms_segment_map(segment, driver, peers, context, error) : status;
}

tms_status_t tms_segment_depopulate(tms_segment_t *segment, tms_quiesced_t quiesced, const tms_driver_table_t *driver,
                                    const tms_error_context_t *context, tms_error_t *error) {
    if (segment->mapped && !tms_quiesced_covers(quiesced, segment->accessible))
        return tms_error_set(error, TMS_INVALID_STATE, context, "a device with access has not been synchronized");
    tms_descriptor_close(&segment->exported); /* it would keep the memory */
    if (segment->mapped) {
        tms_status_t status =
            TMS_DRIVER_CALL(driver, context, error, cuMemUnmap, tms_segment_address(segment), tms_segment_reserved(segment));
        /* Releasing the handle of mapped memory would free nothing, and lose the only reference to it. */
        if (status != TMS_OK) return status;
        segment->mapped = false;
        segment->accessible = 0;
    }
    if (segment->has_handle) {
        tms_status_t status = TMS_DRIVER_CALL(driver, context, error, cuMemRelease, segment->handle);
        if (status != TMS_OK) return status;
        segment->has_handle = false;
    }
    return TMS_OK;
}

tms_status_t tms_segment_guard(tms_segment_t *segment, CUmemGenericAllocationHandle page, uint64_t page_bytes,
                               tms_device_mask_t devices, const tms_driver_table_t *driver,
                               const tms_error_context_t *context, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    const uint64_t reserved = tms_segment_reserved(segment);
    while (segment->guarded < reserved && status == TMS_OK) {
        CUdeviceptr address = tms_segment_address(segment) + segment->guarded;
        status = TMS_DRIVER_CALL(driver, context, error, cuMemMap, address, page_bytes, 0, page, 0);
        if (status == TMS_OK) segment->guarded += page_bytes;
    }
    if (status == TMS_OK) status = set_access(segment, driver, devices, CU_MEM_ACCESS_FLAGS_PROT_READ, context, error);
    if (status == TMS_OK)
        segment->accessible = devices;
    else /* no device has access yet; if undoing fails too, `guarded` records what is left */
        (void)tms_segment_unguard(segment, tms_quiesced_never_handed_out(), driver, context, NULL);
    return status;
}

tms_status_t tms_segment_unguard(tms_segment_t *segment, tms_quiesced_t quiesced, const tms_driver_table_t *driver,
                                 const tms_error_context_t *context, tms_error_t *error) {
    if (segment->guarded == 0) return TMS_OK;
    if (!tms_quiesced_covers(quiesced, segment->accessible))
        return tms_error_set(error, TMS_INVALID_STATE, context, "a device with access has not been synchronized");
    tms_status_t status =
        TMS_DRIVER_CALL(driver, context, error, cuMemUnmap, tms_segment_address(segment), segment->guarded);
    if (status != TMS_OK) return status;
    segment->guarded = 0;
    segment->accessible = 0;
    return TMS_OK;
}

tms_status_t tms_segment_share(tms_segment_t *segment, const tms_driver_table_t *driver, tms_device_mask_t peers,
                               const tms_error_context_t *context, tms_error_t *error) {
    tms_device_mask_t missing = peers & ~segment->accessible;
    if (!missing) return TMS_OK;
    tms_status_t status = set_access(segment, driver, missing, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, context, error);
    if (status == TMS_OK) segment->accessible |= missing;
    return status;
}
