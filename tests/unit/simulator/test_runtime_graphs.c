/* Guards the simulated GPU's runtime: queries of a capture in flight, and graphs. */
#include "support/runtime_streams_fixture.h"

static size_t dependencies_of(CUgraphNode node, CUgraphNode *nodes, size_t capacity) {
    ASSERT_CUDA(CALL(cudaGraphNodeGetDependencies, node, nodes, NULL, &capacity));
    return capacity;
}

static void a_capture_knows_its_nodes_and_edges(void **state) {
    enum { NODES = 4 };
    CUstream stream = make_stream(), side = make_stream();
    CUevent fork = make_event(DISABLE_TIMING), join = make_event(DISABLE_TIMING);
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    uint8_t *memory = allocate(4);
    cuuint64_t id = 0, id_of_side = 0;
    CUgraph graph = NULL, ended = NULL;
    const CUgraphNode *tails = NULL;
    CUgraphNode nodes[NODES + 1], found[NODES];
    const void *edges = NULL;
    size_t count = 0;
    (void)state;
    ASSERT_CUDA(CALL(cudaStreamGetCaptureInfo, stream, &status, &id, NULL, NULL, NULL, NULL));
    assert_int_equal(status, CU_STREAM_CAPTURE_STATUS_NONE);
    ASSERT_CUDA(CALL(cudaStreamBeginCapture, stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    ASSERT_CUDA(CALL(cudaMemsetAsync, memory, 1, 4, stream));
    ASSERT_CUDA(CALL(cudaEventRecord, fork, stream));
    ASSERT_CUDA(CALL(cudaStreamWaitEvent, side, fork, 0));
    ASSERT_CUDA(CALL(cudaMemsetAsync, memory + 1, 2, 1, side));
    ASSERT_CUDA(CALL(cudaMemcpyAsync, memory + 2, memory, 1, DEVICE_TO_DEVICE, stream));
    ASSERT_CUDA(CALL(cudaEventRecord, join, side));
    ASSERT_CUDA(CALL(cudaStreamWaitEvent, stream, join, 0));
    ASSERT_CUDA(CALL(cudaStreamGetCaptureInfo, stream, &status, &id, &graph, &tails, &edges, &count));
    assert_int_equal(status, CU_STREAM_CAPTURE_STATUS_ACTIVE);
    assert_int_equal(count, 2);
    ASSERT_CUDA(CALL(cudaStreamGetCaptureInfo_v2, side, &status, &id_of_side, NULL, &tails, &count));
    assert_int_equal(id_of_side, id);
    assert_int_equal(count, 1);
    ASSERT_CUDA(CALL(launch_add, stream, (uintptr_t)memory, 4, 5, NO_GATE));
    ASSERT_CUDA(CALL(cudaStreamEndCapture, stream, &ended));
    assert_ptr_equal(ended, graph);
    ASSERT_CUDA(CALL(cudaGraphGetNodes, graph, NULL, &count));
    assert_int_equal(count, NODES);
    count = NODES + 1;
    ASSERT_CUDA(CALL(cudaGraphGetNodes, graph, nodes, &count));
    assert_int_equal(count, NODES);
    assert_null(nodes[NODES]);
    assert_int_equal(dependencies_of(nodes[0], NULL, 0), 0);
    assert_int_equal(dependencies_of(nodes[1], found, NODES), 1);
    assert_ptr_equal(found[0], nodes[0]);
    assert_int_equal(dependencies_of(nodes[2], found, NODES), 1);
    assert_ptr_equal(found[0], nodes[0]);
    assert_int_equal(dependencies_of(nodes[3], found, NODES), 2);
    assert_ptr_equal(found[0], nodes[2]);
    assert_ptr_equal(found[1], nodes[1]);
    ASSERT_CUDA(CALL(cudaGraphDestroy, graph));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cudaGraphGetNodes, graph, NULL, &count));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cudaGraphNodeGetDependencies, nodes[0], NULL, NULL, &count));
    ASSERT_CUDA(CALL(cudaEventDestroy, fork));
    ASSERT_CUDA(CALL(cudaEventDestroy, join));
    ASSERT_CUDA(CALL(cudaStreamDestroy, stream));
    ASSERT_CUDA(CALL(cudaStreamDestroy, side));
    ASSERT_CUDA(CALL(cudaFree, memory));
}

