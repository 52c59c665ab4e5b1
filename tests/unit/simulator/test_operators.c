/* Guards the simulated GPU's operators: requests to the device process, which a thread of the test plays, in the order of
 * their streams. */
#include <errno.h>
#include <sys/wait.h>

#include "captured_stderr.h"
#include "simulated_cuda.h"
#include "support/device_process.h"

enum { GATE = 1, READ_ONLY = 0, WRITTEN = 1, TEXT_BYTES = 512 };

static device_process_t process, successor;

static int setup_one(void **state) {
    int result = setup_one_gpu(state);
    start_device_process(&process);
    return result;
}

static int setup_two(void **state) {
    int result = setup_two_gpus(state);
    start_device_process(&process);
    return result;
}

/* The threads end before the first assertion: it leaves this function if the test has failed, and they would go on with the
 * variables of the next test. */
static int teardown(void **state) {
    end_device_process(&process);
    end_device_process(&successor);
    return teardown_gpus(state);
}

static tms_sim_operator_t operator_on(CUstream stream, const char *request, const tms_sim_operand_t *operand) {
    return (tms_sim_operator_t){.stream = stream,
                                .operands = operand,
                                .operand_count = operand ? 1 : 0,
                                .request = request,
                                .bytes = strlen(request)};
}

static CUresult run_with(CUstream stream, const char *request, const tms_sim_operand_t *operand) {
    const tms_sim_operator_t what = operator_on(stream, request, operand);
    return CALL(run_operator, &what);
}

static tms_sim_operand_t all_of(const block_t *block, int written) {
    return (tms_sim_operand_t){.address = block->address, .bytes = block->bytes, .written = written};
}

/* Enqueues an operator that doubles every byte of a block. */
static CUresult double_bytes(CUstream stream, const block_t *block, int gate) {
    char request[REQUEST_BYTES];
    const tms_sim_operand_t operand = all_of(block, WRITTEN);
    snprintf(request, sizeof request, "double %" PRIu64 " %" PRIu64, (uint64_t)block->address, block->bytes);
    tms_sim_operator_t what = operator_on(stream, request, &operand);
    what.gate = gate;
    return CALL(run_operator, &what);
}

static CUstream make_stream(void) {
    CUstream stream = NULL;
    ASSERT_CUDA(CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING));
    return stream;
}

/* After a sticky error no call can free memory; the reset frees it. */
static void forget_everything(void) { CALL(reset, 1, DEVICE_MEMORY); }

static void operators_take_their_turn_in_the_stream(void **state) {
    block_t block = make_block(0, GRANULE);
    CUstream stream = make_stream();
    (void)state;
    ASSERT_CUDA(CALL(cuMemsetD8Async, block.address, 1, GRANULE, stream));
    ASSERT_CUDA(CALL(launch_add, stream, block.address, GRANULE, 2, GATE));
    ASSERT_CUDA(double_bytes(stream, &block, NO_GATE));
    ASSERT_CUDA(CALL(launch_add, stream, block.address, GRANULE, 1, NO_GATE));
    CALL(open_gate, GATE);
    ASSERT_CUDA(CALL(cuStreamSynchronize, stream));
    assert_bytes(block.address, GRANULE, 7);
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    drop_block(&block);
}

/* The other stream's operator shows that the device process could have received the request. */
static void a_gate_holds_an_operator_back(void **state) {
    block_t block = make_block(0, GRANULE), other = make_block(0, GRANULE);
    CUstream waiting = make_stream(), passing = make_stream();
    (void)state;
    ASSERT_CUDA(CALL(cuMemsetD8_v2, block.address, 1, GRANULE));
    ASSERT_CUDA(double_bytes(waiting, &block, GATE));
    for (int i = 0; i < 20; i++) {
        ASSERT_CUDA(double_bytes(passing, &other, NO_GATE));
        ASSERT_CUDA(CALL(cuStreamSynchronize, passing));
    }
    assert_int_equal(requests_of(&process), 20);
    assert_bytes(block.address, GRANULE, 1);
    CALL(open_gate, GATE);
    ASSERT_CUDA(CALL(cuStreamSynchronize, waiting));
    assert_bytes(block.address, GRANULE, 2);
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, waiting));
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, passing));
    drop_block(&block);
    drop_block(&other);
}

