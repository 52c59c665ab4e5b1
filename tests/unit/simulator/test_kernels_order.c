/* Guards the simulated GPU's kernels as work: their order, graphs, missing mappings, and unknown kernels. */
#include "support/kernels_fixture.h"

static void copies_its_arguments_and_keeps_the_order(void **state) {
    block_t block = make_block(0, GRANULE);
    CUstream stream = NULL;
    int count = ELEMENTS;
    float value = 1.0F, *floats = bytes_of(&block), added[2] = {2.0F, 1.0F}; /* the number and its factor */
    void *pointers[] = {floats, floats}, *fills[] = {&count, &value, pointers}, *adds[] = {&count, added, pointers};
    (void)state;
    ASSERT_CUDA(CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING));
    ASSERT_CUDA(CALL(launch_add, stream, block.address + GRANULE - 1, 1, 1, GATE));
    ASSERT_CUDA(launch_on(fill_float, fills, stream));
    ASSERT_CUDA(launch_on(add_to_float, adds, stream));
    value = added[0] = 100.0F;
    pointers[0] = NULL;
    count = 0;
    assert_bytes(block.address, ELEMENTS * sizeof *floats, TMS_SIM_POISON); /* nothing has run */
    CALL(open_gate, GATE);
    ASSERT_CUDA(CALL(cuStreamSynchronize, stream));
    for (int i = 0; i < ELEMENTS; i++) assert_true(floats[i] == 3.0F);
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    drop_block(&block);
}

static void is_recorded_and_replayed(void **state) {
    block_t block = make_block(0, GRANULE);
    CUstream stream = NULL;
    CUgraph graph = NULL;
    CUgraphExec executable = NULL;
    int count = ELEMENTS;
    float added[2] = {2.0F, 1.0F}, *floats = bytes_of(&block);
    void *pointers[] = {floats, floats}, *adds[] = {&count, added, pointers};
    (void)state;
    memset(floats, 0, ELEMENTS * sizeof *floats);
    ASSERT_CUDA(CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING));
    ASSERT_CUDA(CALL(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    ASSERT_CUDA(launch_on(add_to_float, adds, stream));
    ASSERT_CUDA(CALL(cuStreamEndCapture, stream, &graph));
    assert_true(floats[0] == 0.0F);
    ASSERT_CUDA(CALL(cuGraphInstantiateWithFlags, &executable, graph, 0));
    ASSERT_CUDA(CALL(cuGraphDestroy, graph));
    for (int i = 0; i < 3; i++) ASSERT_CUDA(CALL(cuGraphLaunch, executable, stream));
    ASSERT_CUDA(CALL(cuGraphExecDestroy, executable)); /* launched kernels still run */
    ASSERT_CUDA(CALL(cuStreamSynchronize, stream));
    for (int i = 0; i < ELEMENTS; i++) assert_true(floats[i] == 6.0F);
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    drop_block(&block);
}

static void crosses_mappings_and_faults_if_one_is_missing(void **state) {
    CUmemGenericAllocationHandle handles[2];
    CUmemAllocationProp properties = pinned_on(0);
    CUmemAccessDesc access = access_for(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CUdeviceptr address = 0;
    int count = (int)(2 * GRANULE / sizeof(float)) - 1;
    float value = 1.0F;
    (void)state;
    ASSERT_CUDA(CALL(cuMemAddressReserve, &address, 2 * GRANULE, 0, 0, 0));
    for (int i = 0; i < 2; i++) {
        ASSERT_CUDA(CALL(cuMemCreate, &handles[i], GRANULE, &properties, 0));
        ASSERT_CUDA(CALL(cuMemMap, address + (uint64_t)i * GRANULE, GRANULE, 0, handles[i], 0));
    }
    ASSERT_CUDA(CALL(cuMemSetAccess, address, 2 * GRANULE, &access, 1));
    /* One element lies in both mappings. */
    float *floats = (float *)(uintptr_t)address;
    void *pointers[] = {(void *)(uintptr_t)(address + 2)}, *arguments[] = {&count, &value, pointers};
    ASSERT_CUDA(launch(fill_float, arguments));
    finish();
    for (int i = 0; i < count; i++) {
        float element;
        memcpy(&element, (uint8_t *)floats + 2 + (size_t)i * sizeof element, sizeof element);
        assert_true(element == 1.0F);
    }
    ASSERT_CUDA(CALL(cuMemUnmap, address + GRANULE, GRANULE));
    value = 2.0F;
    ASSERT_CUDA(launch(fill_float, arguments)); /* as a real launch: the fault comes later, and is sticky */
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, CALL(cudaDeviceSynchronize));
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, launch(fill_float, arguments));
    ASSERT_CUDA(CALL(cuMemUnmap, address, GRANULE));
    for (int i = 0; i < 2; i++) ASSERT_CUDA(CALL(cuMemRelease, handles[i]));
    ASSERT_CUDA(CALL(cuMemAddressFree, address, 2 * GRANULE));
}

