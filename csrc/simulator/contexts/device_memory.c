/* cuMemAlloc and cudaMalloc, and the attributes of pointers. This memory is mapped for its whole lifetime. Its own device
 * can access it, and devices with peer access enabled. An importer of another process maps the same piece of the owner's
 * memfd; the owner is charged for it. Repeated opens return the same address and are counted; the last close unmaps it. */
#include "simulator/contexts/device_memory.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "simulator/base/process.h"
#include "simulator/base/simulation.h"
#include "simulator/base/table.h"
#include "simulator/contexts/entries.h"
#include "simulator/devices/budget.h"
#include "simulator/devices/context.h"
#include "simulator/devices/visible.h"
#include "simulator/memory/host.h"
#include "simulator/memory/mapping.h"
#include "simulator/memory/physical.h"
#include "simulator/simulator.h"
#include "simulator/streams/stream.h"

CUresult sim_ipc_memory_handle(CUipcMemHandle *handle, CUdeviceptr address) {
    const sim_mapping_t *mapping = sim_memory_mapping_at(address);
    if (!handle || !mapping || !mapping->runtime || mapping->physical->imported) return CUDA_ERROR_INVALID_VALUE;
    sim_physical_t *physical = mapping->physical;
    physical->shared_in_place = true;
    const sim_ipc_name_t name = {.kind = SIM_IPC_MEMORY,
                                 .process = getpid(),
                                 .file = sim_state.devices[physical->device].memory,
                                 .device = sim_state.visible[physical->device],
                                 .offset = (uint64_t)physical->offset,
                                 .bytes = mapping->bytes,
                                 .span = mapping->span};
    return sim_ipc_write(&name, handle->reserved);
}

/* The mapping of an earlier open, or NULL. */
static sim_mapping_t *find_import(const sim_ipc_name_t *name) {
    for (size_t i = 0; i < sim_state.mappings.count; i++) {
        sim_mapping_t *mapping = sim_state.mappings.slots[i].value;
        const sim_physical_t *physical = mapping->physical;
        if (physical->imported && physical->file_id == name->file_id && (uint64_t)physical->offset == name->offset)
            return mapping;
    }
    return NULL;
}

/* Represents the owner's physical memory in this process. NULL if out of memory. */
static sim_physical_t *import_physical(const sim_ipc_name_t *name, int file) {
    sim_physical_t *physical = calloc(1, sizeof *physical);
    if (!physical) return NULL;
    *physical = (sim_physical_t){.id = sim_state_new_id(),
                                 .device = name->device,
                                 .bytes = name->span,
                                 .offset = (off_t)name->offset,
                                 .references = 1,
                                 .runtime = true,
                                 .imported = true,
                                 .file = file,
                                 .file_id = name->file_id};
    if (sim_table_insert(&sim_state.physicals, physical->id, physical)) return physical;
    free(physical);
    return NULL;
}