static void a_graph_makes_the_request_at_every_launch(void **state) {
    block_t block = make_block(0, GRANULE);
    CUstream stream = make_stream();
    CUgraph graph = NULL;
    CUgraphExec executable = NULL;
    (void)state;
    ASSERT_CUDA(CALL(cuMemsetD8_v2, block.address, 1, GRANULE));
    ASSERT_CUDA(CALL(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    ASSERT_CUDA(double_bytes(stream, &block, NO_GATE));
    ASSERT_CUDA(CALL(cuStreamEndCapture, stream, &graph));
    assert_int_equal(requests_of(&process), 0);
    ASSERT_CUDA(CALL(cuGraphInstantiateWithFlags, &executable, graph, 0));
    ASSERT_CUDA(CALL(cuGraphDestroy, graph));
    for (unsigned launches = 1; launches <= 2; launches++) {
        ASSERT_CUDA(CALL(cuGraphLaunch, executable, stream));
        ASSERT_CUDA(CALL(cuStreamSynchronize, stream));
        assert_int_equal(requests_of(&process), launches);
    }
    assert_bytes(block.address, GRANULE, 4);
    ASSERT_CUDA(CALL(cuGraphExecDestroy, executable));
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    drop_block(&block);
}

static void an_operand_that_is_not_mapped_is_an_illegal_access(void **state) {
    block_t block = make_block(0, GRANULE);
    (void)state;
    unmap_block(&block);
    ASSERT_CUDA(double_bytes(NULL, &block, NO_GATE));
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, CALL(cuCtxSynchronize));
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, double_bytes(NULL, &block, NO_GATE));
    assert_int_equal(requests_of(&process), 0);
    forget_everything();
}

static void a_peer_may_read_what_it_may_not_write(void **state) {
    block_t block = make_block(1, GRANULE);
    CUmemAccessDesc access[] = {access_for(0, CU_MEM_ACCESS_FLAGS_PROT_READ),
                                access_for(1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE)};
    const tms_sim_operand_t read = all_of(&block, READ_ONLY), written = all_of(&block, WRITTEN);
    (void)state;
    ASSERT_CUDA(CALL(cuMemSetAccess, block.address, block.bytes, access, 2));
    ASSERT_CUDA(run_with(NULL, "say read", &read));
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    assert_int_equal(requests_of(&process), 1);
    ASSERT_CUDA(run_with(NULL, "say written", &written));
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, CALL(cuCtxSynchronize));
    assert_int_equal(requests_of(&process), 1);
    forget_everything();
}

