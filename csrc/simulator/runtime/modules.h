/* Modules that the program has loaded. Owns sim_state.modules. Called with the simulator's lock held. */
#ifndef TMS_SIM_RUNTIME_MODULES_H
#define TMS_SIM_RUNTIME_MODULES_H

/* Forgets all modules. The memory of their globals is cleared with all other memory. */
void sim_module_clear(void);

#endif
