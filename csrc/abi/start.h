/* The start of the library in a process: the first call creates the one state and registers the handlers for fork and exit.
 * Any thread, no lock. */
#ifndef TMS_START_H
#define TMS_START_H

#include "abi/state.h"

/* The state, created at the first call. NULL, with *error filled, only if memory is short. Later calls cost one atomic
 * load. */
tms_state_t *tms_state(tms_error_t *error);

#endif