static CUresult import(const sim_ipc_name_t *name, int file, CUdeviceptr *address) {
    uint64_t range = 0;
    sim_mapping_t *mapping = NULL;
    sim_physical_t *physical = import_physical(name, file);
    if (!physical) {
        close(file);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUresult result = sim_memory_reserve_range(name->span, TMS_SIM_GRANULARITY, 0, true, &range);
    if (result != CUDA_SUCCESS) goto no_range;
    result = sim_memory_map_physical(range, name->span, physical, &mapping);
    if (result != CUDA_SUCCESS) goto no_mapping;
    result = sim_memory_protect(mapping, name->device, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    if (result != CUDA_SUCCESS) goto no_access;
    mapping->bytes = name->bytes;
    *address = range;
    return CUDA_SUCCESS;

no_access:
    sim_memory_unmap_range(range, name->span, true);
no_mapping:
    sim_memory_free_range(sim_memory_reservation_at(range));
no_range:
    physical->references = 0;
    sim_memory_drop_physical(physical); /* also closes the file */
    return result;
}

CUresult sim_ipc_open_memory(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags) {
    sim_ipc_name_t name;
    if (!address || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_ipc_read(&name, handle.reserved, SIM_IPC_MEMORY)) return CUDA_ERROR_INVALID_VALUE;
    name.device = sim_visible_ordinal(name.device);
    if (name.process == getpid() || name.device < 0) return CUDA_ERROR_INVALID_CONTEXT;
    sim_mapping_t *known = find_import(&name);
    if (known) {
        known->physical->references++;
        *address = known->address;
        return CUDA_SUCCESS;
    }
    int file = sim_ipc_open(&name);
    return file < 0 ? CUDA_ERROR_MAP_FAILED : import(&name, file, address);
}

/* Closes an import of this process, regardless of its open count. */
static CUresult close_import(sim_mapping_t *mapping) {
    sim_physical_t *physical = mapping->physical;
    uint64_t address = mapping->address, references = physical->references;
    physical->references = 0; /* freed with its mapping */
    CUresult result = sim_memory_unmap_range(address, mapping->span, true);
    if (result == CUDA_SUCCESS)
        sim_memory_free_range(sim_memory_reservation_at(address));
    else
        physical->references = (unsigned)references;
    return result;
}

CUresult sim_ipc_close_memory(CUdeviceptr address) {
    sim_mapping_t *mapping = sim_table_find(&sim_state.mappings, address);
    if (!mapping || !mapping->runtime || !mapping->physical->imported) return CUDA_ERROR_INVALID_VALUE;
    if (mapping->physical->references > 1) {
        mapping->physical->references--;
        return CUDA_SUCCESS;
    }
    CUresult result = sim_stream_drain(sim_context_current());
    if (result != CUDA_SUCCESS) return result;
    mapping = sim_table_find(&sim_state.mappings, address); /* another thread may have closed it during the wait */
    return mapping && mapping->physical->imported ? close_import(mapping) : CUDA_ERROR_INVALID_VALUE;
}

CUresult sim_runtime_ipc_memory_handle(CUipcMemHandle *handle, void *address) {
    return sim_ipc_memory_handle(handle, (uintptr_t)address);
}

CUresult sim_runtime_ipc_open_memory(void **address, CUipcMemHandle handle, unsigned int flags) {
    CUdeviceptr opened = 0;
    if (!address) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_ipc_open_memory(&opened, handle, flags);
    if (result == CUDA_SUCCESS) *address = (void *)(uintptr_t)opened;
    return result;
}

CUresult sim_runtime_ipc_close_memory(void *address) { return sim_ipc_close_memory((uintptr_t)address); }

static uint64_t round_up_to_granularity(uint64_t bytes) {
    return (bytes + TMS_SIM_GRANULARITY - 1) / TMS_SIM_GRANULARITY * TMS_SIM_GRANULARITY;
}

CUresult sim_device_memory_allocate(CUdeviceptr *address, size_t bytes) {
    int device = sim_context_current()->device;
    if (!address || !bytes) return CUDA_ERROR_INVALID_VALUE;
    *address = 0; /* the driver also clears it if out of memory */
    if (bytes > sim_budget_total()) return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t span = round_up_to_granularity(bytes), range = 0;
    sim_physical_t *physical = NULL;
    sim_mapping_t *mapping = NULL;
    CUresult result = sim_memory_create_physical(device, span, true, &physical);
    if (result != CUDA_SUCCESS) return result;
    result = sim_memory_reserve_range(span, TMS_SIM_GRANULARITY, 0, true, &range);
    if (result != CUDA_SUCCESS) goto no_range;
    result = sim_memory_map_physical(range, span, physical, &mapping);
    if (result != CUDA_SUCCESS) goto no_mapping;
    result = sim_memory_protect(mapping, device, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    if (result != CUDA_SUCCESS) goto no_access;
    mapping->bytes = bytes;
    mapping->context = sim_context_current();
    physical->references = 0; /* the mapping keeps it alive */
    sim_state.devices[device].runtime_allocations++;
    *address = range;
    return CUDA_SUCCESS;

no_access:
    sim_memory_unmap_range(range, span, true);
no_mapping:
    sim_memory_free_range(sim_memory_reservation_at(range));
no_range:
    physical->references = 0;
    sim_memory_drop_physical(physical);
    return result;
}

/* The allocation that starts at this address. */
static sim_mapping_t *find_allocation(uint64_t address) {
    sim_mapping_t *mapping = sim_table_find(&sim_state.mappings, address);
    return mapping && mapping->runtime && !mapping->physical->imported ? mapping : NULL;
}

static CUresult free_allocation(uint64_t address) {
    const sim_mapping_t *mapping = find_allocation(address);
    if (!mapping) return CUDA_ERROR_INVALID_VALUE;
    int device = mapping->physical->device;
    bool module = mapping->physical->module;
    CUresult result = sim_memory_unmap_range(address, mapping->span, true);
    if (result != CUDA_SUCCESS) return result;
    sim_memory_free_range(sim_memory_reservation_at(address));
    if (!module) sim_state.devices[device].runtime_allocations--;
    return CUDA_SUCCESS;
}

CUresult sim_device_memory_free(CUdeviceptr address) {
    const sim_mapping_t *mapping = find_allocation(address);
    if (!address) return CUDA_SUCCESS;
    if (!mapping) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_stream_drain(mapping->context);
    return result == CUDA_SUCCESS ? free_allocation(address) : result;
}

/* Imported memory is freed with the primary context of its device. */
static bool is_owned_by(const sim_mapping_t *mapping, const sim_context_t *context) {
    if (!mapping->runtime) return false;
    if (mapping->physical->imported) return !context->created && mapping->physical->device == context->device;
    return mapping->context == context;
}

void sim_device_memory_clear(const sim_context_t *context) {
    for (size_t i = 0; i < sim_state.mappings.count;) {
        sim_mapping_t *mapping = sim_state.mappings.slots[i].value;
        CUresult result = CUDA_ERROR_INVALID_VALUE;
        if (is_owned_by(mapping, context))
            result = mapping->physical->imported ? close_import(mapping) : free_allocation(mapping->address);
        /* The free may have waited for a pinned chunk. The table may have changed during the wait. */
        i = result == CUDA_SUCCESS ? 0 : i + 1;
    }
}

/* The range of an address is that of the allocation, which for virtual memory management is the reservation: it may hold
 * several mappings. Registration caches compare the numbers of the buffer, which is a mapping, and of its memory block. */
static CUresult device_pointer_attribute(void *data, CUpointer_attribute attribute, const sim_mapping_t *mapping,
                                         uint64_t address) {
    const sim_reservation_t *range = mapping->runtime ? NULL : sim_memory_reservation_at(address);
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)data = CU_MEMORYTYPE_DEVICE; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = mapping->physical->device; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)data = address; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)data = range ? range->address : mapping->address; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)data = range ? range->bytes : mapping->bytes; break;
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: *(CUdeviceptr *)data = mapping->address; break;
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE: *(size_t *)data = mapping->bytes; break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)data = mapping->id; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID: *(unsigned long long *)data = mapping->physical->id; break;
    case CU_POINTER_ATTRIBUTE_MAPPED: *(int *)data = 1; break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(int *)data = mapping->runtime; break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: *(unsigned *)data = mapping->physical->handle_types; break;
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: *(int *)data = mapping->physical->rdma; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)data = 0; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

