/* Guards the simulated GPU's contexts of cuCtxCreate, next to the primary ones. */
#include <pthread.h>

#include "simulated_cuda.h"

enum { GATE = 1, OTHER_GATE = 2, CUDA_11 = 11000, CUDA_12 = 12000, CUDA_13 = 13000 };

static CUcontext create(int device) {
    CUcontext context = NULL;
    ASSERT_CUDA(CALL(cuCtxCreate_v2, &context, 0, device));
    return context;
}

static CUcontext current(void) {
    CUcontext context = NULL;
    ASSERT_CUDA(CALL(cuCtxGetCurrent, &context));
    return context;
}

static void a_new_context_is_current_until_it_is_popped_or_destroyed(void **state) {
    (void)state;
    CUcontext primary = current(), popped = NULL, first = create(1);
    CUdevice device = -1;
    unsigned flags = 0;
    int active = -1;
    assert_ptr_not_equal(first, primary);
    assert_ptr_equal(current(), first);
    ASSERT_CUDA(CALL(cuCtxGetDevice, &device));
    assert_int_equal(device, 1);
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxGetState, 1, &flags, &active));
    assert_int_equal(active, 0); /* it is not the primary one */
    ASSERT_CUDA(CALL(cuCtxPopCurrent_v2, &popped));
    assert_ptr_equal(popped, first);
    assert_ptr_equal(current(), primary);
    ASSERT_CUDA(CALL(cuCtxSetCurrent, first));
    ASSERT_CUDA(CALL(cuCtxDestroy_v2, first)); /* and popped */
    assert_null(current());
    ASSERT_RESULT(CUDA_ERROR_INVALID_CONTEXT, CALL(cuCtxPushCurrent_v2, first));
    ASSERT_RESULT(CUDA_ERROR_INVALID_CONTEXT, CALL(cuCtxDestroy_v2, first));
    ASSERT_RESULT(CUDA_ERROR_INVALID_CONTEXT, CALL(cuCtxDestroy_v2, primary));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuCtxDestroy_v2, NULL));
}

static void wrong_arguments_make_none(void **state) {
    (void)state;
    CUcontext context = NULL, before = current();
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuCtxCreate_v2, NULL, 0, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuCtxCreate_v2, &context, ~0u, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_DEVICE, CALL(cuCtxCreate_v2, &context, 0, 2));
    assert_null(context);
    assert_ptr_equal(current(), before);
}

static void every_version_makes_one(void **state) {
    (void)state;
    sim_context_parameters_t parameters = {0};
    CUexecAffinityParam affinity = {.type = CU_EXEC_AFFINITY_TYPE_SM_COUNT};
    CUcontext third = NULL, fourth = NULL, refused = NULL;
    ASSERT_CUDA(CALL(cuCtxCreate_v3, &third, NULL, 0, 0, 0));
    ASSERT_CUDA(CALL(cuCtxCreate_v4, &fourth, (struct CUctxCreateParams_st *)&parameters, 0, 0));
    assert_ptr_not_equal(third, fourth);
    ASSERT_RESULT(CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY, CALL(cuCtxCreate_v3, &refused, &affinity, 1, 0, 0));
    parameters.graphics = &parameters;
    ASSERT_RESULT(CUDA_ERROR_NOT_SUPPORTED,
                  CALL(cuCtxCreate_v4, &refused, (struct CUctxCreateParams_st *)&parameters, 0, 0));
    ASSERT_CUDA(CALL(cuCtxDestroy_v2, fourth));
    ASSERT_CUDA(CALL(cuCtxDestroy_v2, third));
    assert_int_equal(CALL(calls, "cuCtxCreate"), 4);
}

static void a_program_gets_the_version_that_it_was_built_for(void **state) {
    (void)state;
    void *second = NULL, *third = NULL, *fourth = NULL, *newest = NULL;
    CUdriverProcAddressQueryResult found;
    ASSERT_CUDA(CALL(cuGetProcAddress_v2, "cuCtxCreate", &second, CUDA_11, 0, &found));
    ASSERT_CUDA(CALL(cuGetProcAddress_v2, "cuCtxCreate", &third, CUDA_12, 0, &found));
    ASSERT_CUDA(CALL(cuGetProcAddress_v2, "cuCtxCreate", &fourth, CUDA_13, 0, &found));
    ASSERT_CUDA(CALL(cuGetProcAddress_v2, "cuCtxCreate", &newest, CUDA_13, 0, NULL));
    assert_ptr_not_equal(second, third);
    assert_ptr_not_equal(third, fourth);
    assert_ptr_not_equal(second, fourth);
    assert_ptr_equal(fourth, newest);
}

