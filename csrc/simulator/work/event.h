/* Events: a position in a stream's queue, whether it was reached, and when. The event of another process has a piece of
 * shared memory, which is atomic. Owns sim_state.events. Called with the simulator's lock held. */
#ifndef TMS_SIM_WORK_EVENT_H
#define TMS_SIM_WORK_EVENT_H

#include "simulator/base/simulation.h"

sim_event_t *sim_event_new(unsigned flags); /* with one reference for the program; NULL if out of memory */
void sim_event_release(sim_event_t *event); /* drops one reference */
/* Marks record number `number` of an event as reached now. */
void sim_event_reach(sim_event_t *event, uint64_t number);
/* Stores the position of a new record of an event, and returns the record's number. */
uint64_t sim_event_note(sim_event_t *event, const sim_stream_t *stream, uint64_t position);
void sim_event_clear(void);

bool sim_event_share(sim_event_t *event); /* makes the event sharable; false if out of memory */
/* Attaches to another process's event. Takes ownership of `file` on success. */
bool sim_event_attach(sim_event_t *event, int file);
/* Whether another process made the last record; returns its number. */
bool sim_event_is_remote(const sim_event_t *event, uint64_t *number);
/* Whether the record with this number was reached, or its process has exited. */
bool sim_event_remote_reached(const sim_event_t *event, uint64_t number);

#endif
