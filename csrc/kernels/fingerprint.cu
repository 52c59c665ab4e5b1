/* The kernel that computes fingerprints (csrc/include/tms_fingerprint.h). One block of threads computes those of
 * TMS_FINGERPRINT_GROUP chunks.
 *
 * tms_fingerprint(chunks, count, results): `chunks` and `results` are arrays of `count` elements, which may lie in pinned
 * host memory. The grid has count / TMS_FINGERPRINT_GROUP blocks, rounded up. The module's global `tms_fingerprint_key` has
 * the key. No local memory is used; tests/unit/tools/test_compile_kernels.py checks that. */
#include "tms_fingerprint.h"

extern "C" {
__device__ __align__(16) tms_fingerprint_key_t tms_fingerprint_key;
}

static __device__ __forceinline__ uint64_t product(uint4 vector, uint4 key) {
    return (uint64_t)(vector.x + key.x) * (vector.y + key.y) + (uint64_t)(vector.z + key.z) * (vector.w + key.w);
}

static __device__ __forceinline__ uint64_t sum_of_warp(uint64_t value) {
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_down_sync(0xffffffffu, value, distance);
    return value;
}

static __device__ __forceinline__ uint64_t finalized(uint64_t sum) {
    sum = (sum ^ (sum >> 30)) * TMS_FINGERPRINT_MIX_1;
    sum = (sum ^ (sum >> 27)) * TMS_FINGERPRINT_MIX_2;
    return sum ^ (sum >> 31);
}

static __device__ __forceinline__ uint32_t reduced(const uint64_t *totals, const uint64_t *mix) {
    uint64_t sum = mix[2 * TMS_FINGERPRINT_SUMS];
#pragma unroll
    for (int t = 0; t < TMS_FINGERPRINT_SUMS; t++) {
        const uint64_t total = finalized(totals[t]);
        sum += mix[2 * t] * (uint32_t)total + mix[2 * t + 1] * (total >> 32);
    }
    return (uint32_t)(sum >> 32);
}

extern "C" __global__ void __launch_bounds__(TMS_FINGERPRINT_THREADS, 2)
    tms_fingerprint(const tms_fingerprint_chunk_t *chunks, uint32_t count, tms_fingerprint_t *results) {
    enum { WARP = 32, WARPS = TMS_FINGERPRINT_THREADS / WARP, AHEAD = 2 };
    __shared__ uint64_t partial[WARPS][TMS_FINGERPRINT_GROUP][TMS_FINGERPRINT_SUMS];
    const uint4 *keys = (const uint4 *)tms_fingerprint_key.vectors;
    const uint32_t first = blockIdx.x * TMS_FINGERPRINT_GROUP;
    uint64_t sums[TMS_FINGERPRINT_GROUP][TMS_FINGERPRINT_SUMS] = {};
    uint64_t address[TMS_FINGERPRINT_GROUP];
    uint32_t vectors[TMS_FINGERPRINT_GROUP], least = TMS_FINGERPRINT_VECTORS, most = 0;
#pragma unroll
    for (int c = 0; c < TMS_FINGERPRINT_GROUP; c++) {
        const bool exists = first + c < count;
        address[c] = exists ? chunks[first + c].address : 0;
        vectors[c] = exists ? (uint32_t)chunks[first + c].bytes / TMS_FINGERPRINT_VECTOR_BYTES : 0;
        least = min(least, vectors[c]);
        most = max(most, vectors[c]);
    }
    /* Without conditions the loads of all chunks, and of AHEAD places of each, are in flight together. */
    uint32_t place = threadIdx.x;
    for (; place + (AHEAD - 1) * TMS_FINGERPRINT_THREADS < least; place += AHEAD * TMS_FINGERPRINT_THREADS) {
        uint4 vector[AHEAD][TMS_FINGERPRINT_GROUP];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
#pragma unroll
            for (int c = 0; c < TMS_FINGERPRINT_GROUP; c++)
                vector[a][c] = __ldcs((const uint4 *)address[c] + place + a * TMS_FINGERPRINT_THREADS);
        }
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
#pragma unroll
            for (int t = 0; t < TMS_FINGERPRINT_SUMS; t++) {
                const uint4 key = keys[place + a * TMS_FINGERPRINT_THREADS + t];
#pragma unroll
                for (int c = 0; c < TMS_FINGERPRINT_GROUP; c++) sums[c][t] += product(vector[a][c], key);
            }
        }
    }
    /* The rest of chunks of different lengths, and of a group that is not full. */
    for (; place < most; place += TMS_FINGERPRINT_THREADS) {
        uint4 vector[TMS_FINGERPRINT_GROUP];
#pragma unroll
        for (int c = 0; c < TMS_FINGERPRINT_GROUP; c++) {
            if (place < vectors[c]) vector[c] = __ldcs((const uint4 *)address[c] + place);
        }
#pragma unroll
        for (int t = 0; t < TMS_FINGERPRINT_SUMS; t++) {
            const uint4 key = keys[place + t];
#pragma unroll
            for (int c = 0; c < TMS_FINGERPRINT_GROUP; c++) {
                if (place < vectors[c]) sums[c][t] += product(vector[c], key);
            }
        }
    }
#pragma unroll
    for (int c = 0; c < TMS_FINGERPRINT_GROUP; c++) {
#pragma unroll
        for (int t = 0; t < TMS_FINGERPRINT_SUMS; t++) {
            const uint64_t sum = sum_of_warp(sums[c][t]);
            if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP][c][t] = sum;
        }
    }
    __syncthreads();
    const uint32_t own = threadIdx.x / TMS_FINGERPRINT_WORDS, word = threadIdx.x % TMS_FINGERPRINT_WORDS;
    if (own >= TMS_FINGERPRINT_GROUP || first + own >= count) return;
    uint64_t totals[TMS_FINGERPRINT_SUMS] = {};
#pragma unroll
    for (int t = 0; t < TMS_FINGERPRINT_SUMS; t++) {
        for (int warp = 0; warp < WARPS; warp++) totals[t] += partial[warp][own][t];
    }
    results[first + own].words[word] = reduced(totals, tms_fingerprint_key.mix[word]);
}
