/* A driver without a GPU, for lookups_versions.c: functions of several versions of CUDA. Addresses are numbers. */
#include <stddef.h>
#include <string.h>

enum { STEP = 1 << 20, FOUND = 0, NOT_FOUND = 500, INVALID = 1, DEVICE = 4, PER_THREAD = 2, CUDA_12 = 12000, NEWER = 14000 };

static size_t next_address = STEP;
static const void *last_stream;

const void *driver_last_stream(void) { return last_stream; }

int cuCtxGetDevice(int *device) {
    *device = DEVICE;
    return 0;
}

/* The functions do not call each other, which the interposers would see. */
static int allocate(size_t *address, size_t bytes) {
    *address = next_address += STEP;
    return bytes ? 0 : INVALID;
}

int cuMemAlloc_v2(size_t *address, size_t bytes) { return allocate(address, bytes); }
/* The first version has other parameters. */
int cuMemAlloc(unsigned int *address, unsigned int bytes) {
    *address = bytes;
    return 0;
}
int cuMemFree_v2(size_t address) { return address ? 0 : INVALID; }

int cuMemAllocAsync(size_t *address, size_t bytes, void *stream) {
    last_stream = stream;
    return allocate(address, bytes);
}
int cuMemAllocAsync_ptsz(size_t *address, size_t bytes, void *stream) {
    last_stream = stream ? stream : "per thread";
    return allocate(address, bytes);
}
/* So does this one of a version that is not known yet. */
int cuMemAllocAsync_v2(size_t *address, void *stream, size_t bytes) {
    last_stream = stream;
    return allocate(address, bytes);
}

int cuGetProcAddress(const char *symbol, void **function, int version, unsigned long flags);
int cuGetProcAddress_v2(const char *symbol, void **function, int version, unsigned long flags, int *status);

static int find(const char *symbol, void **function, int version, unsigned long flags) {
    *function = NULL;
    if (strcmp(symbol, "cuMemAlloc") == 0) *function = version < 3020 ? (void *)cuMemAlloc : (void *)cuMemAlloc_v2;
    if (strcmp(symbol, "cuMemFree") == 0) *function = (void *)cuMemFree_v2;
    if (strcmp(symbol, "cuCtxGetDevice") == 0) *function = (void *)cuCtxGetDevice;
    if (strcmp(symbol, "cuMemAllocAsync") == 0)
        *function = version >= NEWER     ? (void *)cuMemAllocAsync_v2
                    : flags & PER_THREAD ? (void *)cuMemAllocAsync_ptsz
                                         : (void *)cuMemAllocAsync;
    if (strcmp(symbol, "cuGetProcAddress") == 0)
        *function = version < CUDA_12 ? (void *)cuGetProcAddress : (void *)cuGetProcAddress_v2;
    return *function ? FOUND : NOT_FOUND;
}

int cuGetProcAddress(const char *symbol, void **function, int version, unsigned long flags) {
    return find(symbol, function, version, flags);
}

int cuGetProcAddress_v2(const char *symbol, void **function, int version, unsigned long flags, int *status) {
    int result = find(symbol, function, version, flags);
    if (status) *status = result == FOUND ? 0 : 1;
    return result;
}
