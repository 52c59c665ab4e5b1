/* Guards the simulated GPU's stream captures: what becomes part of a graph, which calls are forbidden meanwhile, and the
 * result of an invalidated capture. */
#include <pthread.h>

#include "simulated_cuda.h"

static CUstream make_stream(unsigned flags) {
    CUstream stream = NULL;
    ASSERT_CUDA(CALL(cuStreamCreate, &stream, flags));
    return stream;
}

static CUstreamCaptureStatus status_of(CUstream stream) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    ASSERT_CUDA(CALL(cuStreamIsCapturing, stream, &status));
    return status;
}

/* A capture in this mode on a non-blocking stream of its own. */
static CUstream begin(CUstreamCaptureMode mode) {
    CUstream stream = make_stream(CU_STREAM_NON_BLOCKING);
    ASSERT_CUDA(CALL(cuStreamBeginCapture_v2, stream, mode));
    return stream;
}

/* Ends it with this result, and with a graph only on success. */
static void end(CUstream stream, CUresult expected) {
    CUgraph graph = NULL;
    assert_int_equal(status_of(stream), expected == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                                            ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                            : CU_STREAM_CAPTURE_STATUS_ACTIVE);
    ASSERT_RESULT(expected, CALL(cuStreamEndCapture, stream, &graph));
    assert_int_equal(graph != NULL, expected == CUDA_SUCCESS);
    if (graph) ASSERT_CUDA(CALL(cuGraphDestroy, graph));
    assert_int_equal(status_of(stream), CU_STREAM_CAPTURE_STATUS_NONE);
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
}

static CUstreamCaptureMode exchange(CUstreamCaptureMode mode) {
    ASSERT_CUDA(CALL(cuThreadExchangeStreamCaptureMode, &mode));
    return mode;
}

static void a_graph_replays_what_was_captured(void **state) {
    block_t block = make_block(0, GRANULE);
    CUstream stream = begin(CU_STREAM_CAPTURE_MODE_GLOBAL), other = make_stream(CU_STREAM_NON_BLOCKING);
    CUgraph graph = NULL;
    CUgraphExec executable = NULL;
    (void)state;
    ASSERT_CUDA(CALL(cuMemsetD8Async, block.address, 10, GRANULE, stream));
    ASSERT_CUDA(CALL(launch_add, stream, block.address, GRANULE / 2, 1, NO_GATE));
    ASSERT_CUDA(CALL(cuMemcpyDtoDAsync_v2, block.address + GRANULE - 8, block.address, 8, stream));
    ASSERT_CUDA(CALL(cuStreamEndCapture, stream, &graph));
    assert_bytes(block.address, GRANULE, TMS_SIM_POISON); /* nothing has run */
    ASSERT_CUDA(CALL(cuGraphInstantiateWithFlags, &executable, graph, 0));
    ASSERT_CUDA(CALL(cuGraphDestroy, graph));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuGraphDestroy, graph));
    for (int i = 0; i < 2; i++) {
        ASSERT_CUDA(CALL(cuMemsetD8Async, block.address, 0, GRANULE, other));
        ASSERT_CUDA(CALL(cuGraphLaunch, executable, other));
        ASSERT_CUDA(CALL(cuStreamSynchronize, other));
        assert_bytes(block.address, GRANULE / 2, 11);
        assert_bytes(block.address + GRANULE / 2, GRANULE / 2 - 8, 10);
        assert_bytes(block.address + GRANULE - 8, 8, 11);
    }
    ASSERT_CUDA(CALL(cuGraphExecDestroy, executable));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuGraphLaunch, executable, other));
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, other));
    drop_block(&block);
}

