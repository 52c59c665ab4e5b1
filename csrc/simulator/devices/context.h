/* Contexts: each device's primary context with its reference count, contexts of cuCtxCreate, and each thread's context
 * stack. contexts/lifetime.h destroys contexts. Owns sim_state.contexts. Called with the simulator's lock held. */
#ifndef TMS_SIM_DEVICES_CONTEXT_H
#define TMS_SIM_DEVICES_CONTEXT_H

#include "simulator/base/simulation.h"

/* Returns the context of a handle, or NULL if it is unknown or destroyed. */
sim_context_t *sim_context_find(CUcontext handle);
/* Returns the thread's current context, or NULL if there is none or it was destroyed. */
sim_context_t *sim_context_current(void);
/* Gets the thread's current context, or returns the error of a call that needs one. */
CUresult sim_context_require(sim_context_t **context);
/* Retains a device's primary context once for the runtime, and creates it if necessary. */
CUresult sim_context_retain_for_runtime(int device);
/* Makes a device's primary context current, active or not. */
CUresult sim_context_select(int device);
/* Retains the primary context of the runtime's current device, and makes it current if no context is. */
CUresult sim_context_attach_runtime(void);
void sim_context_fail(sim_context_t *context, CUresult error); /* keeps the first error */
void sim_context_clear(void);                                  /* drops all handles and frees the contexts of cuCtxCreate */

#endif
