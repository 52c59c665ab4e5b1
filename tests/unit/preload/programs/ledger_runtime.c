/* A CUDA runtime and driver in one library, without a GPU: addresses are numbers. Its runtime's functions call those of its
 * driver as other libraries do, so that interposed ones are called. The last call of each kind is remembered. */

#include <stddef.h>

typedef struct pitched {
    void *address;
    size_t pitch, width, height;
} pitched_t;
typedef struct extent {
    size_t width, height, depth;
} extent_t;

enum { PITCH = 512, STEP = 1 << 20, NOT_FOUND = 1 };

static size_t next_address = STEP;
static void *last_stream, *last_pool;

void *stub_last_stream(void) { return last_stream; }
void *stub_last_pool(void) { return last_pool; }

int cudaGetDevice(int *device) {
    *device = 3;
    return 0;
}

int cuCtxGetDevice(int *device) {
    *device = 4;
    return 0;
}

/* ---- the driver ---- */

static int allocate(size_t *address, void *stream, void *pool) {
    *address = next_address += STEP;
    last_stream = stream;
    last_pool = pool;
    return 0;
}

static int release(size_t address, void *stream) {
    last_stream = stream;
    return address ? 0 : NOT_FOUND;
}

int cuMemAllocPitch_v2(size_t *address, size_t *pitch, size_t width, size_t height, unsigned int element) {
    *pitch = (width + PITCH - 1) / PITCH * PITCH;
    return height && element ? allocate(address, NULL, NULL) : NOT_FOUND;
}

#define ASYNC(suffix)                                                                                                       \
    int cuMemAllocAsync##suffix(size_t *address, size_t bytes, void *stream) {                                              \
        return bytes ? allocate(address, stream, NULL) : NOT_FOUND;                                                         \
    }                                                                                                                       \
    int cuMemAllocFromPoolAsync##suffix(size_t *address, size_t bytes, void *pool, void *stream) {                          \
        return bytes ? allocate(address, stream, pool) : NOT_FOUND;                                                         \
    }                                                                                                                       \
    int cuMemFreeAsync##suffix(size_t address, void *stream) { return release(address, stream); }                           \
    /* ---- the runtime ---- */                                                                                             \
    int cudaMallocAsync##suffix(void **address, size_t bytes, void *stream) {                                               \
        return cuMemAllocAsync##suffix((size_t *)address, bytes, stream);                                                   \
    }                                                                                                                       \
    int cudaMallocFromPoolAsync##suffix(void **address, size_t bytes, void *pool, void *stream) {                           \
        /* A part of what the driver has given. */                                                                          \
        size_t whole = 0;                                                                                                   \
        int result = cuMemAllocFromPoolAsync##suffix(&whole, PITCH + bytes, pool, stream);                                  \
        *address = (void *)(whole + PITCH);                                                                                 \
        return result;                                                                                                      \
    }                                                                                                                       \
    int cudaFreeAsync##suffix(void *address, void *stream) { return cuMemFreeAsync##suffix((size_t)address, stream); }
ASYNC()
ASYNC(_ptsz)

int cudaMallocPitch(void **address, size_t *pitch, size_t width, size_t height) {
    return cuMemAllocPitch_v2((size_t *)address, pitch, width, height, 4);
}

int cudaMalloc3D(pitched_t *pitched, extent_t extent) {
    pitched->width = extent.width;
    pitched->height = extent.height;
    return cudaMallocPitch(&pitched->address, &pitched->pitch, extent.width, extent.height * extent.depth);
}

int cudaFree(void *address) { return cuMemFreeAsync((size_t)address, NULL); }
