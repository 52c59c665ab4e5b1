#include "core/model/export.h"

#include "core/model/kinds.h"

/* Under the lock: makes the descriptor of a run. */
static tms_status_t export_run(tms_saver_t *saver, tms_run_t *run, const tms_error_context_t *context, tms_error_t *error) {
    const tms_driver_table_t *driver = atomic_load(&saver->devices->driver->table);
    const tms_device_table_t *devices = atomic_load(&saver->devices->table);
    int given = -1;
    if (!devices->device[run->device].exportable)
        return tms_error_set(error, TMS_INVALID_STATE, context,
                             "the driver cannot export this device's memory as a file descriptor. Send a copy of the tensor "
                             "in host memory instead (tensor.cpu())");
    tms_status_t status = TMS_DRIVER_CALL(driver, context, error, cuMemExportToShareableHandle, &given, run->handle,
                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (status == TMS_OK) status = tms_descriptors_adopt(&saver->descriptors, given, &run->exported, context, error);
    if (status == TMS_OK) run->generation = ++saver->exports;
    return status;
}

/* Under the lock: the export of a segment, which is made first if there is none. */
static tms_status_t find_export(tms_saver_t *saver, tms_segment_t *segment, tms_export_t *exported, tms_error_t *error) {
    tms_error_context_t context = tms_saver_context("share", segment);
    if (segment->state != TMS_SEGMENT_ACTIVE)
        return tms_error_set(error, TMS_INVALID_STATE, &context, "this memory is %s. Share it after its resume",
                             tms_segment_has_owner(segment)         ? "being paused, resumed or repaired"
                             : segment->state == TMS_SEGMENT_PAUSED ? "paused"
                                                                    : "damaged");
    tms_run_t *run = segment->run;
    tms_status_t status = run->exported.among ? TMS_OK : export_run(saver, run, &context, error);
    if (status != TMS_OK) return status;
    if (!tms_segment_is_of_program(segment)) tms_kind_of(segment->span)->sent = true;
    *exported = (tms_export_t){.address = run->begin,
                               .bytes = tms_run_bytes(run),
                               .generation = run->generation,
                               .device = run->device,
                               .descriptor = run->exported.number};
    return TMS_OK;
}

tms_status_t tms_export_memory(tms_saver_t *saver, uint64_t address, tms_export_t *exported, tms_error_t *error) {
    const tms_error_context_t context = {.operation = "share", .device = TMS_NO_DEVICE, .address = address};
    tms_status_t status = tms_saver_check_process(saver, &context, error);
    if (status != TMS_OK) return status;
    pthread_mutex_lock(&saver->lock);
    tms_registry_node_t *node = tms_registry_find(&saver->registry, address);
    status = node ? find_export(saver, tms_segment_of(node), exported, error)
                  : tms_error_set(error, TMS_NOT_MANAGED, &context, "it was not allocated in a region");
    pthread_mutex_unlock(&saver->lock);
    return status;
}
