/* What went wrong last, in words, for ncclGetLastError. Owns the text. Called with the simulator's lock held. */
#ifndef TMS_SIM_NCCL_ERROR_H
#define TMS_SIM_NCCL_ERROR_H

#include "simulator/nccl/types.h"

/* The function that this thread is in, which its errors begin with. */
void sim_nccl_set_call(const char *name);
/* Notes the text and returns the result. */
sim_nccl_result_t sim_nccl_fail(sim_nccl_result_t result, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The same for what is not of this thread's call: `text` is whole. */
void sim_nccl_set_error(const char *text);
sim_nccl_result_t sim_nccl_cuda_failed(CUresult error);
/* The last text of all threads, in memory of this thread. */
const char *sim_nccl_last_error(void);
const char *sim_nccl_describe(sim_nccl_result_t result);
/* Says once a name that it is not simulated. */
sim_nccl_result_t sim_nccl_refuse(const char *name);

#endif
