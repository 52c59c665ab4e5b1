/* Device memory that is not managed, for torch's pools outside regions. It is allocated with cuMemAlloc. Memory that the
 * driver fails to free is quarantined. Any thread; holds no lock. */
#ifndef TMS_ORDINARY_MEMORY_H
#define TMS_ORDINARY_MEMORY_H

#include "abi/state.h"

tms_status_t tms_ordinary_allocate(tms_state_t *state, uint64_t bytes, int device, uint64_t *address, tms_error_t *error);
/* `address` comes from tms_ordinary_allocate. A failure means that the memory waits in the quarantine. */
tms_status_t tms_ordinary_free(tms_state_t *state, uint64_t address, int device, tms_error_t *error);

#endif
