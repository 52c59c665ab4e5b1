/* Contexts: the primary one of each device, with the driver's reference counts, those of cuCtxCreate, and each thread's
 * stack of current ones. What ends a context is in contexts/lifetime.h. Owns sim_state.contexts. Called with the simulator's
 * lock held. */
#ifndef TMS_SIM_DEVICES_CONTEXT_H
#define TMS_SIM_DEVICES_CONTEXT_H

#include "simulator/base/state.h"

/* The context that a handle names, or NULL where there is none or it was destroyed. */
sim_context_t *sim_context_find(CUcontext handle);
/* The current context of the thread, or NULL where there is none or it was destroyed. */
sim_context_t *sim_context_current(void);
/* The same, with the errors of a call that needs it. */
CUresult sim_context_require(sim_context_t **context);
/* Makes a device's primary context, if need be, and references it once for the runtime. */
CUresult sim_context_retain_for_runtime(int device);
/* Makes a device's primary context current, be it of use or not. */
CUresult sim_context_select(int device);
/* The same for the runtime's current device, and it is current from now on, where no context was. */
CUresult sim_context_attach_runtime(void);
void sim_context_fail(sim_context_t *context, CUresult error); /* the first error stays */
void sim_context_clear(void);                                  /* forgets all handles, and frees what cuCtxCreate made */

#endif
