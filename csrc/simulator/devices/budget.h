/* Accounting of device memory: charges of this process and of those that share its TMS_SIMULATED_SHARED name. Owns
 * sim_state.shared. Called with the simulator's lock held; a robust mutex guards the shared charges. */
#ifndef TMS_SIM_DEVICES_BUDGET_H
#define TMS_SIM_DEVICES_BUDGET_H

#include <stdbool.h>
#include <stdint.h>

/* Joins the processes of TMS_SIMULATED_SHARED, if set. An error is reported on stderr. */
void sim_budget_attach(void);
void sim_budget_detach(void);
/* Charges bytes; false if they exceed the budget. `taken`: for tms_sim_take_memory. */
bool sim_budget_charge(int device, uint64_t bytes, bool taken);
bool sim_budget_credit(int device, uint64_t bytes, bool taken); /* false if less was charged */
/* Adds to the number of contexts of this process on a device. */
void sim_budget_count_context(int device, int change);
uint64_t sim_budget_available(int device);
uint64_t sim_budget_total(void);

/* A process that has a context or memory on a device. */
typedef struct sim_budget_process {
    int pid;
    uint64_t bytes; /* without bytes that tms_sim_take_memory took */
} sim_budget_process_t;
enum { SIM_BUDGET_PROCESSES = 64 }; /* at most */

/* Lists the processes with a context or memory on a device of the machine: the processes that share the name, or only this
 * process if the name is empty. Takes the simulator's lock, and works before the initialisation. Writes SIM_BUDGET_PROCESSES
 * rows at most and returns their number. */
unsigned sim_budget_processes(const char *shared_name, int machine_index, sim_budget_process_t *rows);

#endif
