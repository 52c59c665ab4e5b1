/* Copies between a segment and a buffer of the host store. The buffer belongs to a batch that was started, or its batch has
 * ended. Used by the thread of the copier; no lock held. */
#ifndef TMS_HOST_COPY_H
#define TMS_HOST_COPY_H

#include "backup/content.h"
#include "backup/host/batch.h"
#include "device/copier.h"

/* Begin to copy `content`, whose extents say where in the buffer (`packed`) they lie, from or to the segment at `address`.
 * The copies are complete once the copier has waited. The copier keeps a reference to a buffer that it writes to. */
tms_status_t tms_host_copy_save(tms_host_buffer_t *buffer, const tms_backup_content_t *content, tms_copier_t *copier,
                                CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_host_copy_load(tms_host_buffer_t *buffer, const tms_backup_content_t *content, tms_copier_t *copier,
                                CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error);

#endif
