/* A library that reaches the driver as NCCL does, for lookups.c: by dlopen, dlsym and cuGetProcAddress, never through the
 * dynamic linker. Compiled more than once, under several names. */
#include <cuda.h>
#undef cuGetProcAddress

#include <pthread.h>
#include <stdlib.h>

#include "support.h"

typedef CUresult (*get_proc_address_t)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);

static get_proc_address_t get_proc_address;

static void *find(const char *name) {
    void *function = NULL;
    CUdriverProcAddressQueryResult status;
    EQUAL(get_proc_address(name, &function, CUDA_VERSION, 0, &status), CUDA_SUCCESS);
    EQUAL(status, CU_GET_PROC_ADDRESS_SUCCESS);
    return function;
}

#define DRIVER(name) ((__typeof__(&name))find(#name))

/* Finds the driver, and makes a context of device 0 current. */
void library_start(void) {
    CUcontext context;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    CHECK(driver != NULL);
    get_proc_address = (get_proc_address_t)dlsym(driver, "cuGetProcAddress_v2");
    CHECK(get_proc_address != NULL);
    get_proc_address = (get_proc_address_t)find("cuGetProcAddress");
    EQUAL(((CUresult (*)(unsigned int))find("cuInit"))(0), CUDA_SUCCESS);
    EQUAL(((CUresult (*)(CUcontext *, CUdevice))find("cuDevicePrimaryCtxRetain"))(&context, 0), CUDA_SUCCESS);
    EQUAL(((CUresult (*)(CUcontext))find("cuCtxSetCurrent"))(context), CUDA_SUCCESS);
}

/* The results are used after the calls, so that these are no jumps whose return address is the caller's. */
CUdeviceptr library_allocate(size_t bytes) {
    CUdeviceptr address = 0;
    EQUAL(((CUresult (*)(CUdeviceptr *, size_t))find("cuMemAlloc"))(&address, bytes), CUDA_SUCCESS);
    return address;
}

void library_free(CUdeviceptr address) { EQUAL(((CUresult (*)(CUdeviceptr))find("cuMemFree"))(address), CUDA_SUCCESS); }

CUmemGenericAllocationHandle library_create(size_t bytes) {
    CUmemGenericAllocationHandle handle = 0;
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    EQUAL(DRIVER(cuMemCreate)(&handle, bytes, &properties, 0), CUDA_SUCCESS);
    return handle;
}

CUdeviceptr library_map(CUmemGenericAllocationHandle handle, size_t bytes) {
    CUdeviceptr address = 0;
    EQUAL(DRIVER(cuMemAddressReserve)(&address, bytes, 0, 0, 0), CUDA_SUCCESS);
    EQUAL(DRIVER(cuMemMap)(address, bytes, 0, handle, 0), CUDA_SUCCESS);
    return address;
}

void library_release(CUmemGenericAllocationHandle handle) { EQUAL(DRIVER(cuMemRelease)(handle), CUDA_SUCCESS); }

void library_unmap(CUdeviceptr address, size_t bytes) {
    EQUAL(DRIVER(cuMemUnmap)(address, bytes), CUDA_SUCCESS);
    EQUAL(DRIVER(cuMemAddressFree)(address, bytes), CUDA_SUCCESS);
}

/* ---- a library that is loaded while another one is in use ---- */

typedef void (*round_t)(void);

static void *run(void *round) {
    (*(round_t *)round)();
    return NULL;
}

/* The loader holds its main lock here. ROUND is the address of a function that uses the other library. */
__attribute__((constructor)) static void constructed(void) {
    pthread_t thread;
    const char *address = getenv("ROUND");
    if (!address) return;
    round_t round = (round_t)(uintptr_t)strtoull(address, NULL, 0);
    EQUAL(pthread_create(&thread, NULL, run, &round), 0);
    EQUAL(pthread_join(thread, NULL), 0);
}
