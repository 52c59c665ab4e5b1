#include "backup/host/copy.h"

/* One step of a copy: `bytes` between the device and the buffer, in parts that end with its chunks. `gathered`: it may be
 * queued together with others. */
typedef tms_status_t (*step_t)(tms_copier_t *copier, char *host, CUdeviceptr address, uint64_t bytes, bool gathered,
                               const tms_error_context_t *context, tms_error_t *error);

static tms_status_t step_to_host(tms_copier_t *copier, char *host, CUdeviceptr address, uint64_t bytes, bool gathered,
                                 const tms_error_context_t *context, tms_error_t *error) {
    return gathered ? tms_copier_part_to_host(copier, host, address, bytes, context, error)
                    : tms_copier_to_host(copier, host, address, bytes, context, error);
}

static tms_status_t step_to_device(tms_copier_t *copier, char *host, CUdeviceptr address, uint64_t bytes, bool gathered,
                                   const tms_error_context_t *context, tms_error_t *error) {
    return gathered ? tms_copier_part_to_device(copier, address, host, bytes, context, error)
                    : tms_copier_to_device(copier, address, host, bytes, context, error);
}

static tms_status_t copy_extents(tms_host_buffer_t *buffer, const tms_backup_content_t *content, step_t step,
                                 tms_copier_t *copier, CUdeviceptr address, const tms_error_context_t *context,
                                 tms_error_t *error) {
    tms_extent_t whole;
    size_t count;
    const tms_extent_t *extents = tms_backup_extents(content, &whole, &count);
    uint64_t usable_until = 0;
    bool gathered = false;
    tms_status_t status = TMS_OK;
    if (content->extents) status = tms_copier_begin_parts(copier, address, context, error);
    for (size_t i = 0; status == TMS_OK && i < count; i++) {
        for (uint64_t part, done = 0; done < extents[i].bytes; done += part) {
            uint64_t packed = extents[i].packed + done, run = usable_until - packed;
            if (packed >= usable_until) {
                status = tms_host_buffer_await(buffer, packed, copier->wait, &run, context, error);
                if (status != TMS_OK) return status;
                usable_until = packed + run;
                /* The behaviour with pageable memory is documented for single copies only. */
                gathered = content->extents && tms_host_buffer_is_pinned(buffer, packed);
            }
            part = extents[i].bytes - done < run ? extents[i].bytes - done : run;
            status = step(copier, (char *)buffer->memory + packed, address + extents[i].offset + done, part, gathered,
                          context, error);
            if (status != TMS_OK) return status;
        }
    }
    return status;
}

static void drop_held(void *buffer) { tms_host_buffer_drop(buffer); }

tms_status_t tms_host_copy_save(tms_host_buffer_t *buffer, const tms_backup_content_t *content, tms_copier_t *copier,
                                CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error) {
    tms_status_t status = tms_copier_hold(copier, buffer, drop_held, context, error);
    if (status != TMS_OK) return status;
    tms_host_buffer_acquire(buffer);
    return copy_extents(buffer, content, step_to_host, copier, address, context, error);
}

tms_status_t tms_host_copy_load(tms_host_buffer_t *buffer, const tms_backup_content_t *content, tms_copier_t *copier,
                                CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error) {
    return copy_extents(buffer, content, step_to_device, copier, address, context, error);
}
