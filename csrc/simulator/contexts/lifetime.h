/* The ends of contexts, over the streams and the memory that go with them. Called with the simulator's lock held, which is
 * given up while work is waited for. */
#ifndef TMS_SIM_CONTEXTS_LIFETIME_H
#define TMS_SIM_CONTEXTS_LIFETIME_H

#include "simulator/base/state.h"

/* What was made in it goes; a primary context keeps its handle for its next life. */
void sim_context_destroy(sim_context_t *context);

#endif