static void nodes_can_be_counted_during_the_capture(void **state) {
    static const CUgraphNodeType expected[] = {CU_GRAPH_NODE_TYPE_MEMSET, CU_GRAPH_NODE_TYPE_KERNEL,
                                               CU_GRAPH_NODE_TYPE_MEMCPY};
    block_t block = make_block(0, GRANULE);
    CUstream stream = begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUgraph graph = NULL;
    CUgraphNode nodes[3] = {NULL};
    size_t count = 0;
    (void)state;
    ASSERT_CUDA(CALL(cuMemsetD8Async, block.address, 10, GRANULE, stream));
    ASSERT_CUDA(CALL(launch_add, stream, block.address, GRANULE / 2, 1, NO_GATE));
    ASSERT_CUDA(CALL(cuMemcpyDtoDAsync_v2, block.address + GRANULE - 8, block.address, 8, stream));
    ASSERT_CUDA(CALL(cuStreamGetCaptureInfo_v2, stream, &status, NULL, &graph, NULL, NULL));
    assert_int_equal(status, CU_STREAM_CAPTURE_STATUS_ACTIVE);
    ASSERT_CUDA(CALL(cuGraphGetNodes, graph, NULL, &count));
    assert_int_equal(count, 3);
    ASSERT_CUDA(CALL(cuGraphGetNodes, graph, nodes, &count));
    for (size_t i = 0; i < count; i++) {
        CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
        ASSERT_CUDA(CALL(cuGraphNodeGetType, nodes[i], &type));
        assert_int_equal(type, expected[i]);
    }
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuGraphNodeGetType, nodes[0], NULL));
    end(stream, CUDA_SUCCESS);
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuGraphNodeGetType, nodes[0], &(CUgraphNodeType){0}));
    drop_block(&block);
}

static void replaying_over_unmapped_memory_faults(void **state) {
    block_t block = make_block(0, GRANULE);
    CUstream stream = begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
    CUgraph graph = NULL;
    CUgraphExec executable = NULL;
    (void)state;
    ASSERT_CUDA(CALL(launch_add, stream, block.address, GRANULE, 1, NO_GATE));
    ASSERT_CUDA(CALL(cuStreamEndCapture, stream, &graph));
    ASSERT_CUDA(CALL(cuGraphInstantiateWithFlags, &executable, graph, 0));
    unmap_block(&block);
    ASSERT_CUDA(CALL(cuGraphLaunch, executable, stream));
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, CALL(cuStreamSynchronize, stream));
    ASSERT_CUDA(CALL(cuMemAddressFree, block.address, GRANULE));
    ASSERT_CUDA(CALL(cuGraphExecDestroy, executable));
    ASSERT_CUDA(CALL(cuGraphDestroy, graph));
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxReset_v2, 0));
}

static void captures_begin_and_end_in_pairs(void **state) {
    CUstream stream = make_stream(CU_STREAM_NON_BLOCKING);
    CUgraph graph = NULL;
    (void)state;
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_STATE, CALL(cuStreamEndCapture, stream, &graph));
    ASSERT_RESULT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, CALL(cuStreamBeginCapture_v2, NULL, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuStreamBeginCapture_v2, stream, 3));
    ASSERT_CUDA(CALL(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_STATE, CALL(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    end(stream, CUDA_SUCCESS);
}

static void synchronizing_the_context_invalidates(void **state) {
    static const CUstreamCaptureMode modes[] = {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
                                                CU_STREAM_CAPTURE_MODE_RELAXED};
    block_t block = make_block(0, GRANULE);
    (void)state;
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        CUstream stream = begin(modes[i]);
        ASSERT_CUDA(CALL(launch_add, stream, block.address, 1, 1, NO_GATE));
        ASSERT_RESULT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, CALL(cuCtxSynchronize));
        ASSERT_RESULT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, CALL(launch_add, stream, block.address, 1, 1, NO_GATE));
        end(stream, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    drop_block(&block);
}

static void synchronizing_the_capturing_stream_invalidates(void **state) {
    CUstream stream = begin(CU_STREAM_CAPTURE_MODE_RELAXED), other = make_stream(CU_STREAM_NON_BLOCKING);
    (void)state;
    ASSERT_CUDA(CALL(cuStreamSynchronize, other));
    ASSERT_RESULT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, CALL(cuStreamSynchronize, stream));
    end(stream, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, other));
}

