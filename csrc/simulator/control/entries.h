/* Entry points for error texts, function lookup and unsupported functions, in the format of base/entry_list.h.
 * Implemented in entry.c, errors.c and unsupported.c. */
#ifndef TMS_SIM_CONTROL_ENTRIES_H
#define TMS_SIM_CONTROL_ENTRIES_H

#include "simulator/base/entry_list.h"

#define SIM_CONTROL_DRIVER_ENTRIES(X)                                                                                       \
    X(cuGetErrorName, sim_error_name, SIM_PURE, (CUresult error, const char **text), (error, text))                         \
    X(cuGetErrorString, sim_error_string, SIM_PURE, (CUresult error, const char **text), (error, text))                     \
    X(cuGetProcAddress_v2, sim_entry_address, SIM_PURE,                                                                     \
      (const char *symbol, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status),         \
      (symbol, function, version, flags, status))                                                                           \
    X(cuMulticastCreate, sim_multicast_create, SIM_INIT,                                                                    \
      (CUmemGenericAllocationHandle * handle, const struct CUmulticastObjectProp_st *properties), (handle, properties))     \
    X(cuMulticastAddDevice, sim_multicast_add, SIM_INIT, (CUmemGenericAllocationHandle handle, CUdevice device),            \
      (handle, device))                                                                                                     \
    X(cuMulticastBindMem, sim_multicast_bind, SIM_INIT,                                                                     \
      (CUmemGenericAllocationHandle handle, size_t at, CUmemGenericAllocationHandle memory, size_t offset, size_t bytes,    \
       unsigned long long flags),                                                                                           \
      (handle, at, memory, offset, bytes, flags))                                                                           \
    X(cuMulticastUnbind, sim_multicast_unbind, SIM_INIT,                                                                    \
      (CUmemGenericAllocationHandle handle, CUdevice device, size_t offset, size_t bytes), (handle, device, offset, bytes))

#define SIM_CONTROL_RUNTIME_ENTRIES(X)                                                                                      \
    X(cudaGetDriverEntryPoint, sim_runtime_entry_point, SIM_PURE,                                                           \
      (const char *symbol, void **function, unsigned long long flags, int *status), (symbol, function, flags, status))      \
    X(cudaGetDriverEntryPointByVersion, sim_runtime_entry_point_by_version, SIM_PURE,                                       \
      (const char *symbol, void **function, unsigned int version, unsigned long long flags, int *status),                   \
      (symbol, function, version, flags, status))

SIM_CONTROL_DRIVER_ENTRIES(SIM_DECLARE_ENTRY)
SIM_CONTROL_RUNTIME_ENTRIES(SIM_DECLARE_ENTRY)

#endif
