/* The start of the library in a process: its first call makes the one state and registers for fork and exit. Any thread, no
 * lock. */
#ifndef TMS_START_H
#define TMS_START_H

#include "abi/state.h"

/* The state, made if need be; NULL only if memory for it could not be had, with *error filled. After the first call one
 * atomic load. */
tms_state_t *tms_state(tms_error_t *error);

#endif
