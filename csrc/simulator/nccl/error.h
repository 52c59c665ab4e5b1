/* The text of the last error, which ncclGetLastError returns. Owns the text. Called with the simulator's lock held. */
#ifndef TMS_SIM_NCCL_ERROR_H
#define TMS_SIM_NCCL_ERROR_H

#include "simulator/nccl/types.h"

/* Sets the name of the thread's current NCCL function, which prefixes its errors. */
void sim_nccl_set_call(const char *name);
/* Stores the text and returns the result. */
sim_nccl_result_t sim_nccl_fail(sim_nccl_result_t result, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Stores a complete text, for an error outside the thread's current call. */
void sim_nccl_set_error(const char *text);
sim_nccl_result_t sim_nccl_cuda_failed(CUresult error);
/* The last error of any thread, copied to memory of the calling thread. */
const char *sim_nccl_last_error(void);
const char *sim_nccl_describe(sim_nccl_result_t result);
/* Fails a function that is not simulated. The first call per name is reported on stderr. */
sim_nccl_result_t sim_nccl_refuse(const char *name);

#endif
