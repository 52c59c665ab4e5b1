/* Entry points of the virtual memory management, in the format of base/entry_list.h. Implemented in physical.c,
 * mapping.c and export.c. */
#ifndef TMS_SIM_MEMORY_ENTRIES_H
#define TMS_SIM_MEMORY_ENTRIES_H

#include "simulator/base/entry_list.h"

#define SIM_MEMORY_DRIVER_ENTRIES(X)                                                                                        \
    X(cuMemGetAllocationGranularity, sim_memory_granularity, SIM_INIT,                                                      \
      (size_t *granularity, const CUmemAllocationProp *properties, CUmemAllocationGranularity_flags option),                \
      (granularity, properties, option))                                                                                    \
    X(cuMemAddressReserve, sim_memory_reserve, SIM_INIT,                                                                    \
      (CUdeviceptr * address, size_t bytes, size_t alignment, CUdeviceptr hint, unsigned long long flags),                  \
      (address, bytes, alignment, hint, flags))                                                                             \
    X(cuMemAddressFree, sim_memory_address_free, SIM_INIT, (CUdeviceptr address, size_t bytes), (address, bytes))           \
    X(cuMemCreate, sim_memory_create, SIM_INIT,                                                                             \
      (CUmemGenericAllocationHandle * handle, size_t bytes, const CUmemAllocationProp *properties,                          \
       unsigned long long flags),                                                                                           \
      (handle, bytes, properties, flags))                                                                                   \
    X(cuMemRelease, sim_memory_release, SIM_INIT, (CUmemGenericAllocationHandle handle), (handle))                          \
    X(cuMemRetainAllocationHandle, sim_memory_retain, SIM_INIT, (CUmemGenericAllocationHandle * handle, void *address),     \
      (handle, address))                                                                                                    \
    X(cuMemMap, sim_memory_map, SIM_INIT,                                                                                   \
      (CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags),    \
      (address, bytes, offset, handle, flags))                                                                              \
    X(cuMemUnmap, sim_memory_unmap, SIM_INIT, (CUdeviceptr address, size_t bytes), (address, bytes))                        \
    X(cuMemSetAccess, sim_memory_set_access, SIM_INIT,                                                                      \
      (CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count), (address, bytes, access, count))    \
    X(cuMemGetAccess, sim_memory_get_access, SIM_INIT,                                                                      \
      (unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address), (flags, location, address))          \
    X(cuMemExportToShareableHandle, sim_memory_export, SIM_INIT,                                                            \
      (void *shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags),     \
      (shareable, handle, type, flags))                                                                                     \
    X(cuMemGetAllocationPropertiesFromHandle, sim_memory_properties, SIM_INIT,                                              \
      (CUmemAllocationProp * properties, CUmemGenericAllocationHandle handle), (properties, handle))                        \
    X(cuMemImportFromShareableHandle, sim_memory_import, SIM_INIT,                                                          \
      (CUmemGenericAllocationHandle * handle, void *shareable, CUmemAllocationHandleType type), (handle, shareable, type))

SIM_MEMORY_DRIVER_ENTRIES(SIM_DECLARE_ENTRY)

#endif
