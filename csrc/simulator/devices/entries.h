/* Entry points of devices and of each thread's contexts, in the format of base/entry_list.h. Implemented in device.c
 * and context.c. */
#ifndef TMS_SIM_DEVICES_ENTRIES_H
#define TMS_SIM_DEVICES_ENTRIES_H

#include "simulator/base/entry_list.h"

#define SIM_DEVICES_DRIVER_ENTRIES(X)                                                                                       \
    X(cuInit, sim_device_init, 0, (unsigned int flags), (flags))                                                            \
    X(cuDriverGetVersion, sim_device_driver_version, SIM_PURE, (int *version), (version))                                   \
    X(cuDeviceGetCount, sim_device_count, SIM_INIT, (int *count), (count))                                                  \
    X(cuDeviceGet, sim_device_get, SIM_INIT, (CUdevice * device, int ordinal), (device, ordinal))                           \
    X(cuDeviceGetName, sim_device_name, SIM_INIT, (char *name, int length, CUdevice device), (name, length, device))        \
    X(cuDeviceTotalMem_v2, sim_device_total_memory, SIM_INIT, (size_t *bytes, CUdevice device), (bytes, device))            \
    X(cuDeviceGetAttribute, sim_device_attribute, SIM_INIT, (int *value, CUdevice_attribute attribute, CUdevice device),    \
      (value, attribute, device))                                                                                           \
    X(cuDeviceCanAccessPeer, sim_device_can_access_peer, SIM_INIT, (int *can, CUdevice device, CUdevice peer),              \
      (can, device, peer))                                                                                                  \
    X(cuDevicePrimaryCtxGetState, sim_context_primary_state, SIM_INIT, (CUdevice device, unsigned int *flags, int *active), \
      (device, flags, active))                                                                                              \
    X(cuDevicePrimaryCtxSetFlags_v2, sim_context_primary_set_flags, SIM_INIT, (CUdevice device, unsigned int flags),        \
      (device, flags))                                                                                                      \
    X(cuDevicePrimaryCtxRetain, sim_context_primary_retain, SIM_INIT, (CUcontext * context, CUdevice device),               \
      (context, device))                                                                                                    \
    X(cuCtxCreate_v2, sim_context_create, SIM_INIT, (CUcontext * context, unsigned int flags, CUdevice device),             \
      (context, flags, device))                                                                                             \
    X(cuCtxCreate_v3, sim_context_create_with_affinity, SIM_INIT,                                                           \
      (CUcontext * context, CUexecAffinityParam * affinities, int count, unsigned int flags, CUdevice device),              \
      (context, affinities, count, flags, device))                                                                          \
    X(cuCtxCreate_v4, sim_context_create_with_parameters, SIM_INIT,                                                         \
      (CUcontext * context, struct CUctxCreateParams_st * parameters, unsigned int flags, CUdevice device),                 \
      (context, parameters, flags, device))                                                                                 \
    X(cuCtxGetCurrent, sim_context_get_current, SIM_INIT, (CUcontext * context), (context))                                 \
    X(cuCtxSetCurrent, sim_context_set_current, SIM_INIT, (CUcontext context), (context))                                   \
    X(cuCtxPushCurrent_v2, sim_context_push, SIM_INIT, (CUcontext context), (context))                                      \
    X(cuCtxPopCurrent_v2, sim_context_pop, SIM_INIT, (CUcontext * context), (context))                                      \
    X(cuCtxGetId, sim_context_identifier, SIM_INIT, (CUcontext context, unsigned long long *id), (context, id))             \
    X(cuCtxGetDevice, sim_context_get_device, SIM_INIT, (CUdevice * device), (device))                                      \
    X(cuCtxEnablePeerAccess, sim_context_enable_peer, SIM_CONTEXT, (CUcontext peer, unsigned int flags), (peer, flags))     \
    X(cuDeviceGetUuid_v2, sim_device_uuid, SIM_INIT, (CUuuid * uuid, CUdevice device), (uuid, device))                      \
    X(cuCtxGetStreamPriorityRange, sim_device_priority_range, SIM_CONTEXT, (int *least, int *greatest), (least, greatest))

#define SIM_DEVICES_RUNTIME_ENTRIES(X)                                                                                      \
    X(cudaDeviceCanAccessPeer, sim_device_can_access_peer, SIM_DEVICES, (int *can, int device, int peer),                   \
      (can, device, peer))                                                                                                  \
    X(cudaDriverGetVersion, sim_device_driver_version, SIM_PURE, (int *version), (version))                                 \
    X(cudaGetDeviceProperties, sim_device_properties_13, SIM_DEVICES, (sim_properties_13_t * properties, int device),       \
      (properties, device))                                                                                                 \
    X(cudaGetDeviceProperties_v2, sim_device_properties_12, SIM_DEVICES, (sim_properties_12_t * properties, int device),    \
      (properties, device))                                                                                                 \
    X(cudaDeviceGetAttribute, sim_device_attribute, SIM_DEVICES, (int *value, CUdevice_attribute attribute, int device),    \
      (value, attribute, device))                                                                                           \
    X(cudaDeviceGetPCIBusId, sim_device_bus_text, SIM_DEVICES, (char *text, int length, int device),                        \
      (text, length, device))                                                                                               \
    X(cudaDeviceGetStreamPriorityRange, sim_device_priority_range, SIM_RUNTIME, (int *least, int *greatest),                \
      (least, greatest))

SIM_DEVICES_DRIVER_ENTRIES(SIM_DECLARE_ENTRY)
SIM_DEVICES_RUNTIME_ENTRIES(SIM_DECLARE_ENTRY)

#endif