/* Two mappings in one reservation. */
static CUdeviceptr map_two(CUmemGenericAllocationHandle *handles) {
    CUmemAllocationProp properties = pinned_on(0);
    CUmemAccessDesc access = access_for(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CUdeviceptr address = 0;
    ASSERT_CUDA(CALL(cuMemAddressReserve, &address, 3 * GRANULE, 0, 0, 0));
    for (unsigned i = 0; i < 2; i++) {
        ASSERT_CUDA(CALL(cuMemCreate, &handles[i], GRANULE, &properties, 0));
        ASSERT_CUDA(CALL(cuMemMap, address + i * GRANULE, GRANULE, 0, handles[i], 0));
    }
    ASSERT_CUDA(CALL(cuMemSetAccess, address, 2 * GRANULE, &access, 1));
    return address;
}

static void an_operand_across_two_mappings_lies_in_two_places_of_one_range(void **state) {
    CUmemGenericAllocationHandle handles[2];
    const CUdeviceptr address = map_two(handles);
    const tms_sim_operand_t operand = {.address = address + GRANULE - 8, .bytes = 16, .written = WRITTEN};
    (void)state;
    ASSERT_CUDA(run_with(NULL, "say both", &operand));
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    assert_int_equal(process.place_count, 2);
    for (unsigned i = 0; i < 2; i++) {
        const sim_placement_t *placement = &process.placements[i];
        assert_int_equal(placement->range, address);
        assert_int_equal(placement->range_bytes, 3 * GRANULE);
        assert_int_equal(placement->address, address + i * GRANULE);
        assert_int_equal(placement->bytes, GRANULE);
        assert_int_equal(placement->file, process.last_file);
    }
    assert_int_not_equal(process.placements[0].offset, process.placements[1].offset);
    ASSERT_CUDA(CALL(cuMemUnmap, address, 2 * GRANULE));
    ASSERT_CUDA(CALL(cuMemAddressFree, address, 3 * GRANULE));
    for (unsigned i = 0; i < 2; i++) ASSERT_CUDA(CALL(cuMemRelease, handles[i]));
}

static void a_file_is_sent_once_to_each_device_process(void **state) {
    block_t block = make_block(0, GRANULE), other = make_block(0, GRANULE);
    (void)state;
    for (int i = 0; i < 3; i++) {
        ASSERT_CUDA(double_bytes(NULL, &block, NO_GATE));
        ASSERT_CUDA(double_bytes(NULL, &other, NO_GATE));
    }
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    assert_int_equal(requests_of(&process), 6);
    assert_int_equal(files_of(&process), 1); /* both blocks are in the device's file */
    start_device_process(&successor);
    ASSERT_CUDA(double_bytes(NULL, &block, NO_GATE));
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    assert_int_equal(requests_of(&process), 6);
    assert_int_equal(requests_of(&successor), 1);
    assert_int_equal(files_of(&successor), 1);
    end_device_process(&successor);
    drop_block(&block);
    drop_block(&other);
}

/* The result of waiting for the current context, and what is written to stderr meanwhile. */
static CUresult synchronize_quietly(char *text, size_t bytes) {
    captured_stderr_t captured = capture_begin();
    CUresult result = CALL(cuCtxSynchronize);
    capture_end(captured, text, bytes);
    return result;
}

static void a_failure_is_a_failed_assertion_and_is_reported(void **state) {
    char text[TEXT_BYTES];
    captured_stderr_t captured = capture_begin();
    (void)state;
    ASSERT_CUDA(run_with(NULL, "fail index 7 is out of range", NULL));
    ASSERT_RESULT(CUDA_ERROR_ASSERT, CALL(cuCtxSynchronize));
    capture_end(captured, text, sizeof text);
    assert_string_equal(text, "simulated GPU: index 7 is out of range\n");
    ASSERT_RESULT(CUDA_ERROR_ASSERT, run_with(NULL, "say anything", NULL));
    forget_everything();
}

static void queries_return_answers_and_failures(void **state) {
    static const char *const requests[] = {"say yes", "fail no"}, *const answers[] = {"yes", "no"};
    tms_sim_answer_t answer;
    (void)state;
    for (int i = 0; i < 2; i++) {
        const tms_sim_operator_t what = operator_on(NULL, requests[i], NULL);
        ASSERT_CUDA(CALL(ask_operator, &what, &answer));
        assert_string_equal(answer.text, answers[i]);
        assert_int_equal(answer.bytes, strlen(answers[i]));
        CALL(free_answer, &answer);
        assert_null(answer.text);
    }
    ASSERT_CUDA(CALL(cuCtxSynchronize));
}

static void queries_are_refused_in_a_capture(void **state) {
    CUstream stream = make_stream();
    CUgraph graph = NULL;
    const tms_sim_operator_t what = operator_on(stream, "say yes", NULL);
    tms_sim_answer_t answer;
    (void)state;
    ASSERT_CUDA(CALL(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    ASSERT_RESULT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, CALL(ask_operator, &what, &answer));
    assert_null(answer.text);
    ASSERT_RESULT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, CALL(cuStreamEndCapture, stream, &graph));
    assert_int_equal(requests_of(&process), 0);
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
}

static void without_its_process_the_device_fails_at_once(void **state) {
    char text[TEXT_BYTES];
    captured_stderr_t captured = capture_begin();
    (void)state;
    ASSERT_CUDA(run_with(NULL, "leave", NULL));
    ASSERT_RESULT(CUDA_ERROR_LAUNCH_FAILED, CALL(cuCtxSynchronize));
    capture_end(captured, text, sizeof text);
    assert_int_equal(count_lines(text), 1);
    assert_non_null(strstr(text, "the device process has exited"));
    assert_int_not_equal(run_with(NULL, "say anything", NULL), CUDA_SUCCESS);
    CALL(reset, 1, DEVICE_MEMORY);
    ASSERT_CUDA(CALL(cuInit, 0));
    ASSERT_CUDA(CALL(cuCtxPushCurrent_v2, retain_primary(0)));
    ASSERT_RESULT(CUDA_ERROR_NOT_INITIALIZED, run_with(NULL, "say anything", NULL)); /* it has none any more */
    assert_int_equal(synchronize_quietly(text, sizeof text), CUDA_SUCCESS);
    assert_string_equal(text, "");
}

static void a_reset_drops_queued_work_and_keeps_the_process(void **state) {
    block_t block = make_block(0, GRANULE);
    (void)state;
    ASSERT_CUDA(double_bytes(make_stream(), &block, GATE));
    CALL(reset, 1, DEVICE_MEMORY);
    assert_int_equal(requests_of(&process), 0);
    ASSERT_RESULT(CUDA_ERROR_NOT_INITIALIZED, run_with(NULL, "say early", NULL));
    ASSERT_CUDA(CALL(cuInit, 0));
    ASSERT_CUDA(CALL(cuCtxPushCurrent_v2, retain_primary(0)));
    ASSERT_RESULT(CUDA_ERROR_INVALID_HANDLE, run_with((CUstream)&block, "say nowhere", NULL));
    block = make_block(0, GRANULE);
    ASSERT_CUDA(CALL(cuMemsetD8_v2, block.address, 3, GRANULE));
    ASSERT_CUDA(double_bytes(NULL, &block, NO_GATE));
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    assert_bytes(block.address, GRANULE, 6);
    drop_block(&block);
}

static uint64_t number_of_last_request(void) {
    pthread_mutex_lock(&process.lock);
    uint64_t number = process.last_number;
    pthread_mutex_unlock(&process.lock);
    return number;
}

static CUresult draw_from(CUstream stream, const tms_sim_draw_t *draw) {
    tms_sim_operator_t what = operator_on(stream, "say drawn", NULL);
    what.draw = draw;
    return CALL(run_operator, &what);
}

static uint64_t drawn_from(uint64_t seed) {
    const tms_sim_draw_t draw = {.seed = seed};
    ASSERT_CUDA(draw_from(NULL, &draw));
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    return number_of_last_request();
}

static void an_operator_gets_the_number_that_is_drawn(void **state) {
    (void)state;
    assert_int_equal(drawn_from(3), drawn_from(3));
    assert_int_not_equal(drawn_from(3), drawn_from(4));
    ASSERT_CUDA(run_with(NULL, "say nothing", NULL));
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    assert_int_equal(number_of_last_request(), 0);
}

/* The values are in device memory, and are read when the graph is launched. */
static void a_graph_draws_again_at_every_launch(void **state) {
    block_t block = make_block(0, GRANULE);
    CUstream stream = make_stream();
    CUgraph graph = NULL;
    CUgraphExec executable = NULL;
    const tms_sim_draw_t draw = {.seed = block.address, .offset = block.address + 8, .addend = 7, .captured = 1};
    uint64_t values[] = {5, 0}, drawn[3];
    (void)state;
    ASSERT_CUDA(CALL(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    ASSERT_CUDA(draw_from(stream, &draw));
    ASSERT_CUDA(CALL(cuStreamEndCapture, stream, &graph));
    ASSERT_CUDA(CALL(cuGraphInstantiateWithFlags, &executable, graph, 0));
    ASSERT_CUDA(CALL(cuGraphDestroy, graph));
    for (unsigned launch = 0; launch < 3; launch++) {
        values[1] = launch == 1 ? 4 : 0;
        ASSERT_CUDA(CALL(cuMemcpyHtoD_v2, block.address, values, sizeof values));
        ASSERT_CUDA(CALL(cuGraphLaunch, executable, stream));
        ASSERT_CUDA(CALL(cuStreamSynchronize, stream));
        drawn[launch] = number_of_last_request();
    }
    assert_int_equal(drawn[0], drawn[2]);
    assert_int_not_equal(drawn[0], drawn[1]);
    unmap_block(&block);
    ASSERT_CUDA(CALL(cuGraphLaunch, executable, stream));
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, CALL(cuStreamSynchronize, stream));
    forget_everything();
}

/* The manager of memory knows one address, which is paused. */
static uint64_t managed;

static tms_status_t find_managed(uint64_t address, uint64_t bytes, tms_segment_info_t *row) {
    (void)bytes;
    if (address != managed) return TMS_NOT_MANAGED;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *row = (tms_segment_info_t){.address = address,
                                .state = TMS_SEGMENT_PAUSED,
                                .tag = "weights",
                                .changed_at = (double)now.tv_sec + (double)now.tv_nsec * 1e-9 - 90};
    return TMS_OK;
}

static const tms_api_t manager = {.find = find_managed};

/* The text of the error for an operator on memory without a mapping. Nothing is on stderr. */
static void fail_on(const block_t *block, char *text, size_t bytes) {
    const tms_sim_operand_t operand = all_of(block, WRITTEN);
    tms_sim_operator_t what = operator_on(NULL, "say nothing", &operand);
    what.name = "aten::add_.Tensor";
    captured_stderr_t captured = capture_begin();
    ASSERT_CUDA(CALL(run_operator, &what));
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, CALL(cuCtxSynchronize));
    capture_end(captured, text, bytes);
    assert_string_equal(text, "");
    snprintf(text, bytes, "%s", CALL(cudaGetErrorString, CUDA_ERROR_ILLEGAL_ADDRESS));
}

static void a_message_names_the_operator_the_tag_and_the_time_of_the_pause(void **state) {
    block_t block = make_block(0, GRANULE);
    char text[TEXT_BYTES], expected[TEXT_BYTES];
    (void)state;
    managed = block.address;
    CALL(set_manager, &manager);
    unmap_block(&block);
    fail_on(&block, text, sizeof text);
    snprintf(expected, sizeof expected,
             "an illegal memory access was encountered: aten::add_.Tensor accesses 0x%" PRIx64
             " in memory of the tag 'weights', which was paused 90.",
             (uint64_t)block.address);
    assert_memory_equal(text, expected, strlen(expected));
    forget_everything();
    assert_string_equal(CALL(cudaGetErrorString, CUDA_ERROR_ILLEGAL_ADDRESS), "an illegal memory access was encountered");
    CALL(set_manager, NULL);
}

static void a_copy_of_paused_memory_is_explained_at_the_call(void **state) {
    block_t block = make_block(0, GRANULE), other = make_block(0, GRANULE);
    char text[TEXT_BYTES], byte;
    (void)state;
    managed = block.address;
    CALL(set_manager, &manager);
    unmap_block(&block);
    captured_stderr_t captured = capture_begin();
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemcpyDtoH_v2, &byte, block.address, 1));
    capture_end(captured, text, sizeof text);
    assert_non_null(strstr(text, "cuMemcpyDtoH_v2 accesses 0x"));
    assert_non_null(
        strstr(CALL(cudaGetErrorString, CUDA_ERROR_INVALID_VALUE), "invalid argument: cuMemcpyDtoH_v2 accesses"));
    /* The next failure has another cause. */
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemcpyDtoH_v2, NULL, other.address, 1));
    assert_string_equal(CALL(cudaGetErrorString, CUDA_ERROR_INVALID_VALUE), "invalid argument");
    CALL(set_manager, NULL);
    drop_block(&other);
    forget_everything();
}

