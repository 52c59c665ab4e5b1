/* A thread of the program that captures without announcing it to the library. */
#ifndef TMS_TEST_CAPTURER_H
#define TMS_TEST_CAPTURER_H

#include <pthread.h>
#include <string.h>

#include "simulated_cuda.h"

typedef struct capturer {
    CUstreamCaptureMode mode;
    pthread_barrier_t step; /* both threads pass it: begun, then to be ended */
    pthread_t thread;
    CUstream stream;
    CUresult begun, ended;
    bool has_graph;
} capturer_t;

static void *capture_until_told(void *argument) {
    capturer_t *capturer = argument;
    CUcontext context = NULL;
    CUgraph graph = NULL;
    capturer->begun = CALL(cuDevicePrimaryCtxRetain, &context, 0);
    if (capturer->begun == CUDA_SUCCESS) capturer->begun = CALL(cuCtxPushCurrent_v2, context);
    if (capturer->begun == CUDA_SUCCESS) capturer->begun = CALL(cuStreamCreate, &capturer->stream, CU_STREAM_NON_BLOCKING);
    if (capturer->begun == CUDA_SUCCESS) capturer->begun = CALL(cuStreamBeginCapture_v2, capturer->stream, capturer->mode);
    (void)pthread_barrier_wait(&capturer->step);
    (void)pthread_barrier_wait(&capturer->step);
    capturer->ended = CALL(cuStreamEndCapture, capturer->stream, &graph);
    capturer->has_graph = graph != NULL;
    if (graph) (void)CALL(cuGraphDestroy, graph);
    (void)CALL(cuStreamDestroy_v2, capturer->stream);
    (void)CALL(cuDevicePrimaryCtxRelease_v2, 0);
    return NULL;
}

/* Returns once the capture is in flight. */
static void begin_unseen(capturer_t *capturer, CUstreamCaptureMode mode) {
    memset(capturer, 0, sizeof *capturer);
    capturer->mode = mode;
    assert_int_equal(pthread_barrier_init(&capturer->step, NULL, 2), 0);
    assert_int_equal(pthread_create(&capturer->thread, NULL, capture_until_told, capturer), 0);
    (void)pthread_barrier_wait(&capturer->step);
    ASSERT_CUDA(capturer->begun);
}

/* The result of the end; there is a graph only on success. */
static CUresult end_unseen(capturer_t *capturer) {
    (void)pthread_barrier_wait(&capturer->step);
    assert_int_equal(pthread_join(capturer->thread, NULL), 0);
    assert_int_equal(pthread_barrier_destroy(&capturer->step), 0);
    assert_int_equal(capturer->has_graph, capturer->ended == CUDA_SUCCESS);
    return capturer->ended;
}

#endif
