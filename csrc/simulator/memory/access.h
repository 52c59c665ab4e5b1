/* Access to mapped memory, and messages about accesses that are refused. A thread checks and pins a mapping with the
 * simulator's lock held, touches the bytes without the lock, and unpins with it held. A refused access stores its address in
 * the thread's state. Owns sim_state.manager and sim_state.illegal_access. */
#ifndef TMS_SIM_MEMORY_ACCESS_H
#define TMS_SIM_MEMORY_ACCESS_H

#include "simulator/base/simulation.h"

/* Whether all devices of the mask may read (or write) the whole range. `kernel` is the context of a kernel, which needs
 * peer access to cudaMalloc memory of other devices. It is NULL for a copy, which does not. */
bool sim_memory_reachable(uint64_t address, uint64_t bytes, unsigned devices, bool writes, const sim_context_t *kernel);
/* Pins the mapping at an address, so that it stays mapped, and limits *bytes to the part that it contains. NULL if the
 * access is not allowed. Never waits. sim_state.unmapping must be false. */
sim_mapping_t *sim_memory_pin(uint64_t address, uint64_t *bytes, unsigned devices, bool writes, const sim_context_t *kernel);
void sim_memory_unpin(sim_mapping_t *mapping);
/* Reads 8 bytes for a kernel of the context. False if the access is not allowed. sim_state.unmapping must be false. */
bool sim_memory_read_word(const sim_context_t *context, uint64_t address, uint64_t *word);
/* Populates the pages of memory that is about to be touched, because one call is much faster than a fault per page. Needs
 * no lock. Has no effect on kernels without support. */
void sim_memory_populate(uint64_t address, uint64_t bytes, bool writes);

/* Describes the access of `what` to an address: the tag and the time of its pause, if sim_state.manager knows the address. A
 * text of SIM_ACCESS_BYTES. False if it does not; the text then only names the access. Called without the simulator's lock,
 * because the manager takes a lock of its own. */
bool sim_access_describe(const char *what, uint64_t address, char *text);
/* An access of a stream has failed: keeps the message for the text of the error. Called by a worker with the lock held,
 * which the function releases while it runs. `what` stays valid. */
void sim_access_fault(const char *what, uint64_t address);
/* The process ends: prints the message of the first such access on stderr, unless the program has read it. */
void sim_access_end(void);

#endif
