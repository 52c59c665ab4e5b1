/* What processes that share an event see of it. Called with the simulator's lock held; what the processes share is atomic.
 */
#ifndef TMS_SIM_WORK_EVENT_SHARED_H
#define TMS_SIM_WORK_EVENT_SHARED_H

#include "simulator/base/state.h"

bool sim_event_share(sim_event_t *event);            /* from now on; false without memory */
bool sim_event_attach(sim_event_t *event, int file); /* to the file of another process's, which it owns from now on */
void sim_event_unshare(sim_event_t *event);
uint64_t sim_event_shared_record(sim_event_t *event); /* its number */
void sim_event_shared_reach(sim_event_t *event, uint64_t number);
/* Whether the last record was another process's; its number then. */
bool sim_event_is_remote(const sim_event_t *event, uint64_t *number);
/* Whether that record was reached, or the process that recorded it is dead. */
bool sim_event_remote_reached(const sim_event_t *event, uint64_t number);

#endif
