/* Memory of cudaMalloc shared with other processes. Called with the simulator's lock held. */
#ifndef TMS_SIM_CONTEXTS_IPC_MEMORY_H
#define TMS_SIM_CONTEXTS_IPC_MEMORY_H

#include "simulator/base/state.h"

/* Closes an import of this process, regardless of its open count. */
CUresult sim_ipc_close_import(sim_mapping_t *mapping);

#endif