static CUresult host_pointer_attribute(void *data, CUpointer_attribute attribute, const sim_host_t *host, uint64_t address) {
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)data = CU_MEMORYTYPE_HOST; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: *(uint64_t *)data = address; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)data = host->address; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)data = host->bytes; break;
    case CU_POINTER_ATTRIBUTE_MAPPED: *(int *)data = 1; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)data = 0; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult sim_device_memory_range(CUdeviceptr *start, size_t *bytes, CUdeviceptr address) {
    const sim_mapping_t *mapping = sim_memory_mapping_at(address);
    if (!mapping) return CUDA_ERROR_NOT_FOUND;
    if (start) *start = mapping->address;
    if (bytes) *bytes = mapping->bytes;
    return CUDA_SUCCESS;
}

CUresult sim_pointer_attribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
    const sim_mapping_t *mapping = sim_memory_mapping_at(address);
    const sim_host_t *host = sim_host_at(address);
    if (!data) return CUDA_ERROR_INVALID_VALUE;
    if (mapping) return device_pointer_attribute(data, attribute, mapping, address);
    return host ? host_pointer_attribute(data, attribute, host, address) : CUDA_ERROR_INVALID_VALUE;
}

CUresult sim_device_memory_info(size_t *available, size_t *total) {
    const sim_context_t *context = sim_context_current();
    sim_memory_sweep();
    if (available) *available = sim_budget_available(context->device);
    if (total) *total = sim_budget_total();
    return CUDA_SUCCESS;
}