static void allocating_invalidates_unless_relaxed(void **state) {
    CUdeviceptr address = 0;
    void *host = NULL;
    (void)state;
    CUstream stream = begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
    ASSERT_RESULT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, CALL(cuMemAlloc_v2, &address, 1));
    assert_int_equal(usage_of(0).runtime_allocations, 0);
    end(stream, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

    stream = begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
    assert_int_equal(exchange(CU_STREAM_CAPTURE_MODE_RELAXED), CU_STREAM_CAPTURE_MODE_GLOBAL);
    ASSERT_CUDA(CALL(cuMemAlloc_v2, &address, 1));
    ASSERT_CUDA(CALL(cuMemHostAlloc, &host, 1, 0));
    ASSERT_CUDA(CALL(cuMemFreeHost, host));
    ASSERT_CUDA(CALL(cuMemFree_v2, address));
    assert_int_equal(exchange(CU_STREAM_CAPTURE_MODE_GLOBAL), CU_STREAM_CAPTURE_MODE_RELAXED);
    end(stream, CUDA_SUCCESS);

    stream = begin(CU_STREAM_CAPTURE_MODE_RELAXED);
    ASSERT_CUDA(CALL(cuMemAlloc_v2, &address, 1));
    ASSERT_CUDA(CALL(cuMemFree_v2, address));
    end(stream, CUDA_SUCCESS);

    stream = begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
    ASSERT_RESULT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, CALL(cuMemHostAlloc, &host, 1, 0));
    end(stream, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuThreadExchangeStreamCaptureMode, NULL));
}

static void virtual_memory_calls_are_allowed(void **state) {
    CUstream stream = begin(CU_STREAM_CAPTURE_MODE_GLOBAL), other = NULL;
    size_t available = 0, total = 0;
    (void)state;
    block_t block = make_block(0, GRANULE);
    ASSERT_CUDA(CALL(cuMemGetInfo_v2, &available, &total));
    ASSERT_CUDA(CALL(cuStreamCreate, &other, CU_STREAM_NON_BLOCKING));
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, other));
    drop_block(&block);
    end(stream, CUDA_SUCCESS);
}

/* An allocation by another thread, in that thread's mode. */
typedef struct other_thread {
    CUcontext context;
    CUstreamCaptureMode mode;
    CUresult result;
    CUstream ended; /* a capture that it tries to end instead */
} other_thread_t;

static void *allocate_there(void *argument) {
    other_thread_t *thread = argument;
    CUdeviceptr address = 0;
    CUgraph graph = NULL;
    CUstreamCaptureMode mode = thread->mode;
    thread->result = CALL(cuCtxPushCurrent_v2, thread->context);
    if (thread->result == CUDA_SUCCESS) thread->result = CALL(cuThreadExchangeStreamCaptureMode, &mode);
    if (thread->result != CUDA_SUCCESS) return NULL;
    if (thread->ended) {
        thread->result = CALL(cuStreamEndCapture, thread->ended, &graph);
        return NULL;
    }
    thread->result = CALL(cuMemAlloc_v2, &address, 1);
    if (thread->result == CUDA_SUCCESS) thread->result = CALL(cuMemFree_v2, address);
    return NULL;
}

static CUresult in_another_thread(CUstreamCaptureMode mode, CUstream ended) {
    other_thread_t thread = {.mode = mode, .ended = ended};
    pthread_t handle;
    ASSERT_CUDA(CALL(cuCtxGetCurrent, &thread.context));
    assert_int_equal(pthread_create(&handle, NULL, allocate_there, &thread), 0);
    assert_int_equal(pthread_join(handle, NULL), 0);
    return thread.result;
}