static void synchronizing_waits_for_the_work_of_one_context(void **state) {
    (void)state;
    block_t block = make_block(0, 2 * GRANULE);
    CUcontext primary = current(), own = create(0);
    CUstream stream = NULL;
    ASSERT_CUDA(CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING));
    ASSERT_CUDA(CALL(launch_add, stream, block.address, 1, 1, GATE));
    ASSERT_CUDA(CALL(cuCtxPushCurrent_v2, primary));
    ASSERT_CUDA(CALL(launch_add, NULL, block.address + GRANULE, 1, 1, OTHER_GATE));
    CALL(open_gate, OTHER_GATE);
    ASSERT_CUDA(CALL(cuCtxSynchronize)); /* the other context's work has not begun */
    assert_bytes(block.address + GRANULE, 1, TMS_SIM_POISON + 1);
    assert_bytes(block.address, 1, TMS_SIM_POISON);
    ASSERT_RESULT(CUDA_ERROR_NOT_READY, CALL(cuStreamQuery, stream));
    ASSERT_CUDA(CALL(cuCtxPopCurrent_v2, NULL));
    CALL(open_gate, GATE);
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    assert_bytes(block.address, 1, TMS_SIM_POISON + 1);
    ASSERT_CUDA(CALL(cuCtxDestroy_v2, own)); /* and its stream */
    drop_block(&block);
}

static void each_context_has_default_streams_of_its_own(void **state) {
    (void)state;
    block_t block = make_block(0, GRANULE);
    CUcontext primary = current(), own = create(0);
    ASSERT_CUDA(CALL(launch_add, NULL, block.address, 1, 1, GATE));
    ASSERT_CUDA(CALL(launch_add, CU_STREAM_PER_THREAD, block.address + 1, 1, 1, GATE));
    ASSERT_RESULT(CUDA_ERROR_NOT_READY, CALL(cuStreamQuery, CU_STREAM_PER_THREAD));
    ASSERT_CUDA(CALL(cuCtxPushCurrent_v2, primary));
    ASSERT_CUDA(CALL(cuStreamQuery, NULL));
    ASSERT_CUDA(CALL(cuStreamQuery, CU_STREAM_PER_THREAD));
    ASSERT_CUDA(CALL(cuCtxPopCurrent_v2, NULL));
    CALL(open_gate, GATE);
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    ASSERT_CUDA(CALL(cuStreamQuery, CU_STREAM_PER_THREAD));
    assert_bytes(block.address, 2, TMS_SIM_POISON + 1);
    ASSERT_CUDA(CALL(cuCtxDestroy_v2, own));
    drop_block(&block);
}

static void memory_is_freed_with_its_context(void **state) {
    (void)state;
    CUdeviceptr of_primary = 0, of_own = 0;
    void *pinned = NULL;
    ASSERT_CUDA(CALL(cuMemAlloc_v2, &of_primary, GRANULE));
    CUcontext own = create(0);
    ASSERT_CUDA(CALL(cuMemAlloc_v2, &of_own, GRANULE));
    ASSERT_CUDA(CALL(cuMemHostAlloc, &pinned, MIB, 0));
    block_t block = make_block(0, GRANULE); /* belongs to no context */
    assert_int_equal(usage_of(0).host_bytes, MIB);
    ASSERT_CUDA(CALL(cuCtxDestroy_v2, own));
    assert_int_equal(usage_of(0).host_bytes, 0);
    assert_int_equal(usage_of(0).runtime_allocations, 1);
    assert_int_equal(usage_of(0).mappings, 1);
    ASSERT_CUDA(CALL(cuMemFree_v2, of_primary));
    drop_block(&block);
}

/* A context that another thread destroys stays current, and is unusable. */
static void *destroy(void *context) { return (void *)(uintptr_t)CALL(cuCtxDestroy_v2, (CUcontext)context); }

static void a_destroyed_context_stays_current_on_other_threads(void **state) {
    (void)state;
    pthread_t thread;
    void *result = NULL;
    CUdevice device = -1;
    CUcontext own = create(0);
    assert_int_equal(pthread_create(&thread, NULL, destroy, own), 0);
    assert_int_equal(pthread_join(thread, &result), 0);
    assert_int_equal((uintptr_t)result, CUDA_SUCCESS);
    assert_ptr_equal(current(), own);
    ASSERT_RESULT(CUDA_ERROR_CONTEXT_IS_DESTROYED, CALL(cuCtxSynchronize));
    ASSERT_RESULT(CUDA_ERROR_CONTEXT_IS_DESTROYED, CALL(cuCtxGetDevice, &device));
    ASSERT_CUDA(CALL(cuCtxPopCurrent_v2, NULL));
}

static void the_runtime_uses_the_current_context(void **state) {
    (void)state;
    unsigned flags = 0;
    int active = -1;
    void *memory = NULL;
    CUcontext own = create(1);
    ASSERT_CUDA(CALL(cudaMalloc, &memory, GRANULE));
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxGetState, 1, &flags, &active));
    assert_int_equal(active, 0);
    assert_int_equal(usage_of(1).runtime_allocations, 1);
    ASSERT_CUDA(CALL(cuCtxDestroy_v2, own));
    assert_int_equal(usage_of(1).runtime_allocations, 0);
}

#define TEST(test) cmocka_unit_test_setup_teardown(test, setup_two_gpus, teardown_gpus)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_new_context_is_current_until_it_is_popped_or_destroyed),
        TEST(wrong_arguments_make_none),
        TEST(every_version_makes_one),
        TEST(a_program_gets_the_version_that_it_was_built_for),
        TEST(synchronizing_waits_for_the_work_of_one_context),
        TEST(each_context_has_default_streams_of_its_own),
        TEST(memory_is_freed_with_its_context),
        TEST(a_destroyed_context_stays_current_on_other_threads),
        TEST(the_runtime_uses_the_current_context),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
