/* The interposers that only count: allocations and frees of memory that is never managed. */
#include "count.h"
#include "hooks.h"

#define CALLER __builtin_return_address(0)

/* Defines the interposer of a function that allocates `size` bytes. `address` is read after the call. */
#define ALLOCATES(type, name, parameters, address, size, ...)                                                               \
    type name parameters {                                                                                                  \
        tms_count_t count = tms_count_begin(CALLER);                                                                        \
        type result;                                                                                                        \
        TMS_CALL_REAL(result, count.state, name, __VA_ARGS__);                                                              \
        if (result == 0) tms_count_add(&count, TMS_HOOK_##name, (uint64_t)(uintptr_t)(address), (size));                    \
        tms_count_end(&count);                                                                                              \
        return result;                                                                                                      \
    }

/* Defines the interposer of a function that frees the memory at `address`. */
#define FREES(type, name, parameters, address, ...)                                                                         \
    type name parameters {                                                                                                  \
        tms_count_t count = tms_count_begin(NULL);                                                                          \
        tms_ledger_taken_t taken = tms_count_take(&count, (uint64_t)(uintptr_t)(address));                                  \
        type result;                                                                                                        \
        TMS_CALL_REAL(result, count.state, name, __VA_ARGS__);                                                              \
        tms_count_settle(&count, taken, result == 0);                                                                       \
        tms_count_end(&count);                                                                                              \
        return result;                                                                                                      \
    }

/* ---- the runtime ---- */

ALLOCATES(tms_cuda_error_t, cudaMallocPitch, (void **address, size_t *pitch, size_t width, size_t height), *address,
          *pitch *height, address, pitch, width, height)
ALLOCATES(tms_cuda_error_t, cudaMalloc3D, (tms_pitched_t * pitched, tms_box_t extent), pitched->address,
          pitched->pitch *extent.height *extent.depth, pitched, extent)
ALLOCATES(tms_cuda_error_t, cudaMallocAsync, (void **address, size_t bytes, void *stream), *address, bytes, address, bytes,
          stream)
ALLOCATES(tms_cuda_error_t, cudaMallocAsync_ptsz, (void **address, size_t bytes, void *stream), *address, bytes, address,
          bytes, stream)
ALLOCATES(tms_cuda_error_t, cudaMallocFromPoolAsync, (void **address, size_t bytes, void *pool, void *stream), *address,
          bytes, address, bytes, pool, stream)
ALLOCATES(tms_cuda_error_t, cudaMallocFromPoolAsync_ptsz, (void **address, size_t bytes, void *pool, void *stream), *address,
          bytes, address, bytes, pool, stream)
FREES(tms_cuda_error_t, cudaFreeAsync, (void *address, void *stream), address, address, stream)
FREES(tms_cuda_error_t, cudaFreeAsync_ptsz, (void *address, void *stream), address, address, stream)

/* ---- the driver ---- */

ALLOCATES(CUresult, cuMemAlloc_v2, (CUdeviceptr * address, size_t bytes), *address, bytes, address, bytes)
ALLOCATES(CUresult, cuMemAllocPitch_v2,
          (CUdeviceptr * address, size_t *pitch, size_t width, size_t height, unsigned int element_bytes), *address,
          *pitch *height, address, pitch, width, height, element_bytes)
ALLOCATES(CUresult, cuMemAllocAsync, (CUdeviceptr * address, size_t bytes, CUstream stream), *address, bytes, address, bytes,
          stream)
ALLOCATES(CUresult, cuMemAllocAsync_ptsz, (CUdeviceptr * address, size_t bytes, CUstream stream), *address, bytes, address,
          bytes, stream)
ALLOCATES(CUresult, cuMemAllocFromPoolAsync, (CUdeviceptr * address, size_t bytes, CUmemoryPool pool, CUstream stream),
          *address, bytes, address, bytes, pool, stream)
ALLOCATES(CUresult, cuMemAllocFromPoolAsync_ptsz, (CUdeviceptr * address, size_t bytes, CUmemoryPool pool, CUstream stream),
          *address, bytes, address, bytes, pool, stream)
FREES(CUresult, cuMemFree_v2, (CUdeviceptr address), address, address)
FREES(CUresult, cuMemFreeAsync, (CUdeviceptr address, CUstream stream), address, address, stream)
FREES(CUresult, cuMemFreeAsync_ptsz, (CUdeviceptr address, CUstream stream), address, address, stream)

/* ---- physical memory ---- */

CUresult tms_counted_create(const void *caller, CUmemGenericAllocationHandle *handle, size_t bytes,
                            const CUmemAllocationProp *properties, unsigned long long flags) {
    tms_count_t count = tms_count_begin(caller);
    tms_ledger_t *ledger = tms_count_ledger(&count);
    CUresult result;
    TMS_CALL_REAL(result, count.state, cuMemCreate, handle, bytes, properties, flags);
    if (ledger && result == CUDA_SUCCESS && properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        tms_ledger_add_handle(ledger, count.caller, properties->location.id, *handle, bytes);
    tms_count_end(&count);
    return result;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    return tms_counted_create(CALLER, handle, bytes, properties, flags);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    tms_count_t count = tms_count_begin(NULL);
    tms_ledger_t *ledger = tms_count_ledger(&count);
    tms_ledger_taken_t taken = {TMS_NO_RECORD};
    CUresult result;
    if (ledger) taken = tms_ledger_take_handle(ledger, handle);
    TMS_CALL_REAL(result, count.state, cuMemRelease, handle);
    tms_count_settle(&count, taken, result == CUDA_SUCCESS);
    tms_count_end(&count);
    return result;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    tms_count_t count = tms_count_begin(NULL);
    tms_ledger_t *ledger = tms_count_ledger(&count);
    CUresult result;
    TMS_CALL_REAL(result, count.state, cuMemRetainAllocationHandle, handle, address);
    if (ledger && result == CUDA_SUCCESS) tms_ledger_retain_handle(ledger, *handle);
    tms_count_end(&count);
    return result;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    tms_count_t count = tms_count_begin(NULL);
    tms_ledger_t *ledger = tms_count_ledger(&count);
    CUresult result;
    TMS_CALL_REAL(result, count.state, cuMemMap, address, bytes, offset, handle, flags);
    if (ledger && result == CUDA_SUCCESS) tms_ledger_map(ledger, address, bytes, handle);
    tms_count_end(&count);
    return result;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    tms_count_t count = tms_count_begin(NULL);
    tms_ledger_t *ledger = tms_count_ledger(&count);
    tms_ledger_taken_t taken = {TMS_NO_RECORD};
    CUresult result;
    if (ledger) taken = tms_ledger_take_mappings(ledger, address, bytes);
    TMS_CALL_REAL(result, count.state, cuMemUnmap, address, bytes);
    tms_count_settle(&count, taken, result == CUDA_SUCCESS);
    tms_count_end(&count);
    return result;
}
