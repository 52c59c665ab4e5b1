/* Functions by their names, for programs that ask the runtime. */
#include "simulator/control/entries.h"
#include "simulator/simulator.h"

/* The driver's function of this name. *status, if wanted, says that there is none. */
CUresult sim_runtime_entry_point(const char *symbol, void **function, unsigned long long flags, int *status) {
    enum { FOUND, NOT_FOUND };
    if (!symbol || !function) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_entry_address(symbol, function, TMS_SIM_DRIVER_VERSION, flags, NULL);
    if (!status) return result;
    *status = result == CUDA_SUCCESS ? FOUND : NOT_FOUND;
    return CUDA_SUCCESS;
}

CUresult sim_runtime_entry_point_by_version(const char *symbol, void **function, unsigned int version,
                                            unsigned long long flags, int *status) {
    (void)version;
    return sim_runtime_entry_point(symbol, function, flags, status);
}
