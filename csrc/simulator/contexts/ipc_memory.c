/* Memory of cudaMalloc shared with other processes. An importer maps the same piece of the owner's memfd; the owner is
 * charged for it. Repeated opens return the same address and are counted; the last close unmaps it. */
#include "simulator/contexts/ipc_memory.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "simulator/base/ipc.h"
#include "simulator/base/state.h"
#include "simulator/base/table.h"
#include "simulator/contexts/entries.h"
#include "simulator/devices/context.h"
#include "simulator/devices/visible.h"
#include "simulator/memory/mapping.h"
#include "simulator/memory/physical.h"
#include "simulator/memory/reservation.h"
#include "simulator/simulator.h"
#include "simulator/streams/wait.h"

CUresult sim_ipc_memory_handle(CUipcMemHandle *handle, CUdeviceptr address) {
    const sim_mapping_t *mapping = sim_memory_mapping_at(address);
    if (!handle || !mapping || !mapping->runtime || mapping->physical->imported) return CUDA_ERROR_INVALID_VALUE;
    sim_physical_t *physical = mapping->physical;
    physical->shared_in_place = true;
    const sim_ipc_name_t name = {.kind = SIM_IPC_MEMORY,
                                 .process = getpid(),
                                 .file = sim_state.devices[physical->device].memory,
                                 .device = sim_visible_machine_index(physical->device),
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

CUresult sim_ipc_close_import(sim_mapping_t *mapping) {
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
    return mapping && mapping->physical->imported ? sim_ipc_close_import(mapping) : CUDA_ERROR_INVALID_VALUE;
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
