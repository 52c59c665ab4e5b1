/* Guards the simulated GPU's captures against calls of another thread: each call has the effect that tests/conformance
 * recorded on a real GPU. */
#include <pthread.h>

#include "simulated_cuda.h"

enum { COPIED_BYTES = 4096 };

/* Objects that the calls use; `other` is a stream that is not captured. */
static struct {
    CUcontext context;
    CUstream other;
    CUevent event;
    CUdeviceptr address;
    void *pinned;
    char pageable[COPIED_BYTES];
    char registered[COPIED_BYTES];
} things;

static CUresult synchronize_context(void) { return CALL(cuCtxSynchronize); }
static CUresult synchronize_stream(void) { return CALL(cuStreamSynchronize, things.other); }
static CUresult query_stream(void) { return CALL(cuStreamQuery, things.other); }
static CUresult synchronize_event(void) { return CALL(cuEventSynchronize, things.event); }
static CUresult query_event(void) { return CALL(cuEventQuery, things.event); }
static CUresult copy_pageable_out(void) {
    return CALL(cuMemcpyDtoHAsync_v2, things.pageable, things.address, COPIED_BYTES, things.other);
}
static CUresult copy_pageable_in(void) {
    return CALL(cuMemcpyHtoDAsync_v2, things.address, things.pageable, COPIED_BYTES, things.other);
}
static CUresult copy_pinned_out(void) {
    return CALL(cuMemcpyDtoHAsync_v2, things.pinned, things.address, COPIED_BYTES, things.other);
}
static CUresult copy_at_once(void) { return CALL(cuMemcpyDtoH_v2, things.pageable, things.address, COPIED_BYTES); }
static CUresult fill(void) { return CALL(cuMemsetD8Async, things.address, 1, COPIED_BYTES, things.other); }
static CUresult pin_and_unpin(void) {
    CUresult result = CALL(cuMemHostRegister_v2, things.registered, COPIED_BYTES, 0);
    return result == CUDA_SUCCESS ? CALL(cuMemHostUnregister, things.registered) : result;
}
static CUresult map_and_unmap(void) {
    block_t block = make_block(0, GRANULE);
    drop_block(&block);
    return CUDA_SUCCESS;
}

/* The captures of other threads that a call invalidates. */
typedef enum fatal {
    TO_NONE,
    TO_GLOBAL, /* unless the calling thread's mode is relaxed */
    TO_ALL
} fatal_t;

static const struct {
    CUresult (*call)(void);
    fatal_t fatal;
} calls[] = {
    {synchronize_context, TO_ALL},
    {synchronize_stream, TO_GLOBAL},
    {query_stream, TO_GLOBAL},
    {synchronize_event, TO_GLOBAL},
    {query_event, TO_GLOBAL},
    {copy_pageable_out, TO_NONE},
    {copy_pageable_in, TO_NONE},
    {pin_and_unpin, TO_GLOBAL},
    {copy_pinned_out, TO_NONE},
    {copy_at_once, TO_NONE},
    {fill, TO_NONE},
    {map_and_unmap, TO_NONE},
};

typedef struct caller {
    CUresult (*call)(void);
    CUstreamCaptureMode mode; /* of the calling thread */
    CUresult result;
} caller_t;

static void *call_there(void *argument) {
    caller_t *caller = argument;
    CUstreamCaptureMode mode = caller->mode;
    caller->result = CALL(cuCtxPushCurrent_v2, things.context);
    if (caller->result == CUDA_SUCCESS) caller->result = CALL(cuThreadExchangeStreamCaptureMode, &mode);
    if (caller->result == CUDA_SUCCESS) caller->result = caller->call();
    return NULL;
}

static void check(CUresult (*call)(void), CUstreamCaptureMode capture, CUstreamCaptureMode mode, bool fatal) {
    caller_t caller = {.call = call, .mode = mode};
    CUstream stream = NULL;
    CUgraph graph = NULL;
    pthread_t thread;
    ASSERT_CUDA(CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING));
    ASSERT_CUDA(CALL(cuStreamBeginCapture_v2, stream, capture));
    assert_int_equal(pthread_create(&thread, NULL, call_there, &caller), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(caller.result, fatal ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS);
    ASSERT_RESULT(fatal ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS, CALL(cuStreamEndCapture, stream, &graph));
    if (graph) ASSERT_CUDA(CALL(cuGraphDestroy, graph));
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
}

static void calls_of_another_thread_match_the_recorded_gpu(void **state) {
    static const CUstreamCaptureMode captures[] = {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
                                                   CU_STREAM_CAPTURE_MODE_RELAXED};
    block_t block = make_block(0, GRANULE);
    (void)state;
    things.address = block.address;
    ASSERT_CUDA(CALL(cuCtxGetCurrent, &things.context));
    ASSERT_CUDA(CALL(cuStreamCreate, &things.other, CU_STREAM_NON_BLOCKING));
    ASSERT_CUDA(CALL(cuEventCreate, &things.event, CU_EVENT_DISABLE_TIMING));
    ASSERT_CUDA(CALL(cuEventRecord, things.event, things.other));
    ASSERT_CUDA(CALL(cuMemHostAlloc, &things.pinned, COPIED_BYTES, 0));
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        for (size_t j = 0; j < sizeof captures / sizeof *captures; j++) {
            bool global = captures[j] == CU_STREAM_CAPTURE_MODE_GLOBAL;
            check(calls[i].call, captures[j], CU_STREAM_CAPTURE_MODE_GLOBAL,
                  calls[i].fatal == TO_ALL || (calls[i].fatal == TO_GLOBAL && global));
            check(calls[i].call, captures[j], CU_STREAM_CAPTURE_MODE_RELAXED, calls[i].fatal == TO_ALL);
        }
    }
    ASSERT_CUDA(CALL(cuStreamSynchronize, things.other));
    ASSERT_CUDA(CALL(cuMemFreeHost, things.pinned));
    ASSERT_CUDA(CALL(cuEventDestroy_v2, things.event));
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, things.other));
    drop_block(&block);
}

static void a_primary_context_that_was_reset_has_another_identifier(void **state) {
    unsigned long long before = 0, again = 0, after = 0;
    CUcontext context = NULL, of_stream = NULL;
    CUstream stream = NULL;
    (void)state;
    ASSERT_CUDA(CALL(cuCtxGetCurrent, &context));
    ASSERT_CUDA(CALL(cuCtxGetId, NULL, &before));
    ASSERT_CUDA(CALL(cuCtxGetId, context, &again));
    assert_int_equal(before, again);
    ASSERT_CUDA(CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING));
    ASSERT_CUDA(CALL(cuStreamGetCtx, stream, &of_stream));
    assert_ptr_equal(of_stream, context);
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    ASSERT_RESULT(CUDA_ERROR_INVALID_HANDLE, CALL(cuStreamGetCtx, stream, &of_stream));
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxReset_v2, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_CONTEXT, CALL(cuCtxGetId, context, &after));
    assert_ptr_equal(retain_primary(0), context);
    ASSERT_CUDA(CALL(cuCtxGetId, context, &after));
    assert_int_not_equal(before, after);
}

int main(void) {
#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_gpu, teardown_gpus)
    const struct CMUnitTest tests[] = {
        ONE(calls_of_another_thread_match_the_recorded_gpu),
        ONE(a_primary_context_that_was_reset_has_another_identifier),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
