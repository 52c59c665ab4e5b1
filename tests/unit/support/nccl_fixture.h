/* Shared by the tests of the simulated GPU's NCCL: ranks on devices of one process, each with a stream and memory. */
#ifndef TMS_TESTS_NCCL_FIXTURE_H
#define TMS_TESTS_NCCL_FIXTURE_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "simulated_cuda.h"

enum { RANKS = 3, MORE_DEVICES = 4, NON_BLOCKING_STREAM = 1 };

#define ASSERT_NCCL(call) assert_nccl((call), __LINE__)

static void assert_nccl(sim_nccl_result_t result, int line) {
    if (result != SIM_NCCL_SUCCESS) fail_msg("line %d: result %d: %s", line, (int)result, CALL(ncclGetLastError, NULL));
}

/* A rank of this process. */
typedef struct rank {
    sim_nccl_handle_t comm;
    CUstream stream;
    uint8_t *source, *destination; /* of `bytes` each */
    size_t bytes;
} rank_t;

static int setup_more_gpus(void **state) {
    CUcontext context = NULL;
    (void)state;
    CALL(reset, MORE_DEVICES, DEVICE_MEMORY);
    ASSERT_CUDA(CALL(cuInit, 0));
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxRetain, &context, 0));
    ASSERT_CUDA(CALL(cuCtxPushCurrent_v2, context));
    return 0;
}

static inline void make_ranks(rank_t *ranks, int count, size_t bytes) {
    sim_nccl_handle_t comms[TMS_SIM_MAX_DEVICES];
    ASSERT_NCCL(CALL(ncclCommInitAll, comms, count, NULL));
    for (int i = 0; i < count; i++) {
        rank_t *rank = &ranks[i];
        rank->comm = comms[i];
        rank->bytes = bytes;
        ASSERT_CUDA(CALL(cudaSetDevice, i));
        ASSERT_CUDA(CALL(cudaStreamCreateWithFlags, &rank->stream, NON_BLOCKING_STREAM));
        ASSERT_CUDA(CALL(cudaMalloc, (void **)&rank->source, bytes));
        ASSERT_CUDA(CALL(cudaMalloc, (void **)&rank->destination, bytes));
        memset(rank->destination, 0xee, bytes);
    }
    ASSERT_CUDA(CALL(cudaSetDevice, 0));
}

static inline void synchronize(const rank_t *ranks, int count) {
    for (int i = 0; i < count; i++) ASSERT_CUDA(CALL(cudaStreamSynchronize, ranks[i].stream));
}

static inline void drop_ranks(rank_t *ranks, int count) {
    for (int i = 0; i < count; i++) {
        if (ranks[i].comm) ASSERT_NCCL(CALL(ncclCommDestroy, ranks[i].comm));
        ASSERT_CUDA(CALL(cudaStreamDestroy, ranks[i].stream));
        ASSERT_CUDA(CALL(cudaFree, ranks[i].source));
        ASSERT_CUDA(CALL(cudaFree, ranks[i].destination));
    }
}

static inline sim_nccl_result_t async_error(const rank_t *rank) {
    sim_nccl_result_t error = SIM_NCCL_RESULTS;
    ASSERT_NCCL(CALL(ncclCommGetAsyncError, rank->comm, &error));
    return error;
}

/* The error that another thread finds, once there is one; or none, once the work has completed. */
static inline sim_nccl_result_t await_error(const rank_t *rank) {
    sim_nccl_result_t error = SIM_NCCL_SUCCESS;
    while (error == SIM_NCCL_SUCCESS || error == SIM_NCCL_IN_PROGRESS) {
        bool done = CALL(cudaStreamQuery, rank->stream) == CUDA_SUCCESS;
        error = async_error(rank);
        if (done) break;
    }
    return error;
}

#endif
