/* The yardstick of the benchmarks: the driver calls alone, in plain loops, with nothing around them.
 *
 * Compiled by driver_side.py with any C compiler when a benchmark runs, and called through ctypes, one call a loop. One
 * thread; one set of allocations at a time. Functions return a CUresult, or -1 where it is not the driver that failed. */
#include <cuda.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#include "tms.h"

#define EXPORT __attribute__((visibility("default")))
enum { FAILED = -1, NANOSECONDS_PER_SECOND = 1000000000 };

/* Name in the library, member, parameters. */
#define CALLS(X)                                                                                                            \
    X("cuInit", init, (unsigned))                                                                                           \
    X("cuDeviceGet", device_get, (CUdevice *, int))                                                                         \
    X("cuDeviceGetAttribute", device_get_attribute, (int *, CUdevice_attribute, CUdevice))                                  \
    X("cuDevicePrimaryCtxRetain", context_retain, (CUcontext *, CUdevice))                                                  \
    X("cuCtxSetCurrent", context_set_current, (CUcontext))                                                                  \
    X("cuMemAddressReserve", reserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long))                     \
    X("cuMemAddressFree", unreserve, (CUdeviceptr, size_t))                                                                 \
    X("cuMemCreate", create, (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long))     \
    X("cuMemRelease", release, (CUmemGenericAllocationHandle))                                                              \
    X("cuMemMap", map, (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long))                     \
    X("cuMemUnmap", unmap, (CUdeviceptr, size_t))                                                                           \
    X("cuMemSetAccess", set_access, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t))

static struct bare {
#define MEMBER(name, member, parameters) CUresult(CUDAAPI *member) parameters;
    CALLS(MEMBER)
#undef MEMBER
    CUmemAllocationProp properties;
    CUmemAccessDesc access;
    size_t count, bytes;
    CUdeviceptr *address;
    CUmemGenericAllocationHandle *handle;
    const tms_api_t *api;
} bare;

/* Loads the driver, makes the device's primary context current, and sets up properties like those of the library. */
EXPORT int bare_open(const char *driver, int ordinal, const tms_api_t *(*get_api)(uint32_t)) {
    void *library = dlopen(driver, RTLD_NOW);
    if (library == NULL) return FAILED;
#define RESOLVE(name, member, parameters)                                                                                   \
    *(void **)&bare.member = dlsym(library, name);                                                                          \
    if (bare.member == NULL) return FAILED;
    CALLS(RESOLVE)
#undef RESOLVE
    CUdevice device;
    CUcontext context;
    CUresult result = bare.init(0);
    if (result == CUDA_SUCCESS) result = bare.device_get(&device, ordinal);
    if (result == CUDA_SUCCESS) result = bare.context_retain(&context, device);
    if (result == CUDA_SUCCESS) result = bare.context_set_current(context);
    if (result != CUDA_SUCCESS) return result;
    int rdma = 0;
    result = bare.device_get_attribute(&rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device);
    if (result != CUDA_SUCCESS) return result;
    bare.properties = (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal},
    };
    bare.properties.allocFlags.gpuDirectRDMACapable = (unsigned char)(rdma != 0);
    bare.access = (CUmemAccessDesc){.location = bare.properties.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    bare.api = get_api == NULL ? NULL : get_api(TMS_API_VERSION);
    return get_api != NULL && bare.api == NULL ? FAILED : CUDA_SUCCESS;
}

/* What a resume has to do. */
EXPORT int bare_resume(void) {
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < bare.count && result == CUDA_SUCCESS; i++) {
        result = bare.create(&bare.handle[i], bare.bytes, &bare.properties, 0);
        if (result == CUDA_SUCCESS) result = bare.map(bare.address[i], bare.bytes, 0, bare.handle[i], 0);
        if (result == CUDA_SUCCESS) result = bare.set_access(bare.address[i], bare.bytes, &bare.access, 1);
    }
    return result;
}

/* What a pause has to do, on an idle device. */
EXPORT int bare_pause(void) {
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < bare.count && result == CUDA_SUCCESS; i++) {
        result = bare.unmap(bare.address[i], bare.bytes);
        if (result == CUDA_SUCCESS) result = bare.release(bare.handle[i]);
    }
    return result;
}

/* Reserves `count` ranges of `bytes` bytes, without memory. */
EXPORT int bare_make(size_t count, size_t bytes) {
    bare.address = calloc(count, sizeof *bare.address);
    bare.handle = calloc(count, sizeof *bare.handle);
    if (bare.address == NULL || bare.handle == NULL) return FAILED;
    CUresult result = CUDA_SUCCESS;
    bare.bytes = bytes;
    for (bare.count = 0; bare.count < count && result == CUDA_SUCCESS; bare.count++) {
        result = bare.reserve(&bare.address[bare.count], bytes, 0, 0, 0);
    }
    return result;
}

/* The reverse of bare_make; nothing may be mapped. */
EXPORT int bare_unmake(void) {
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < bare.count && result == CUDA_SUCCESS; i++) result = bare.unreserve(bare.address[i], bare.bytes);
    free(bare.address);
    free(bare.handle);
    bare.address = NULL;
    bare.handle = NULL;
    bare.count = 0;
    return result;
}

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * NANOSECONDS_PER_SECOND + (uint64_t)time.tv_nsec;
}

/* `count` allocations of `bytes` bytes by the driver alone, then their frees; nanoseconds of each loop. */
EXPORT int bare_allocate_and_free(size_t count, size_t bytes, uint64_t *allocate_ns, uint64_t *free_ns) {
    CUdeviceptr *address = calloc(count, sizeof *address);
    CUmemGenericAllocationHandle *handle = calloc(count, sizeof *handle);
    if (address == NULL || handle == NULL) {
        free(address);
        free(handle);
        return FAILED;
    }
    CUresult result = CUDA_SUCCESS;
    uint64_t start = now();
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++) {
        result = bare.reserve(&address[i], bytes, 0, 0, 0);
        if (result == CUDA_SUCCESS) result = bare.create(&handle[i], bytes, &bare.properties, 0);
        if (result == CUDA_SUCCESS) result = bare.map(address[i], bytes, 0, handle[i], 0);
        if (result == CUDA_SUCCESS) result = bare.set_access(address[i], bytes, &bare.access, 1);
    }
    uint64_t middle = now();
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++) {
        result = bare.unmap(address[i], bytes);
        if (result == CUDA_SUCCESS) result = bare.release(handle[i]);
        if (result == CUDA_SUCCESS) result = bare.unreserve(address[i], bytes);
    }
    *free_ns = now() - middle;
    *allocate_ns = middle - start;
    free(address);
    free(handle);
    return result;
}

/* The same through the library's C core. */
EXPORT int core_allocate_and_free(size_t count, size_t bytes, uint64_t *allocate_ns, uint64_t *free_ns) {
    uint64_t *address = calloc(count, sizeof *address);
    if (address == NULL) return FAILED;
    tms_status_t status = TMS_OK;
    uint64_t start = now();
    for (size_t i = 0; i < count && status == TMS_OK; i++) status = bare.api->allocate(bytes, -1, &address[i], NULL);
    uint64_t middle = now();
    for (size_t i = 0; i < count && status == TMS_OK; i++) status = bare.api->free(address[i], NULL);
    *free_ns = now() - middle;
    *allocate_ns = middle - start;
    free(address);
    return (int)status;
}
