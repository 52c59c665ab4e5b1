/* Physical memory: pieces of one memfd per device. A file per allocation could exceed the process's limit of open files. */
#include "simulator/memory/physical.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/file.h>
#include <unistd.h>

#include "simulator/base/state.h"
#include "simulator/base/table.h"
#include "simulator/devices/budget.h"
#include "simulator/devices/device.h"
#include "simulator/memory/entries.h"
#include "simulator/memory/pieces.h"
#include "simulator/memory/stale.h"
#include "simulator/simulator.h"

static void free_physical(const sim_physical_t *physical) {
    if (physical->sent && physical->file >= 0) sim_stale_add((sim_stale_t){.file = physical->file_id});
    if (physical->imported) {
        close(physical->file);
        return;
    }
    if (physical->file >= 0)
        close(physical->file);
    else /* a piece that another process may still have open is never reused */
        sim_piece_put(&sim_state.devices[physical->device], physical->offset, physical->bytes, !physical->shared_in_place);
    sim_budget_credit(physical->device, physical->bytes, false);
}

/* Whether another process, or a descriptor in this one, holds the memory: see export.c. */
static bool has_holder(const sim_physical_t *physical) {
    if (physical->imported || physical->file < 0) return false;
    if (flock(physical->file, LOCK_EX | LOCK_NB) != 0) return errno == EWOULDBLOCK;
    flock(physical->file, LOCK_UN);
    return false;
}

void sim_memory_drop_physical(sim_physical_t *physical) {
    if (physical->references || physical->mapped) return;
    bool was_held = physical->held;
    physical->held = has_holder(physical);
    sim_state.held += (unsigned)physical->held - (unsigned)was_held;
    if (physical->held) return;
    free_physical(physical);
    sim_table_remove(&sim_state.physicals, physical->id);
    if (!physical->runtime) sim_state.devices[physical->device].handles--;
    free(physical);
}

void sim_memory_sweep(void) {
    for (size_t i = sim_state.physicals.count; sim_state.held && i-- > 0;) {
        sim_physical_t *physical = sim_state.physicals.slots[i].value;
        if (physical->held) sim_memory_drop_physical(physical);
    }
}

CUresult sim_memory_create_physical(int device, uint64_t bytes, bool runtime, sim_physical_t **made) {
    sim_device_t *owner = &sim_state.devices[device];
    sim_physical_t *physical = calloc(1, sizeof *physical);
    if (!physical) return CUDA_ERROR_OUT_OF_MEMORY;
    sim_memory_sweep();
    if (!sim_budget_charge(device, bytes, false)) goto no_budget;
    *physical = (sim_physical_t){
        .id = sim_state_new_id(), .device = device, .bytes = bytes, .references = 1, .runtime = runtime, .file = -1};
    if (!sim_piece_take(owner, bytes, &physical->offset)) goto no_memory;
    if (!sim_table_insert(&sim_state.physicals, physical->id, physical)) goto no_entry;
    if (!runtime) owner->handles++;
    *made = physical;
    return CUDA_SUCCESS;

no_entry:
    sim_piece_put(owner, physical->offset, bytes, true);
no_memory:
    sim_budget_credit(device, bytes, false);
no_budget:
    free(physical);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

sim_physical_t *sim_memory_find_physical(CUmemGenericAllocationHandle handle) {
    sim_physical_t *physical = sim_table_find(&sim_state.physicals, handle);
    return physical && physical->references && !physical->runtime ? physical : NULL;
}

static CUresult check_properties(const CUmemAllocationProp *properties) {
    if (!properties || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
    int kind = (int)properties->location.type;
    if (kind >= SIM_LOCATION_HOST && kind <= SIM_LOCATION_HOST_NUMA_CURRENT) return CUDA_ERROR_NOT_SUPPORTED;
    if (kind != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
    enum { FABRIC = 8 }; /* CU_MEM_HANDLE_TYPE_FABRIC of newer headers */
    /* Unknown types are ignored, as the real driver does. A fabric handle needs a service that most machines lack. */
    unsigned types = (unsigned)properties->requestedHandleTypes;
    if (types & (CU_MEM_HANDLE_TYPE_WIN32 | CU_MEM_HANDLE_TYPE_WIN32_KMT)) return CUDA_ERROR_INVALID_VALUE;
    if (types & FABRIC) return CUDA_ERROR_NOT_PERMITTED;
    return sim_device_valid(properties->location.id) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult sim_memory_granularity(size_t *granularity, const CUmemAllocationProp *properties,
                                CUmemAllocationGranularity_flags option) {
    /* The real driver ignores the properties here, too. */
    if (!granularity || !properties || (unsigned)option > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        return CUDA_ERROR_INVALID_VALUE;
    *granularity = TMS_SIM_GRANULARITY;
    return CUDA_SUCCESS;
}

CUresult sim_memory_create(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                           unsigned long long flags) {
    if (!handle || !bytes || bytes % TMS_SIM_GRANULARITY || flags) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = check_properties(properties);
    sim_physical_t *physical = NULL;
    if (result == CUDA_SUCCESS) result = sim_memory_create_physical(properties->location.id, bytes, false, &physical);
    if (result != CUDA_SUCCESS) return result;
    physical->handle_types = (unsigned)properties->requestedHandleTypes;
    physical->rdma = properties->allocFlags.gpuDirectRDMACapable;
    *handle = physical->id;
    return CUDA_SUCCESS;
}

CUresult sim_memory_release(CUmemGenericAllocationHandle handle) {
    sim_physical_t *physical = sim_memory_find_physical(handle);
    if (!physical) return CUDA_ERROR_INVALID_VALUE;
    physical->references--;
    sim_memory_drop_physical(physical);
    return CUDA_SUCCESS;
}

CUresult sim_memory_properties(CUmemAllocationProp *properties, CUmemGenericAllocationHandle handle) {
    const sim_physical_t *physical = sim_memory_find_physical(handle);
    if (!properties || !physical) return CUDA_ERROR_INVALID_VALUE;
    *properties = (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                        .requestedHandleTypes = (CUmemAllocationHandleType)physical->handle_types,
                                        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = physical->device},
                                        .allocFlags = {.gpuDirectRDMACapable = physical->rdma}};
    return CUDA_SUCCESS;
}

void sim_memory_clear_physicals(void) {
    while (sim_state.physicals.count) {
        sim_physical_t *physical = sim_state.physicals.slots[0].value;
        physical->references = 0;
        physical->imported = physical->imported || has_holder(physical); /* their holders keep it */
        sim_memory_drop_physical(physical);
    }
    sim_table_release(&sim_state.physicals);
}
