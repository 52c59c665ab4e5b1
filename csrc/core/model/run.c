#include "core/model/run.h"

#include <errno.h>
#include <stdlib.h>

/* ---- driver calls ---- */

tms_status_t tms_run_set_access(uint64_t begin, uint64_t bytes, const tms_driver_table_t *driver, tms_device_mask_t devices,
                                CUmemAccess_flags flags, const tms_error_context_t *context, tms_error_t *error) {
    CUmemAccessDesc access[TMS_MAX_DEVICES];
    size_t count = 0;
    for (int i = 0; i < TMS_MAX_DEVICES; i++) {
        if (!(devices >> i & 1)) continue;
        access[count++] = (CUmemAccessDesc){.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = i}, .flags = flags};
    }
    return TMS_DRIVER_CALL(driver, context, error, cuMemSetAccess, begin, bytes, access, count);
}

tms_status_t tms_run_create(tms_run_t *run, const tms_driver_table_t *driver, const tms_device_table_t *devices,
                            const tms_error_context_t *context, tms_error_t *error) {
    const tms_device_t *device = &devices->device[run->device];
    /* Neither property costs anything if it is not used. */
    CUmemAllocationProp properties = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = device->exportable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = run->device},
        .allocFlags = {.gpuDirectRDMACapable = device->rdma_capable},
    };
    tms_status_t status =
        TMS_DRIVER_CALL(driver, context, error, cuMemCreate, &run->handle, tms_run_bytes(run), &properties, 0);
    if (status == TMS_OK) run->has_handle = true;
    return status;
}

tms_status_t tms_run_map(tms_run_t *run, const tms_driver_table_t *driver, tms_device_mask_t peers,
                         const tms_error_context_t *context, tms_error_t *error) {
    const uint64_t size = tms_run_bytes(run);
    tms_device_mask_t accessible = peers | (tms_device_mask_t)1 << run->device;
    tms_error_t undoing;
    tms_status_t status = TMS_DRIVER_CALL(driver, context, error, cuMemMap, run->begin, size, 0, run->handle, 0);
    if (status != TMS_OK) goto undo;
    run->mapped = true;
    status = tms_run_set_access(run->begin, size, driver, accessible, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, context, error);
    if (status != TMS_OK) goto undo;
    run->accessible = accessible;
    return TMS_OK;

undo:
    /* Reports the first failure. If undoing fails too, the run's flags record what is left. */
    if (tms_run_depopulate(run, tms_quiesced_without_users(), driver, context, &undoing) != TMS_OK)
        tms_error_append_undoing(error, &undoing);
    return status;
}

tms_status_t tms_run_populate(tms_run_t *run, const tms_driver_table_t *driver, const tms_device_table_t *devices,
                              tms_device_mask_t peers, const tms_error_context_t *context, tms_error_t *error) {
    tms_status_t status = tms_run_create(run, driver, devices, context, error);
    return status == TMS_OK ? tms_run_map(run, driver, peers, context, error) : status;
}

tms_status_t tms_run_depopulate(tms_run_t *run, tms_quiesced_t quiesced, const tms_driver_table_t *driver,
                                const tms_error_context_t *context, tms_error_t *error) {
    if (run->mapped && !tms_quiesced_covers(quiesced, run->accessible))
        return tms_error_set(error, TMS_INVALID_STATE, context, "a device with access has not been synchronized");
    tms_descriptor_close(&run->exported); /* it would keep the memory */
    if (run->mapped) {
        tms_status_t status = TMS_DRIVER_CALL(driver, context, error, cuMemUnmap, run->begin, tms_run_bytes(run));
        /* Releasing the handle of mapped memory would free nothing, and lose the only reference to it. */
        if (status != TMS_OK) return status;
        run->mapped = false;
        run->accessible = 0;
    }
    if (run->has_handle) {
        tms_status_t status = TMS_DRIVER_CALL(driver, context, error, cuMemRelease, run->handle);
        if (status != TMS_OK) return status;
        run->has_handle = false;
    }
    return TMS_OK;
}

tms_status_t tms_run_share(tms_run_t *run, const tms_driver_table_t *driver, tms_device_mask_t peers,
                           const tms_error_context_t *context, tms_error_t *error) {
    tms_device_mask_t missing = peers & ~run->accessible;
    if (!missing) return TMS_OK;
    tms_status_t status = tms_run_set_access(run->begin, tms_run_bytes(run), driver, missing,
                                             CU_MEM_ACCESS_FLAGS_PROT_READWRITE, context, error);
    if (status == TMS_OK) run->accessible |= missing;
    return status;
}

/* ---- references ---- */

tms_run_t *tms_run_make(const tms_segment_t *first, const tms_segment_t *last) {
    tms_run_t *run = calloc(1, sizeof *run);
    if (!run) return NULL;
    run->begin = first->node.begin;
    run->end = last->node.end;
    run->device = first->device;
    run->tag = first->tag;
    run->first = first->span;
    return run;
}

void tms_run_attach(tms_run_t *run, tms_segment_t *segment) {
    segment->run = run;
    run->segments++;
}

tms_status_t tms_run_populate_own(tms_segment_t *segment, const tms_driver_table_t *driver,
                                  const tms_device_table_t *devices, tms_device_mask_t peers,
                                  const tms_error_context_t *context, tms_error_t *error) {
    if (!segment->run) {
        tms_run_t *run = tms_run_make(segment, segment);
        if (!run) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
        tms_run_attach(run, segment);
    }
    return tms_run_populate(segment->run, driver, devices, peers, context, error);
}

tms_run_t *tms_run_make_unplaced(tms_segment_t *segment, uint64_t bytes) {
    tms_run_t *run = calloc(1, sizeof *run);
    if (!run) return NULL;
    run->end = bytes;
    run->device = segment->device;
    run->tag = segment->tag;
    tms_run_attach(run, segment);
    return run;
}

bool tms_run_drop_reference(tms_segment_t *segment) {
    tms_run_t *run = segment->run;
    segment->run = NULL;
    return --run->segments == 0;
}

static void drop(tms_run_t *run) {
    if (--run->segments == 0) free(run);
}

void tms_run_detach(tms_segment_t *segment) {
    if (segment->run) drop(segment->run);
    segment->run = NULL;
}

/* ---- owners ---- */

void tms_run_own(tms_run_t *run, tms_run_t **list) {
    if (run->owned) return;
    run->owned = true;
    run->segments++; /* the owner's reference */
    run->next_in_call = *list;
    *list = run;
    if (run->first) tms_space_hold(run->first, run->end);
}

void tms_run_disown(tms_run_t *run, bool damaged, tms_segment_t **freed) {
    while (run->waiting) {
        tms_segment_t *segment = run->waiting;
        run->waiting = segment->next_in_transition;
        segment->next_in_transition = *freed;
        *freed = segment;
    }
    run->owned = run->releasing = run->taken_over = false;
    run->damaged = damaged;
    if (!damaged && run->first) tms_space_settle(run->first, run->end);
    drop(run);
}

bool tms_run_defer_to_owner(tms_segment_t *segment) {
    tms_run_t *run = segment->run;
    if (!run || !run->owned) return false;
    segment->next_in_transition = run->waiting;
    run->waiting = segment;
    return true;
}
