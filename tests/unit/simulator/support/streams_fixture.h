/* Shared by the tests of the simulated GPU's streams. */
#ifndef TMS_TESTS_STREAMS_FIXTURE_H
#define TMS_TESTS_STREAMS_FIXTURE_H

#include <pthread.h>
#include <string.h>

#include "simulated_cuda.h"

enum { GATE = 1, OTHER_GATE = 2 };

static CUstream make_stream(unsigned flags) {
    CUstream stream = NULL;
    ASSERT_CUDA(CALL(cuStreamCreate, &stream, flags));
    return stream;
}

/* A thread that synchronises the context, for tests that watch it wait. */
typedef struct waiter {
    CUcontext context;
    CUresult result;
    uint8_t seen;
    CUdeviceptr address;
    pthread_t thread;
} waiter_t;

static void *synchronize(void *argument) {
    waiter_t *waiter = argument;
    waiter->result = CALL(cuCtxPushCurrent_v2, waiter->context);
    if (waiter->result == CUDA_SUCCESS) waiter->result = CALL(cuCtxSynchronize);
    waiter->seen = *(volatile uint8_t *)(uintptr_t)waiter->address;
    return NULL;
}

#endif
