/* Scenarios of test_ledger.py over ledger_runtime.c: functions of CUDA that the simulated GPU does not have. */

#include "support.h"

typedef struct pitched {
    void *address;
    size_t pitch, width, height;
} pitched_t;
typedef struct extent {
    size_t width, height, depth;
} extent_t;

#define ASYNC(suffix)                                                                                                       \
    int cudaMallocAsync##suffix(void **address, size_t bytes, void *stream);                                                \
    int cudaMallocFromPoolAsync##suffix(void **address, size_t bytes, void *pool, void *stream);                            \
    int cudaFreeAsync##suffix(void *address, void *stream);                                                                 \
    int cuMemAllocAsync##suffix(size_t *address, size_t bytes, void *stream);                                               \
    int cuMemAllocFromPoolAsync##suffix(size_t *address, size_t bytes, void *pool, void *stream);                           \
    int cuMemFreeAsync##suffix(size_t address, void *stream);
ASYNC()
ASYNC(_ptsz)
int cudaMallocPitch(void **address, size_t *pitch, size_t width, size_t height);
int cudaMalloc3D(pitched_t *pitched, extent_t extent);
int cuMemAllocPitch_v2(size_t *address, size_t *pitch, size_t width, size_t height, unsigned int element);
void *stub_last_stream(void);
void *stub_last_pool(void);

enum { OF_RUNTIME = 3, OF_DRIVER = 4 }; /* the device that each reports */

static void expect(int device, size_t bytes, size_t allocations) {
    tms_library_info_t rows[2];
    EQUAL(API()->libraries(rows, 2), allocations ? 1 : 0);
    if (allocations == 0) return;
    CHECK(strstr(rows[0].path, "/ledger_stub") != NULL);
    EQUAL(rows[0].device, device);
    EQUAL(rows[0].bytes, bytes);
    EQUAL(rows[0].allocations, allocations);
}

static char stream, pool;

#define ROUND(suffix)                                                                                                       \
    EQUAL(cudaMallocAsync##suffix(&address, 100, &stream), SUCCESS);                                                        \
    CHECK(stub_last_stream() == &stream && stub_last_pool() == NULL);                                                       \
    expect(OF_RUNTIME, 100, 1);                                                                                             \
    EQUAL(cudaMallocFromPoolAsync##suffix(&other, 50, &pool, &stream), SUCCESS);                                            \
    CHECK(stub_last_pool() == &pool);                                                                                       \
    expect(OF_RUNTIME, 150, 2);                                                                                             \
    EQUAL(cudaFreeAsync##suffix(address, &stream), SUCCESS);                                                                \
    EQUAL(cudaFree(other), SUCCESS);                                                                                        \
    expect(0, 0, 0);                                                                                                        \
    EQUAL(cuMemAllocAsync##suffix(&number, 10, &stream), SUCCESS);                                                          \
    expect(OF_DRIVER, 10, 1);                                                                                               \
    EQUAL(cuMemFreeAsync##suffix(0, &stream), INVALID_VALUE);                                                               \
    expect(OF_DRIVER, 10, 1);                                                                                               \
    EQUAL(cuMemFreeAsync##suffix(number, &stream), SUCCESS);                                                                \
    EQUAL(cuMemAllocFromPoolAsync##suffix(&number, 20, &pool, &stream), SUCCESS);                                           \
    expect(OF_DRIVER, 20, 1);                                                                                               \
    EQUAL(cuMemFreeAsync##suffix(number, &stream), SUCCESS);                                                                \
    expect(0, 0, 0)

static void in_stream_order(void) {
    void *address = NULL, *other = NULL;
    size_t number = 0;
    ROUND();
    ROUND(_ptsz);
}

static void pitched_memory(void) {
    pitched_t pitched;
    void *address = NULL;
    size_t number = 0, pitch = 0;
    EQUAL(cudaMallocPitch(&address, &pitch, 100, 3), SUCCESS);
    expect(OF_RUNTIME, 3 * 512, 1);
    EQUAL(cudaFree(address), SUCCESS);
    EQUAL(cudaMalloc3D(&pitched, (extent_t){100, 3, 5}), SUCCESS);
    EQUAL(pitched.height, 3);
    expect(OF_RUNTIME, 15 * 512, 1);
    EQUAL(cudaFree(pitched.address), SUCCESS);
    EQUAL(cuMemAllocPitch_v2(&number, &pitch, 600, 2, 8), SUCCESS);
    expect(OF_DRIVER, 2 * 1024, 1);
    EQUAL(cuMemFreeAsync(number, NULL), SUCCESS);
    expect(0, 0, 0);
}

MAIN(SCENARIO(in_stream_order), SCENARIO(pitched_memory))