static void other_kernels_are_errors_or_skipped(void **state) {
    const sim_dim3_t one = {1, 1, 1}, none = {0, 1, 1};
    void *arguments[] = {NULL};
    char text[4096];
    (void)state;
    captured_stderr_t captured = capture_begin();
    ASSERT_RESULT(NOT_SUPPORTED, launch(matrix_product, arguments));
    ASSERT_RESULT(NOT_SUPPORTED, launch(matrix_product, arguments));
    ASSERT_RESULT(NOT_SUPPORTED, launch(fill_complex, arguments));
    ASSERT_RESULT(NOT_SUPPORTED, CALL(cudaGetLastError));
    CALL(skip_kernels, 1);
    ASSERT_CUDA(launch(matrix_product, arguments));
    assert_int_equal(CALL(kernels_skipped), 1);
    CALL(skip_kernels, 0);
    assert_int_equal(CALL(kernels_launched), 0);
    ASSERT_RESULT(INVALID_DEVICE_FUNCTION, CALL(cudaLaunchKernel, matrix_product, one, one, arguments, 0, NULL));
    ASSERT_RESULT(INVALID_CONFIGURATION, CALL(cudaLaunchKernel, matrix_product, none, one, arguments, 0, NULL));
    capture_end(captured, text, sizeof text);
    /* In C++ notation if its library is loaded, so only parts of the names are checked. */
    assert_int_equal(count_lines(text), 2); /* each is named once */
    assert_non_null(strstr(text, "cutlass"));
    assert_non_null(strstr(text, "FillFunctor"));
}

/* torch.cuda._sleep: for longer than the test takes, until its context is destroyed. */
static void a_sleep_occupies_its_stream_and_no_other(void **state) {
    int64_t centuries = INT64_MAX, nothing = 0;
    void *arguments[] = {&centuries}, *no_time[] = {&nothing};
    CUstream asleep = NULL, awake = NULL;
    (void)state;
    ASSERT_CUDA(CALL(cuStreamCreate, &asleep, CU_STREAM_NON_BLOCKING));
    ASSERT_CUDA(CALL(cuStreamCreate, &awake, CU_STREAM_NON_BLOCKING));
    ASSERT_CUDA(launch_on(spin, arguments, asleep));
    ASSERT_CUDA(launch_on(spin, no_time, awake));
    ASSERT_CUDA(CALL(cuStreamSynchronize, awake));
    ASSERT_RESULT(CUDA_ERROR_NOT_READY, CALL(cuStreamQuery, asleep));
    assert_int_equal(CALL(kernels_launched), 2);
    CALL(reset, 1, DEVICE_MEMORY);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        KERNEL_TEST(copies_its_arguments_and_keeps_the_order),      KERNEL_TEST(is_recorded_and_replayed),
        KERNEL_TEST(crosses_mappings_and_faults_if_one_is_missing), KERNEL_TEST(other_kernels_are_errors_or_skipped),
        KERNEL_TEST(a_sleep_occupies_its_stream_and_no_other),
    };
    return cmocka_run_group_tests_name("simulated kernels", tests, NULL, NULL);
}
