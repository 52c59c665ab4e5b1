/* Events: a place in a stream's queue, reached or not, and when. Owns sim_state.events. Called with the simulator's lock
 * held. */
#ifndef TMS_SIM_WORK_EVENT_H
#define TMS_SIM_WORK_EVENT_H

#include "simulator/base/state.h"

sim_event_t *sim_event_new(unsigned flags); /* with one reference, the program's; NULL without memory */
void sim_event_release(sim_event_t *event); /* one reference */
/* The `number`th record of an event is reached now. */
void sim_event_reach(sim_event_t *event, uint64_t number);
/* Notes that a record of an event stands at this place of a stream, and numbers it. */
uint64_t sim_event_note(sim_event_t *event, const sim_stream_t *stream, uint64_t position);
void sim_event_clear(void);

#endif