static void modes_select_the_watched_threads(void **state) {
    static const struct {
        CUstreamCaptureMode capture, thread;
        bool allowed;
    } cases[] = {
        {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_GLOBAL, .allowed = false},
        {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, .allowed = true},
        {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_RELAXED, .allowed = true},
        {CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_GLOBAL, .allowed = true},
        {CU_STREAM_CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_MODE_GLOBAL, .allowed = true},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CUstream stream = begin(cases[i].capture);
        CUresult expected = cases[i].allowed ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        ASSERT_RESULT(expected, in_another_thread(cases[i].thread, NULL));
        end(stream, cases[i].allowed ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    CUstream stream = begin(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    ASSERT_RESULT(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, in_another_thread(CU_STREAM_CAPTURE_MODE_GLOBAL, stream));
    assert_int_equal(status_of(stream), CU_STREAM_CAPTURE_STATUS_NONE); /* it has ended nevertheless */
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
}

static void the_legacy_stream_sees_blocking_captures(void **state) {
    block_t block = make_block(0, GRANULE);
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUstream stream = make_stream(CU_STREAM_DEFAULT);
    (void)state;
    assert_int_equal(status_of(NULL), CU_STREAM_CAPTURE_STATUS_NONE);
    ASSERT_CUDA(CALL(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    ASSERT_RESULT(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, CALL(cuStreamIsCapturing, NULL, &status));
    assert_int_equal(status_of(stream), CU_STREAM_CAPTURE_STATUS_ACTIVE); /* a query has no effect */
    ASSERT_RESULT(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, CALL(cuMemsetD8Async, block.address, 0, 1, NULL));
    end(stream, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

    stream = begin(CU_STREAM_CAPTURE_MODE_RELAXED); /* non-blocking: unseen, and undisturbed */
    assert_int_equal(status_of(NULL), CU_STREAM_CAPTURE_STATUS_NONE);
    ASSERT_CUDA(CALL(cuMemsetD8Async, block.address, 0, 1, NULL));
    end(stream, CUDA_SUCCESS);
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    drop_block(&block);
}

static void streams_join_by_events(void **state) {
    block_t block = make_block(0, GRANULE);
    CUstream stream = begin(CU_STREAM_CAPTURE_MODE_GLOBAL), side = make_stream(CU_STREAM_NON_BLOCKING);
    CUevent fork_event = NULL, join_event = NULL;
    (void)state;
    ASSERT_CUDA(CALL(cuEventCreate, &fork_event, 0));
    ASSERT_CUDA(CALL(cuEventCreate, &join_event, 0));
    ASSERT_CUDA(CALL(cuEventRecord, fork_event, stream));
    ASSERT_CUDA(CALL(cuStreamWaitEvent, side, fork_event, 0));
    assert_int_equal(status_of(side), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    ASSERT_CUDA(CALL(launch_add, side, block.address, 1, 1, NO_GATE));
    ASSERT_CUDA(CALL(cuEventRecord, join_event, side));
    ASSERT_CUDA(CALL(cuStreamWaitEvent, stream, join_event, 0));
    end(stream, CUDA_SUCCESS);
    assert_int_equal(status_of(side), CU_STREAM_CAPTURE_STATUS_NONE);
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuEventQuery, join_event)); /* of a capture that has ended */

    stream = begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
    ASSERT_CUDA(CALL(cuEventRecord, fork_event, stream));
    ASSERT_CUDA(CALL(cuStreamWaitEvent, side, fork_event, 0));
    ASSERT_CUDA(CALL(launch_add, side, block.address, 1, 1, NO_GATE));
    end(stream, CUDA_ERROR_STREAM_CAPTURE_UNJOINED);

    CUgraph graph = NULL;
    stream = begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
    ASSERT_CUDA(CALL(cuEventRecord, fork_event, stream));
    ASSERT_CUDA(CALL(cuStreamWaitEvent, side, fork_event, 0));
    ASSERT_RESULT(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, CALL(cuStreamEndCapture, side, &graph));
    end(stream, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

    ASSERT_CUDA(CALL(cuEventRecord, fork_event, side)); /* outside of any capture */
    stream = begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
    ASSERT_RESULT(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, CALL(cuStreamWaitEvent, stream, fork_event, 0));
    end(stream, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    ASSERT_CUDA(CALL(cuEventDestroy_v2, fork_event));
    ASSERT_CUDA(CALL(cuEventDestroy_v2, join_event));
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, side));
    drop_block(&block);
}

static void a_destroyed_stream_takes_its_capture_along(void **state) {
    CUstream stream = begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
    CUdeviceptr address = 0;
    (void)state;
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    ASSERT_CUDA(CALL(cuMemAlloc_v2, &address, 1)); /* no capture is in flight any more */
    ASSERT_CUDA(CALL(cuMemFree_v2, address));
}

static void the_runtime_captures_into_graphs(void **state) {
    block_t block = make_block(0, GRANULE);
    CUstream stream = make_stream(CU_STREAM_NON_BLOCKING);
    CUgraph graph = NULL, ended = NULL;
    CUgraphExec executable = NULL;
    void *memory = NULL;
    (void)state;
    ASSERT_CUDA(CALL(cudaGraphCreate, &graph, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cudaStreamBeginCaptureToGraph, stream, NULL, NULL, NULL, 0, 0));
    for (int i = 0; i < 2; i++) {
        ASSERT_CUDA(CALL(cudaStreamBeginCaptureToGraph, stream, graph, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_GLOBAL));
        ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cudaGraphDestroy, graph));
        ASSERT_CUDA(CALL(launch_add, stream, block.address, GRANULE, 1, NO_GATE));
        ASSERT_CUDA(CALL(cudaStreamEndCapture_ptsz, stream, &ended));
        assert_ptr_equal(ended, graph);
    }
    ASSERT_CUDA(CALL(cudaGraphInstantiate, &executable, graph, 0));
    ASSERT_CUDA(CALL(cudaGraphLaunch, executable, stream));
    ASSERT_CUDA(CALL(cudaStreamSynchronize, stream));
    assert_bytes(block.address, GRANULE, TMS_SIM_POISON + 2);
    ASSERT_CUDA(CALL(cudaStreamBeginCapture_ptsz, stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    ASSERT_RESULT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, CALL(cudaMalloc, &memory, 1));
    ASSERT_RESULT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, CALL(cudaStreamEndCapture, stream, &ended));
    assert_null(ended);
    ASSERT_CUDA(CALL(cudaStreamBeginCapture_ptsz, stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    ASSERT_RESULT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, CALL(cudaGraphExecDestroy, executable));
    ASSERT_RESULT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, CALL(cudaStreamEndCapture, stream, &ended));
    ASSERT_CUDA(CALL(cudaGraphExecDestroy, executable));
    ASSERT_CUDA(CALL(cudaGraphDestroy, graph));
    ASSERT_CUDA(CALL(cudaStreamDestroy, stream));
    drop_block(&block);
}

int main(void) {
#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_gpu, teardown_gpus)
    const struct CMUnitTest tests[] = {
        ONE(a_graph_replays_what_was_captured),
        ONE(nodes_can_be_counted_during_the_capture),
        ONE(replaying_over_unmapped_memory_faults),
        ONE(captures_begin_and_end_in_pairs),
        ONE(synchronizing_the_context_invalidates),
        ONE(synchronizing_the_capturing_stream_invalidates),
        ONE(allocating_invalidates_unless_relaxed),
        ONE(virtual_memory_calls_are_allowed),
        ONE(modes_select_the_watched_threads),
        ONE(the_legacy_stream_sees_blocking_captures),
        ONE(streams_join_by_events),
        ONE(a_destroyed_stream_takes_its_capture_along),
        ONE(the_runtime_captures_into_graphs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
