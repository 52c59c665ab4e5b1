#include "handle_hooks.h"

#include <string.h>
#include <time.h>

#include "abi/start.h"
#include "base/callers.h"
#include "core/allocation/handles.h"
#include "core/allocation/orphans.h"
#include "core/model/peers.h"
#include "interpreter.h"

#define CALLER __builtin_return_address(0)

enum { FABRIC = 8 }; /* CU_MEM_HANDLE_TYPE_FABRIC of newer headers */

/* How long a map waits for a resume that fills the memory at its addresses. */
enum { MAP_SECONDS = 60, MAP_POLL_MILLISECONDS = 1 };

static const char *const allocator_prefixes[] = {"libc10_cuda.so", NULL};

/* ---- callers ---- */

/* Whether code of PyTorch's allocator, which has looked up these functions, is calling. */
static bool called_by_allocator(const tms_state_t *state, const void *caller) {
    const uintptr_t address = (uintptr_t)caller;
    return address >= atomic_load_explicit(&state->allocator_begin, memory_order_relaxed) &&
           address < atomic_load_explicit(&state->allocator_end, memory_order_relaxed);
}

/* Logs a failure, unless it is a lack of device memory, which PyTorch handles. Returns the driver's number for it. */
static CUresult fail(tms_state_t *state, tms_status_t status, const tms_error_t *error) {
    tms_log_write(&state->log, status == TMS_OUT_OF_DEVICE_MEMORY ? TMS_LOG_INFO : TMS_LOG_WARNING, "%s", error->message);
    return (CUresult)tms_compat_cuda_error(status, error); /* the runtime and the driver have the same numbers */
}

static CUresult result_of(tms_state_t *state, tms_status_t status, const tms_error_t *error) {
    return status == TMS_OK ? CUDA_SUCCESS : fail(state, status, error);
}

/* ---- memory ---- */

/* At its first allocation PyTorch asks for memory with fabric handles, and keeps to them if it gets some. Managed memory has
 * file descriptors, for which PyTorch asks next. */
static bool asks_for_fabric(const tms_state_t *state, const tms_region_t *region, const CUmemAllocationProp *properties) {
    return (region->managed || state->config.init_enable) && (properties->requestedHandleTypes & FABRIC) != 0;
}

static CUresult create(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                       unsigned long long flags) {
    tms_state_t *state = tms_hook_state();
    tms_region_t region = {.managed = false};
    tms_error_t error;
    uint64_t number = 0;
    if (state && handle && properties && called_by_allocator(state, CALLER) &&
        properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
        region = tms_region_current(&state->regions, NULL);
        if (asks_for_fabric(state, &region, properties)) return CUDA_ERROR_NOT_PERMITTED;
    }
    if (!region.managed) return tms_counted_create(CALLER, handle, bytes, properties, flags);
    tms_status_t status = tms_handles_create(&state->saver, &region, bytes, properties->location.id, &number, &error);
    if (status == TMS_OK) {
        *handle = number;
        tms_interpreter_prepare_sharing(state);
        return CUDA_SUCCESS;
    }
    if (tms_hook_is_final(status)) return fail(state, status, &error);
    tms_log_once(&state->log, &state->warned_not_managed, TMS_LOG_WARNING,
                 "an allocation in a region is not managed and cannot be paused: %s", error.message);
    return tms_counted_create(CALLER, handle, bytes, properties, flags);
}

static CUresult release(CUmemGenericAllocationHandle handle) {
    tms_state_t *state = tms_state_if_made();
    tms_error_t error;
    if (!state || !tms_handles_is_ours(handle)) return cuMemRelease(handle);
    return result_of(state, tms_handles_release(&state->saver, handle, &error), &error);
}

static CUresult retain(CUmemGenericAllocationHandle *handle, void *address) {
    tms_state_t *state = tms_state_if_made();
    uint64_t number = 0;
    if (!state || !handle || !tms_handles_retain(&state->saver, (uintptr_t)address, &number))
        return cuMemRetainAllocationHandle(handle, address);
    *handle = number;
    return CUDA_SUCCESS;
}

/* ---- mappings ---- */

static void rest(void) {
    const struct timespec interval = {.tv_nsec = MAP_POLL_MILLISECONDS * 1000000L};
    (void)nanosleep(&interval, NULL);
}

