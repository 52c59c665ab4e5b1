/* Functions that programs look up but that cannot be simulated. Each call fails; the first is reported on stderr. */
#include <stdio.h>

#include "simulator/base/simulation.h"
#include "simulator/control/entries.h"

typedef enum unsupported { MULTICAST_CREATE, MULTICAST_ADD, MULTICAST_BIND, MULTICAST_UNBIND } unsupported_t;

static CUresult refuse(unsupported_t which, const char *name) {
    if (!(sim_state.unsupported >> which & 1)) fprintf(stderr, "simulated GPU: %s is not simulated and fails\n", name);
    sim_state.unsupported |= 1U << which;
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult sim_multicast_create(CUmemGenericAllocationHandle *handle, const struct CUmulticastObjectProp_st *properties) {
    (void)handle, (void)properties;
    return refuse(MULTICAST_CREATE, "cuMulticastCreate");
}

CUresult sim_multicast_add(CUmemGenericAllocationHandle handle, CUdevice device) {
    (void)handle, (void)device;
    return refuse(MULTICAST_ADD, "cuMulticastAddDevice");
}

CUresult sim_multicast_bind(CUmemGenericAllocationHandle handle, size_t at, CUmemGenericAllocationHandle memory,
                            size_t offset, size_t bytes, unsigned long long flags) {
    (void)handle, (void)at, (void)memory, (void)offset, (void)bytes, (void)flags;
    return refuse(MULTICAST_BIND, "cuMulticastBindMem");
}

CUresult sim_multicast_unbind(CUmemGenericAllocationHandle handle, CUdevice device, size_t offset, size_t bytes) {
    (void)handle, (void)device, (void)offset, (void)bytes;
    return refuse(MULTICAST_UNBIND, "cuMulticastUnbind");
}
