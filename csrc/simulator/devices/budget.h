/* How many bytes of each device are charged, to this process and to others that TMS_SIMULATED_SHARED names. Owns
 * sim_state.shared. Called with the simulator's lock held; between processes a robust mutex of its own guards the charges.
 */
#ifndef TMS_SIM_DEVICES_BUDGET_H
#define TMS_SIM_DEVICES_BUDGET_H

#include <stdbool.h>
#include <stdint.h>

/* Joins the processes of TMS_SIMULATED_SHARED, where it is set; says on stderr why it cannot. */
void sim_budget_attach(void);
void sim_budget_detach(void);
/* False where the bytes do not fit. `taken`: of no allocation, as tms_sim_take_memory says. */
bool sim_budget_charge(int device, uint64_t bytes, bool taken);
bool sim_budget_credit(int device, uint64_t bytes, bool taken); /* false: not that much was charged */
uint64_t sim_budget_available(int device);
uint64_t sim_budget_total(void);

#endif
