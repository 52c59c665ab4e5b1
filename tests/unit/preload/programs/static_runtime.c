/* The part of a CUDA runtime that static_main.c uses, to be linked into it in place of libcudart_static.a. As in that one,
 * the functions are hidden, and the driver is opened by its name at the first call. */

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { NO_DRIVER = 35 };

#pragma GCC visibility push(hidden)

int cudaMalloc(void **address, size_t bytes);
int cudaFree(void *address);
int cudaMemset(void *address, int value, size_t bytes);
int cudaMemcpy(void *destination, const void *source, size_t bytes, int kind);

static struct {
    int (*cuInit)(unsigned int);
    int (*cuDevicePrimaryCtxRetain)(void **, int);
    int (*cuCtxSetCurrent)(void *);
    int (*cuMemAlloc_v2)(uint64_t *, size_t);
    int (*cuMemFree_v2)(uint64_t);
    int (*cuMemsetD8_v2)(uint64_t, unsigned char, size_t);
    int (*cuMemcpyDtoH_v2)(void *, uint64_t, size_t);
} driver;

static int start(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *context = NULL;
    if (!library) return NO_DRIVER;
#define FIND(name) *(void **)&driver.name = dlsym(library, #name)
    FIND(cuInit);
    FIND(cuDevicePrimaryCtxRetain);
    FIND(cuCtxSetCurrent);
    FIND(cuMemAlloc_v2);
    FIND(cuMemFree_v2);
    FIND(cuMemsetD8_v2);
    FIND(cuMemcpyDtoH_v2);
    int result = driver.cuInit(0);
    if (result == 0) result = driver.cuDevicePrimaryCtxRetain(&context, 0);
    return result == 0 ? driver.cuCtxSetCurrent(context) : result;
}

int cudaMalloc(void **address, size_t bytes) {
    uint64_t allocated = 0;
    int result = driver.cuInit ? 0 : start();
    if (result == 0) result = driver.cuMemAlloc_v2(&allocated, bytes);
    if (result == 0) *address = (void *)(uintptr_t)allocated;
    return result;
}

int cudaFree(void *address) { return driver.cuMemFree_v2((uintptr_t)address); }

int cudaMemset(void *address, int value, size_t bytes) {
    return driver.cuMemsetD8_v2((uintptr_t)address, (unsigned char)value, bytes);
}

/* From the device to the host, whatever the kind. */
int cudaMemcpy(void *destination, const void *source, size_t bytes, int kind) {
    (void)kind;
    return driver.cuMemcpyDtoH_v2(destination, (uintptr_t)source, bytes);
}

#pragma GCC visibility pop
