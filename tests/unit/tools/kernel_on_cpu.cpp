/* The fingerprint kernel, compiled for the CPU: each thread of a block is a thread of the process. `launch` runs the whole
 * grid. */
#include <pthread.h>
#include <stdint.h>

#include <algorithm>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(...)
using std::max;
using std::min;

struct uint4 {
    uint32_t x, y, z, w;
};
struct dim3 {
    uint32_t x;
};
static thread_local dim3 threadIdx, blockIdx;

enum { WARP_THREADS = 32, MOST_THREADS = 1024 };
static pthread_barrier_t block_barrier, warp_barriers[MOST_THREADS / WARP_THREADS];
static uint64_t lanes[MOST_THREADS];

static uint4 __ldcs(const uint4 *address) { return *address; }
static void __syncthreads() { pthread_barrier_wait(&block_barrier); }

/* The value of the lane `distance` above; a lane without one keeps its own. */
static uint64_t __shfl_down_sync(uint32_t, uint64_t value, int distance) {
    const uint32_t thread = threadIdx.x, warp = thread / WARP_THREADS;
    lanes[thread] = value;
    pthread_barrier_wait(&warp_barriers[warp]);
    const uint32_t from = thread + distance;
    const uint64_t result = from / WARP_THREADS == warp ? lanes[from] : value;
    pthread_barrier_wait(&warp_barriers[warp]);
    return result;
}

#include "kernels/fingerprint.cu"

extern "C" void launch(const void *key, const tms_fingerprint_chunk_t *chunks, uint32_t count, tms_fingerprint_t *results) {
    const uint32_t threads = TMS_FINGERPRINT_THREADS, blocks = (count + TMS_FINGERPRINT_GROUP - 1) / TMS_FINGERPRINT_GROUP;
    tms_fingerprint_key = *static_cast<const tms_fingerprint_key_t *>(key);
    pthread_barrier_init(&block_barrier, nullptr, threads);
    for (uint32_t warp = 0; warp < threads / WARP_THREADS; warp++)
        pthread_barrier_init(&warp_barriers[warp], nullptr, WARP_THREADS);
    std::vector<std::thread> all;
    for (uint32_t thread = 0; thread < threads; thread++) {
        all.emplace_back([=] {
            for (uint32_t block = 0; block < blocks; block++) {
                threadIdx.x = thread;
                blockIdx.x = block;
                tms_fingerprint(chunks, count, results);
                __syncthreads(); /* the next block uses the same shared memory */
            }
        });
    }
    for (std::thread &thread : all) thread.join();
}
