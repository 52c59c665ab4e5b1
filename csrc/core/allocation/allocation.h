/* Allocate and free, as transactions: an allocation is whole and in the registry, or it is not there.
 *
 * Any thread, which may hold torch's allocator mutex and the GIL. Takes the saver's lock for the books only. */
#ifndef TMS_ALLOCATION_H
#define TMS_ALLOCATION_H

#include "core/saver.h"

/* tms_api_t.allocate and .free, with the settings given. An allocation that finds too little memory has what waits to be
 * given back tried first (reclaim.h). A free of memory that is mapped waits for the devices (retire.h); of a segment in
 * transition it is noted, and the owner of the transition finishes it. */
tms_status_t tms_saver_allocate(tms_saver_t *saver, const tms_region_t *region, uint64_t bytes, int device,
                                uint64_t *address, tms_error_t *error);
tms_status_t tms_saver_free(tms_saver_t *saver, uint64_t address, tms_error_t *error);

#endif
