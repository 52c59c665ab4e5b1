/* Destruction of contexts with their streams and memory. Called with the simulator's lock held; waits for work release
 * it. */
#ifndef TMS_SIM_CONTEXTS_LIFETIME_H
#define TMS_SIM_CONTEXTS_LIFETIME_H

#include "simulator/base/simulation.h"

/* Destroys everything that the context owns. A primary context keeps its handle for its next activation. */
void sim_context_destroy(sim_context_t *context);

#endif