static void dependencies_can_be_replaced(void **state) {
    CUstream stream = make_stream();
    CUstreamCaptureStatus status;
    uint8_t *memory = allocate(1);
    CUgraph graph = NULL;
    const CUgraphNode *tails = NULL;
    CUgraphNode first = NULL;
    size_t count = 1;
    (void)state;
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_STATE, CALL(cudaStreamUpdateCaptureDependencies, stream, NULL, NULL, 0, 1));
    ASSERT_CUDA(CALL(cudaStreamBeginCapture, stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    ASSERT_CUDA(CALL(cudaMemsetAsync, memory, 1, 1, stream));
    ASSERT_CUDA(CALL(cudaStreamGetCaptureInfo_v3, stream, &status, NULL, &graph, &tails, NULL, &count));
    first = tails[0];
    ASSERT_CUDA(CALL(cudaMemsetAsync, memory, 2, 1, stream));
    ASSERT_CUDA(CALL(cudaStreamUpdateCaptureDependencies, stream, &first, NULL, 1, 0)); /* beside the second */
    ASSERT_CUDA(CALL(cudaStreamGetCaptureInfo, stream, &status, NULL, NULL, &tails, NULL, &count));
    assert_int_equal(count, 2);
    ASSERT_CUDA(CALL(cudaStreamUpdateCaptureDependencies_v2, stream, &first, NULL, 1, 1)); /* instead */
    ASSERT_CUDA(CALL(cudaStreamGetCaptureInfo, stream, &status, NULL, NULL, &tails, NULL, &count));
    assert_int_equal(count, 1);
    assert_ptr_equal(tails[0], first);
    ASSERT_CUDA(CALL(cudaStreamEndCapture, stream, &graph));
    ASSERT_CUDA(CALL(cudaGraphDestroy, graph));
    ASSERT_CUDA(CALL(cudaStreamDestroy, stream));
    ASSERT_CUDA(CALL(cudaFree, memory));
}

static CUgraphExec instantiate(CUstream capturing) {
    CUgraph graph = NULL;
    CUgraphExec executable = NULL;
    ASSERT_CUDA(CALL(cudaStreamEndCapture, capturing, &graph));
    ASSERT_CUDA(CALL(cudaGraphInstantiateWithFlags, &executable, graph, 1));
    ASSERT_CUDA(CALL(cudaGraphDestroy, graph));
    return executable;
}

static void a_graph_calls_functions_and_records_events(void **state) {
    CUstream stream = make_stream(), other = make_stream(), busy = make_stream();
    CUevent event = make_event(0);
    uint8_t *memory = allocate(2);
    seen_t seen = {.memory = memory};
    (void)state;
    ASSERT_CUDA(CALL(cudaStreamBeginCapture, stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    ASSERT_CUDA(CALL(launch_add, stream, (uintptr_t)memory, 1, 1, NO_GATE));
    ASSERT_CUDA(CALL(cudaLaunchHostFunc, stream, look, &seen));
    ASSERT_CUDA(CALL(cudaEventRecordWithFlags, event, stream, EXTERNAL));
    CUgraphExec executable = instantiate(stream);
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_STATE, CALL(cudaEventRecordWithFlags, event, stream, EXTERNAL));
    ASSERT_CUDA(CALL(cudaGraphUpload, executable, stream));
    ASSERT_CUDA(CALL(launch_add, stream, (uintptr_t)memory, 1, 0, 1));
    ASSERT_CUDA(CALL(cudaMemsetAsync, memory, 10, 1, stream));
    ASSERT_CUDA(CALL(cudaGraphLaunch, executable, stream));
    ASSERT_CUDA(CALL(cudaGraphLaunch, executable, other)); /* never concurrently with the launch before */
    ASSERT_RESULT(CUDA_ERROR_NOT_READY, CALL(cudaEventQuery, event));
    for (int i = 0; i < 50; i++) { /* time in which the second launch could run if it did not wait */
        ASSERT_CUDA(CALL(cudaMemsetAsync, memory + 1, i, 1, busy));
        ASSERT_CUDA(CALL(cudaStreamSynchronize, busy));
    }
    assert_int_equal(*memory, TMS_SIM_POISON);
    assert_int_equal(seen.calls, 0);
    CALL(open_gate, 1);
    ASSERT_CUDA(CALL(cudaEventSynchronize, event));
    assert_int_equal(seen.calls, 2);
    assert_int_equal(seen.byte, 12);
    ASSERT_CUDA(CALL(cudaGraphExecDestroy, executable));
    ASSERT_CUDA(CALL(cudaEventDestroy, event));
    ASSERT_CUDA(CALL(cudaStreamDestroy, stream));
    ASSERT_CUDA(CALL(cudaStreamDestroy, other));
    ASSERT_CUDA(CALL(cudaStreamDestroy, busy));
    ASSERT_CUDA(CALL(cudaFree, memory));
}

/* Graph, pause, replay: the context is lost; after a resume at the same address it finds the contents of the new memory. */
static void a_replay_accesses_the_current_mapping(void **state) {
    CUstream stream = make_stream();
    CUmemAllocationProp properties = pinned_on(0);
    CUmemAccessDesc access = access_for(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    block_t block = make_block(0, GRANULE);
    void *address = (void *)(uintptr_t)block.address;
    (void)state;
    ASSERT_CUDA(CALL(cudaStreamBeginCapture, stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    ASSERT_CUDA(CALL(cudaMemset2DAsync, address, 16, 1, 8, 4, stream));
    CUgraphExec executable = instantiate(stream);
    unmap_block(&block);
    ASSERT_CUDA(CALL(cuMemCreate, &block.handle, GRANULE, &properties, 0));
    ASSERT_CUDA(CALL(cuMemMap, block.address, GRANULE, 0, block.handle, 0));
    ASSERT_CUDA(CALL(cuMemSetAccess, block.address, GRANULE, &access, 1));
    ASSERT_CUDA(CALL(cudaGraphLaunch, executable, stream));
    ASSERT_CUDA(CALL(cudaStreamSynchronize, stream));
    for (uint64_t row = 0; row < 4; row++) assert_bytes(block.address + row * 16, 8, 1);
    assert_bytes(block.address + 8, 8, TMS_SIM_POISON);
    drop_block(&block);
    ASSERT_CUDA(CALL(cudaGraphLaunch, executable, stream));
    ASSERT_RESULT(CUDA_ERROR_LAUNCH_FAILED, CALL(cudaStreamSynchronize, stream)); /* as a memset node does */
    ASSERT_RESULT(CUDA_ERROR_LAUNCH_FAILED, CALL(cudaGraphLaunch, executable, stream));
    ASSERT_CUDA(CALL(cudaGraphExecDestroy, executable));
    ASSERT_CUDA(CALL(cudaDeviceReset));
}

static void forbidden_calls_invalidate_a_capture(void **state) {
    uint8_t *memory = allocate(1);
    CUevent event = make_event(0);
    void *got = NULL;
    (void)state;
    ASSERT_CUDA(CALL(cudaEventRecord, event, NULL));
    for (int which = 0; which < 7; which++) {
        CUstream stream = make_stream();
        seen_t seen = {.memory = memory};
        CUgraph graph = NULL;
        CUresult results[7] = {0};
        ASSERT_CUDA(CALL(cudaStreamBeginCapture, stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        switch (which) {
        case 0: results[0] = CALL(cudaMalloc, &got, 1); break;
        case 1: results[1] = CALL(cudaHostAlloc, &got, 1, 0); break;
        case 2: results[2] = CALL(cudaStreamAddCallback, stream, look_as_callback, &seen, 0); break;
        case 3: results[3] = CALL(cudaEventQuery, event); break;
        case 4: results[4] = CALL(cudaStreamQuery, stream); break;
        case 5: results[5] = CALL(cudaDeviceSynchronize); break;
        default: results[6] = CALL(cudaFree, memory); break;
        }
        assert_int_equal(results[which], CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        ASSERT_RESULT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, CALL(cudaStreamEndCapture, stream, &graph));
        assert_null(graph);
        ASSERT_CUDA(CALL(cudaStreamDestroy, stream));
    }
    ASSERT_CUDA(CALL(cudaEventDestroy, event));
    ASSERT_CUDA(CALL(cudaFree, memory));
}

static void a_graph_is_printed(void **state) {
    char path[] = "/tmp/tms_graph_XXXXXX", text[512] = "";
    CUstream stream = make_stream();
    uint8_t *memory = allocate(1);
    CUgraph graph = NULL;
    (void)state;
    int file = mkstemp(path);
    assert_true(file >= 0);
    ASSERT_CUDA(CALL(cudaStreamBeginCapture, stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    ASSERT_CUDA(CALL(cudaMemsetAsync, memory, 1, 1, stream));
    ASSERT_CUDA(CALL(launch_add, stream, (uintptr_t)memory, 1, 1, NO_GATE));
    ASSERT_CUDA(CALL(cudaStreamEndCapture, stream, &graph));
    ASSERT_CUDA(CALL(cudaGraphDebugDotPrint, graph, path, 0));
    assert_true(read(file, text, sizeof text - 1) > 0);
    assert_non_null(strstr(text, "digraph"));
    assert_non_null(strstr(text, "MEMSET"));
    assert_non_null(strstr(text, " -> "));
    close(file);
    unlink(path);
    ASSERT_CUDA(CALL(cudaGraphDestroy, graph));
    ASSERT_CUDA(CALL(cudaStreamDestroy, stream));
    ASSERT_CUDA(CALL(cudaFree, memory));
}

int main(void) {
#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_gpu, teardown_gpus)
#define TWO(test) cmocka_unit_test_setup_teardown(test, setup_two_gpus, teardown_gpus)
    const struct CMUnitTest tests[] = {
        ONE(a_capture_knows_its_nodes_and_edges),        ONE(dependencies_can_be_replaced),
        ONE(a_graph_calls_functions_and_records_events), ONE(a_replay_accesses_the_current_mapping),
        ONE(forbidden_calls_invalidate_a_capture),       ONE(a_graph_is_printed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