static CUresult map(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                    unsigned long long flags) {
    tms_state_t *state = tms_state_if_made();
    tms_error_t error;
    bool busy = false;
    if (!state || !tms_handles_is_ours(handle)) return cuMemMap(address, bytes, offset, handle, flags);
    if (offset != 0 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    tms_status_t status = tms_handles_map(&state->saver, address, bytes, handle, &busy, &error);
    if (busy) {
        tms_interpreter_thread_t thread = tms_interpreter_leave();
        for (double end = tms_wait_now() + MAP_SECONDS; busy && tms_wait_now() < end;) {
            rest();
            status = tms_handles_map(&state->saver, address, bytes, handle, &busy, &error);
        }
        tms_interpreter_return(thread);
    }
    return result_of(state, status, &error);
}

static CUresult unmap(CUdeviceptr address, size_t bytes) {
    tms_state_t *state = tms_state_if_made();
    tms_error_t error;
    tms_status_t status = state ? tms_handles_unmap(&state->saver, address, bytes, &error) : TMS_NOT_MANAGED;
    return status == TMS_NOT_MANAGED ? cuMemUnmap(address, bytes) : result_of(state, status, &error);
}

/* Managed memory has access from its mapping on. The rest of the range is the driver's. */
static CUresult set_access(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count) {
    tms_state_t *state = tms_hook_state();
    const uint64_t all = address + bytes;
    CUresult result = CUDA_SUCCESS;
    tms_error_t error;
    bool any = false;
    for (uint64_t done = address; result == CUDA_SUCCESS && done < all;) {
        uint64_t begin = done, end = all;
        const bool found = state && tms_handles_find(&state->saver, &begin, &end);
        if (!found) begin = all;
        if (begin > done) TMS_CALL_REAL(result, state, cuMemSetAccess, done, begin - done, access, count);
        any = any || found;
        done = found ? end : all;
    }
    if (any && tms_peers_refresh(&state->saver, &error) != TMS_OK)
        tms_log_write(&state->log, TMS_LOG_WARNING, "%s", error.message);
    return result;
}

static CUresult free_addresses(CUdeviceptr address, size_t bytes) {
    tms_state_t *state = tms_hook_state();
    CUresult result;
    if (state && called_by_allocator(state, CALLER) && tms_orphans_keep(&state->saver, address, bytes)) return CUDA_SUCCESS;
    TMS_CALL_REAL(result, state, cuMemAddressFree, address, bytes);
    return result;
}

/* ---- handles that are given to other functions ---- */

/* Replaces a handle of ours by the driver's handle of the memory that it has now. */
static CUresult find_memory(tms_state_t *state, CUmemGenericAllocationHandle *handle) {
    tms_error_t error;
    if (!state || !tms_handles_is_ours(*handle)) return CUDA_SUCCESS;
    return result_of(state, tms_handles_memory(&state->saver, *handle, handle, &error), &error);
}

static CUresult export_memory(void *shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                              unsigned long long flags) {
    tms_state_t *state = tms_hook_state();
    CUresult result = find_memory(state, &handle);
    if (result == CUDA_SUCCESS) TMS_CALL_REAL(result, state, cuMemExportToShareableHandle, shareable, handle, type, flags);
    return result;
}

static CUresult get_properties(CUmemAllocationProp *properties, CUmemGenericAllocationHandle handle) {
    tms_state_t *state = tms_hook_state();
    CUresult result = find_memory(state, &handle);
    if (result == CUDA_SUCCESS) TMS_CALL_REAL(result, state, cuMemGetAllocationPropertiesFromHandle, properties, handle);
    return result;
}

static CUresult bind_to_multicast(CUmemGenericAllocationHandle multicast, size_t at, CUmemGenericAllocationHandle handle,
                                  size_t offset, size_t bytes, unsigned long long flags) {
    tms_state_t *state = tms_hook_state();
    CUresult result = find_memory(state, &handle);
    if (result == CUDA_SUCCESS)
        TMS_CALL_REAL(result, state, cuMulticastBindMem, multicast, at, handle, offset, bytes, flags);
    return result;
}

/* ---- look-ups ---- */

static const struct {
    const char *symbol;
    void *function;
} replacements[] = {
    {"cuMemCreate", (void *)create},
    {"cuMemRelease", (void *)release},
    {"cuMemRetainAllocationHandle", (void *)retain},
    {"cuMemMap", (void *)map},
    {"cuMemUnmap", (void *)unmap},
    {"cuMemSetAccess", (void *)set_access},
    {"cuMemAddressFree", (void *)free_addresses},
    {"cuMemExportToShareableHandle", (void *)export_memory},
    {"cuMemGetAllocationPropertiesFromHandle", (void *)get_properties},
    {"cuMulticastBindMem", (void *)bind_to_multicast},
};

void *tms_handle_hooks_replace(tms_state_t *state, const void *caller, const char *symbol, void *found) {
    for (size_t i = 0; state && i < sizeof replacements / sizeof *replacements; i++) {
        if (strcmp(symbol, replacements[i].symbol) != 0) continue;
        tms_caller_object_t object;
        tms_caller_find((uintptr_t)caller, &object);
        if (!tms_hook_is_named(object.path, allocator_prefixes)) return found;
        atomic_store_explicit(&state->allocator_begin, object.begin, memory_order_relaxed);
        atomic_store_explicit(&state->allocator_end, object.end, memory_order_relaxed);
        return replacements[i].function;
    }
    return found;
}

tms_cuda_error_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags, int *result) {
    tms_state_t *state = tms_hook_state();
    tms_cuda_error_t error;
    TMS_CALL_REAL(error, state, cudaGetDriverEntryPoint, symbol, function, flags, result);
    if (error == TMS_CUDA_SUCCESS && symbol && function && *function)
        *function = tms_handle_hooks_replace(state, CALLER, symbol, *function);
    return error;
}

tms_cuda_error_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned int version,
                                                  unsigned long long flags, int *result) {
    tms_state_t *state = tms_hook_state();
    tms_cuda_error_t error;
    TMS_CALL_REAL(error, state, cudaGetDriverEntryPointByVersion, symbol, function, version, flags, result);
    if (error == TMS_CUDA_SUCCESS && symbol && function && *function)
        *function = tms_handle_hooks_replace(state, CALLER, symbol, *function);
    return error;
}
