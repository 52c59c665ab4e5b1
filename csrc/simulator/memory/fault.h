/* Messages about accesses to device memory that is not mapped or not accessible. Owns sim_state.manager and sim_state.fault.
 */
#ifndef TMS_SIM_MEMORY_FAULT_H
#define TMS_SIM_MEMORY_FAULT_H

#include "simulator/base/state.h"

/* Describes the access of `what` to an address: the tag and the time of its pause, if sim_state.manager knows the address. A
 * text of SIM_ACCESS_BYTES. False if it does not; the text then only names the access. Called without the simulator's lock,
 * because the manager takes a lock of its own. */
bool sim_fault_describe(const char *what, uint64_t address, char *text);
/* An access of a stream has failed: prints the message, and keeps it for the text of the error. Called by a worker with the
 * lock held, which it releases meanwhile. `what` stays valid. */
void sim_fault_report(const char *what, uint64_t address);

#endif
