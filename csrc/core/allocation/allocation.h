/* Allocations are transactions: an allocation is complete and in the registry, or does not exist.
 *
 * Any thread, which may hold torch's allocator mutex and the GIL. Takes the saver's lock for the registry and counters
 * only. */
#ifndef TMS_ALLOCATION_H
#define TMS_ALLOCATION_H

#include "core/model/saver.h"

/* tms_api_t.allocate, with the given settings. An allocation takes slack of its kind (kinds.h) if some fits. One that finds
 * too little memory first reclaims deferred and quarantined memory (reclaim.h). */
tms_status_t tms_allocation_create(tms_saver_t *saver, const tms_region_t *region, uint64_t bytes, int device,
                                   uint64_t *address, tms_error_t *error);

/* The steps of an allocation, which handles.c takes one by one. */

/* Loads the driver, finds the current device if the context has none, and checks the size. *reserved becomes the size in
 * whole granules. */
tms_status_t tms_allocation_prepare(tms_saver_t *saver, uint64_t bytes, const tms_driver_table_t **driver,
                                    const tms_device_table_t **devices, uint64_t *reserved, tms_error_context_t *context,
                                    tms_error_t *error);
/* TMS_OUT_OF_DEVICE_MEMORY if less than memory_margin_bytes would stay free, even after deferred and quarantined memory was
 * reclaimed. */
tms_status_t tms_allocation_check_margin(tms_saver_t *saver, uint64_t reserved, const tms_error_context_t *context,
                                         tms_error_t *error);
/* Makes a segment without addresses and memory. Returns NULL if host memory is short. */
tms_segment_t *tms_allocation_make_segment(const tms_region_t *region, uint64_t bytes, int device);
/* Under the lock: makes the segment ACTIVE. Another thread may pause or free it at once. */
void tms_allocation_publish(tms_saver_t *saver, tms_segment_t *segment);
/* Counts and records a failed allocation, and explains a lack of device memory. */
void tms_allocation_fail(tms_saver_t *saver, const tms_tag_t *tag, tms_status_t status, const tms_error_context_t *context,
                         tms_error_t *error);

#endif
