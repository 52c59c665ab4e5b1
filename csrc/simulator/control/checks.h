/* The checks before a call of the driver, the runtime or NCCL. Called with the simulator's lock held. */
#ifndef TMS_SIM_CONTROL_CHECKS_H
#define TMS_SIM_CONTROL_CHECKS_H

#include <cuda.h>

/* Runs the checks of base/entry_list.h. Returns the error of the call, or CUDA_SUCCESS. */
CUresult sim_call_check(unsigned checks);

#endif
