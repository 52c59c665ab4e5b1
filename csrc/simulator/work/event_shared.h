/* The shared part of an interprocess event. Called with the simulator's lock held; the shared memory itself is atomic. */
#ifndef TMS_SIM_WORK_EVENT_SHARED_H
#define TMS_SIM_WORK_EVENT_SHARED_H

#include "simulator/base/state.h"

bool sim_event_share(sim_event_t *event); /* makes the event sharable; false if out of memory */
bool sim_event_attach(sim_event_t *event,
                      int file); /* attaches to another process's event; takes ownership of `file` on success */
void sim_event_unshare(sim_event_t *event);
uint64_t sim_event_shared_record(sim_event_t *event); /* counts a record and returns its number */
void sim_event_shared_reach(sim_event_t *event, uint64_t number);
/* Whether another process made the last record; returns its number. */
bool sim_event_is_remote(const sim_event_t *event, uint64_t *number);
/* Whether that record was reached, or its process has exited. */
bool sim_event_remote_reached(const sim_event_t *event, uint64_t number);

#endif
