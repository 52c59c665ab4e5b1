/* Entry points for memory: device memory of communicators, allocations for the program, and registrations. */
#include "simulator/base/table.h"
#include "simulator/devices/context.h"
#include "simulator/memory/access.h"
#include "simulator/memory/entries.h"
#include "simulator/memory/mapping.h"
#include "simulator/nccl/communicator.h"
#include "simulator/nccl/entries.h"
#include "simulator/nccl/error.h"
#include "simulator/runtime/entries.h"
#include "simulator/simulator.h"

/* Maps a cuMemCreate handle, as the real function does: the program may look it up by address. Without a place or a size the
 * real function calls cudaMalloc. */
sim_nccl_result_t sim_nccl_mem_alloc(void **address, size_t bytes) {
    int device = sim_context_current()->device;
    size_t span = (bytes + TMS_SIM_GRANULARITY - 1) / TMS_SIM_GRANULARITY * TMS_SIM_GRANULARITY;
    const CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                            .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
    const CUmemAccessDesc access = {.location = properties.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle = 0;
    CUdeviceptr range = 0;
    CUresult result =
        !address || !bytes ? sim_runtime_malloc(address, bytes) : sim_memory_create(&handle, span, &properties, 0);
    if (result != CUDA_SUCCESS) return sim_nccl_cuda_failed(result);
    if (!bytes) return SIM_NCCL_SUCCESS;
    result = sim_memory_reserve(&range, span, 0, 0, 0);
    if (result != CUDA_SUCCESS) goto no_range;
    result = sim_memory_map(range, span, 0, handle, 0);
    if (result != CUDA_SUCCESS) goto no_mapping;
    result = sim_memory_set_access(range, span, &access, 1);
    if (result != CUDA_SUCCESS) goto no_access;
    sim_memory_release(handle); /* the mapping keeps it alive */
    *address = (void *)(uintptr_t)range;
    return SIM_NCCL_SUCCESS;

no_access:
    sim_memory_unmap(range, span);
no_mapping:
    sim_memory_address_free(range, span);
no_range:
    sim_memory_release(handle);
    return sim_nccl_cuda_failed(result);
}

sim_nccl_result_t sim_nccl_mem_free(void *address) {
    CUdeviceptr range = (CUdeviceptr)(uintptr_t)address;
    const sim_mapping_t *mapping = sim_memory_mapping_at(range);
    if (!address) return SIM_NCCL_SUCCESS;
    if (!mapping || mapping->address != range || mapping->runtime)
        return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "%p was not returned by ncclMemAlloc", address);
    uint64_t span = mapping->span;
    CUresult result = sim_memory_unmap(range, span);
    if (result == CUDA_SUCCESS) result = sim_memory_address_free(range, span);
    return result == CUDA_SUCCESS ? SIM_NCCL_SUCCESS : sim_nccl_cuda_failed(result);
}

/* A registration has no effect, but its memory must be accessible. */
sim_nccl_result_t sim_nccl_register(sim_nccl_handle_t handle, void *buffer, size_t bytes, void **registration) {
    sim_nccl_comm_t *comm = NULL;
    sim_nccl_result_t result = sim_nccl_require(handle, &comm);
    if (result != SIM_NCCL_SUCCESS) return result;
    if (!registration || !bytes || !sim_memory_reachable((uint64_t)(uintptr_t)buffer, bytes, 1U << comm->device, true, NULL))
        return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT,
                             "%zu bytes from %p on are not all accessible to device %d; resume paused memory", bytes, buffer,
                             comm->device);
    uint64_t id = sim_state_new_id();
    if (!sim_table_insert(&comm->registrations, id, comm)) return sim_nccl_fail(SIM_NCCL_SYSTEM, "no memory");
    *registration = (void *)(uintptr_t)id;
    return SIM_NCCL_SUCCESS;
}

sim_nccl_result_t sim_nccl_deregister(sim_nccl_handle_t handle, void *registration) {
    sim_nccl_comm_t *comm = sim_nccl_find(handle);
    if (comm && sim_table_remove(&comm->registrations, (uint64_t)(uintptr_t)registration)) return SIM_NCCL_SUCCESS;
    return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "this communicator has no such registration");
}

/* ---- device memory of communicators ---- */

sim_nccl_result_t sim_nccl_suspend(sim_nccl_handle_t handle, int flags) {
    sim_nccl_comm_t *comm = NULL;
    sim_nccl_result_t result = sim_nccl_require(handle, &comm);
    if (result != SIM_NCCL_SUCCESS) return result;
    if (flags != SIM_NCCL_SUSPEND_MEMORY)
        return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "flags are %d; use NCCL_SUSPEND_MEM", flags);
    if (comm->suspended || comm->first || comm->busy)
        return sim_nccl_fail(SIM_NCCL_INVALID_USAGE, comm->suspended ? "the communicator is already suspended"
                                                                     : "operations are in flight; synchronize first");
    sim_nccl_credit(comm);
    comm->suspended = true;
    return SIM_NCCL_SUCCESS;
}

sim_nccl_result_t sim_nccl_resume(sim_nccl_handle_t handle) {
    sim_nccl_comm_t *comm = NULL;
    sim_nccl_result_t result = sim_nccl_require(handle, &comm);
    if (result != SIM_NCCL_SUCCESS) return result;
    if (!comm->suspended) return sim_nccl_fail(SIM_NCCL_INVALID_USAGE, "the communicator is not suspended");
    result = sim_nccl_charge(comm);
    comm->suspended = result != SIM_NCCL_SUCCESS;
    return result;
}

sim_nccl_result_t sim_nccl_statistics(sim_nccl_handle_t handle, int which, uint64_t *value) {
    sim_nccl_comm_t *comm = NULL;
    sim_nccl_result_t result = sim_nccl_require(handle, &comm);
    if (result != SIM_NCCL_SUCCESS) return result;
    if (!value) return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "value is NULL");
    switch (which) {
    case SIM_NCCL_CAN_SUSPEND: *value = comm->suspended ? sim_state.nccl_bytes : comm->charged; break;
    case SIM_NCCL_IS_SUSPENDED: *value = comm->suspended; break;
    case SIM_NCCL_STAYS: *value = 0; break;
    case SIM_NCCL_TOTAL: *value = comm->suspended ? sim_state.nccl_bytes : comm->charged; break;
    default: return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT, "there is no statistic %d", which);
    }
    return SIM_NCCL_SUCCESS;
}

/* ---- not simulated: communication inside the program's own kernels ---- */

sim_nccl_result_t sim_nccl_window_register(sim_nccl_handle_t comm, void *buffer, size_t bytes, void **window, int flags) {
    (void)comm, (void)buffer, (void)bytes, (void)flags;
    if (window) *window = NULL;
    return sim_nccl_refuse("ncclCommWindowRegister");
}

sim_nccl_result_t sim_nccl_window_deregister(sim_nccl_handle_t comm, void *window) {
    (void)comm, (void)window;
    return sim_nccl_refuse("ncclCommWindowDeregister");
}

sim_nccl_result_t sim_nccl_dev_comm_create(sim_nccl_handle_t comm, const void *requirements, void *made) {
    (void)comm, (void)requirements, (void)made;
    return sim_nccl_refuse("ncclDevCommCreate");
}

sim_nccl_result_t sim_nccl_dev_comm_destroy(sim_nccl_handle_t comm, const void *made) {
    (void)comm, (void)made;
    return sim_nccl_refuse("ncclDevCommDestroy");
}