static void a_lost_device_recovers_for_the_next_test(void **state) {
    block_t block = make_block(0, GRANULE), kept = make_block(0, GRANULE);
    char text[TEXT_BYTES];
    (void)state;
    ASSERT_CUDA(CALL(cuMemsetD8_v2, kept.address, 7, GRANULE));
    assert_int_equal(CALL(recover), 0);
    unmap_block(&block);
    fail_on(&block, text, sizeof text);
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, CALL(cuCtxSynchronize));
    assert_int_equal(CALL(recover), CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_int_equal(CALL(recover), 0);
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    assert_bytes(kept.address, GRANULE, 7);
    assert_string_equal(CALL(cudaGetErrorString, CUDA_ERROR_ILLEGAL_ADDRESS), "an illegal memory access was encountered");
    forget_everything();
}

static void without_a_manager_a_message_names_the_operator(void **state) {
    block_t block = make_block(0, GRANULE);
    char text[TEXT_BYTES];
    (void)state;
    unmap_block(&block);
    fail_on(&block, text, sizeof text);
    assert_non_null(strstr(text, "encountered: aten::add_.Tensor accesses 0x"));
    assert_non_null(strstr(text, ", where its device has no memory"));
    forget_everything();
}

static void a_forked_child_does_not_have_the_socket(void **state) {
    int status = 0;
    pid_t child = fork();
    (void)state;
    if (child == 0) {
        if (fcntl(process.ours, F_GETFD) != -1 || errno != EBADF) _exit(1);
        _exit(run_with(NULL, "say anything", NULL) == CUDA_ERROR_NOT_INITIALIZED ? 0 : 2);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    ASSERT_CUDA(run_with(NULL, "say anything", NULL)); /* the parent still has it */
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    assert_int_equal(requests_of(&process), 1);
}

/* As in cuBLAS, a handle loses its workspace with its stream. */
static void a_handle_of_blas_has_the_workspace_that_was_set_last(void **state) {
    void *handle = NULL;
    (void)state;
    assert_int_equal(CALL(cublasCreate_v2, &handle), 0);
    assert_int_equal(CALL(cublasSetStream_v2, handle, NULL), 0);
    assert_int_equal(CALL(blas_workspace, handle).bytes, 0);
    assert_int_equal(CALL(cublasSetWorkspace_v2, handle, handle, 4096), 0);
    tms_sim_operand_t workspace = CALL(blas_workspace, handle);
    assert_int_equal(workspace.address, (uintptr_t)handle);
    assert_int_equal(workspace.bytes, 4096);
    assert_true(workspace.written);
    assert_int_equal(CALL(cublasSetStream_v2, handle, NULL), 0);
    assert_int_equal(CALL(blas_workspace, handle).bytes, 0);
    assert_int_equal(CALL(cublasSetMathMode, handle, 0), 0);
    assert_int_equal(CALL(cublasDestroy_v2, handle), 0);
    assert_int_not_equal(CALL(cublasCreate_v2, NULL), 0);
    assert_int_not_equal(CALL(cublasSetStream_v2, NULL, NULL), 0);
    assert_int_not_equal(CALL(cublasSetWorkspace_v2, NULL, NULL, 0), 0);
    assert_int_not_equal(CALL(cublasSetMathMode, NULL, 0), 0);
}

#define OPERATOR_TEST(function) cmocka_unit_test_setup_teardown(function, setup_one, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        OPERATOR_TEST(operators_take_their_turn_in_the_stream),
        OPERATOR_TEST(a_gate_holds_an_operator_back),
        OPERATOR_TEST(a_graph_makes_the_request_at_every_launch),
        OPERATOR_TEST(an_operand_that_is_not_mapped_is_an_illegal_access),
        cmocka_unit_test_setup_teardown(a_peer_may_read_what_it_may_not_write, setup_two, teardown),
        cmocka_unit_test(a_handle_of_blas_has_the_workspace_that_was_set_last),
        OPERATOR_TEST(an_operand_across_two_mappings_lies_in_two_places_of_one_range),
        OPERATOR_TEST(a_file_is_sent_once_to_each_device_process),
        OPERATOR_TEST(a_failure_is_a_failed_assertion_and_is_reported),
        OPERATOR_TEST(queries_return_answers_and_failures),
        OPERATOR_TEST(queries_are_refused_in_a_capture),
        OPERATOR_TEST(without_its_process_the_device_fails_at_once),
        OPERATOR_TEST(a_reset_drops_queued_work_and_keeps_the_process),
        OPERATOR_TEST(an_operator_gets_the_number_that_is_drawn),
        OPERATOR_TEST(a_graph_draws_again_at_every_launch),
        OPERATOR_TEST(a_message_names_the_operator_the_tag_and_the_time_of_the_pause),
        OPERATOR_TEST(a_copy_of_paused_memory_is_explained_at_the_call),
        OPERATOR_TEST(a_lost_device_recovers_for_the_next_test),
        OPERATOR_TEST(without_a_manager_a_message_names_the_operator),
        OPERATOR_TEST(a_forked_child_does_not_have_the_socket),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
