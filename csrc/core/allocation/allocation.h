/* Allocate and free, as transactions: an allocation is complete and in the registry, or does not exist.
 *
 * Any thread, which may hold torch's allocator mutex and the GIL. Takes the saver's lock for the registry and counters
 * only. */
#ifndef TMS_ALLOCATION_H
#define TMS_ALLOCATION_H

#include "core/saver.h"

/* tms_api_t.allocate and .free, with the given settings. An allocation takes slack of its kind (runs.h) if some fits. One
 * that finds too little memory first reclaims deferred
 * and quarantined memory (reclaim.h). A free of mapped memory waits for the devices (retire.h). A free of a segment in
 * transition is recorded, and the owner of the transition finishes it. */
tms_status_t tms_saver_allocate(tms_saver_t *saver, const tms_region_t *region, uint64_t bytes, int device,
                                uint64_t *address, tms_error_t *error);
tms_status_t tms_saver_free(tms_saver_t *saver, uint64_t address, tms_error_t *error);

#endif
