/* Allocations are transactions: an allocation is complete and in the registry, or does not exist.
 *
 * Any thread, which may hold torch's allocator mutex and the GIL. Takes the saver's lock for the registry and counters
 * only. */
#ifndef TMS_ALLOCATION_H
#define TMS_ALLOCATION_H

#include "core/model/saver.h"

/* tms_api_t.allocate, with the given settings. An allocation takes slack of its kind (kinds.h) if some fits. One that finds
 * too little memory first reclaims deferred and quarantined memory (reclaim.h). */
tms_status_t tms_saver_allocate(tms_saver_t *saver, const tms_region_t *region, uint64_t bytes, int device,
                                uint64_t *address, tms_error_t *error);

#endif
