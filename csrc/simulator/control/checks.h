/* What is checked before a call, whoever exports it. Called with the simulator's lock held. */
#ifndef TMS_SIM_CONTROL_CHECKS_H
#define TMS_SIM_CONTROL_CHECKS_H

#include <cuda.h>

/* The checks of base/entry_list.h. What the call fails with, or CUDA_SUCCESS. */
CUresult sim_call_check(unsigned checks);

#endif
