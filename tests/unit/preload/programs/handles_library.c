/* A library that looks up the driver's virtual memory management as PyTorch's do, for handles.c. Compiled twice: as
 * libc10_cuda.so, which has PyTorch's allocator, and under another name. */
#include <cuda.h>

#include "support.h"

int cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags, int *result);
int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned int version, unsigned long long flags,
                                     int *result);

enum { VERSION = 12000 };

/* The functions that another library has looked up are used as PyTorch's libraries share one table. */
void *library_find(const char *symbol, bool by_version) {
    void *function = NULL;
    int result = -1;
    if (by_version)
        EQUAL(cudaGetDriverEntryPointByVersion(symbol, &function, VERSION, 0, &result), SUCCESS);
    else
        EQUAL(cudaGetDriverEntryPoint(symbol, &function, 0, &result), SUCCESS);
    EQUAL(result, 0);
    CHECK(function != NULL);
    return function;
}

/* The result is used after the call, so that this is no jump whose return address is the caller's. */
CUresult library_create(void *create, CUmemGenericAllocationHandle *handle, size_t bytes, int types) {
    const CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                            .requestedHandleTypes = (CUmemAllocationHandleType)types,
                                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    *handle = 0;
    CUresult result = ((__typeof__(&cuMemCreate))create)(handle, bytes, &properties, 0);
    CHECK((result == CUDA_SUCCESS) == (*handle != 0));
    return result;
}
